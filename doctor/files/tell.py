"""The report's lines on files: what was put back, what was removed, what was left and why."""

import os
import sys
import tempfile

from ..words import listed, say
from .journal import MTIME, SIZE
from .paths import below, parents, seen

MANY = 12  # more names than this nobody reads


def lines(done, work_folder, unseen=(), earlier=False):
    """done: a Restore that was done. unseen: what the inventory found besides.

    earlier: of a run whose doctor was killed.
    """
    said = []

    def tell(text, paths):
        paths = sorted({shown(path, work_folder) for path in paths})
        names = listed(paths[:MANY])
        if len(paths) > MANY:
            names = say("{names} and {count} more", names=names, count=len(paths) - MANY)
        if paths:
            said.append(say("{text}: {names}", text=text, names=names))

    put = say("put back as before that run") if earlier else say("put back as before this run")
    tell(put, done.put)
    new = worth_telling(done.removed, work_folder)
    tell(say("removed, for it was new (--keep leaves it)"), new)
    tell(say("left, for --keep was given"), shorter(done.kept_new))
    cached = shorter(done.cached)[:3]
    tell(say("left in caches, so that nothing is downloaded again"), cached)
    said += [of_one_left(*one, work_folder) for one in dict.fromkeys(done.left)]
    known = {path for path, *_ in done.left} | {*done.kept_new, *done.cached}
    others = [one for one in unseen if known.isdisjoint([one, *parents(one)])]
    tell(say("changed or new, by something that the doctor cannot see"), others)
    programs = sorted(done.journal.programs - {"cd"})[:MANY]
    if programs:
        text = say("of programs, only the files that their commands name are kept")
        said.append(say("{text}: {names}", text=text, names=listed(programs)))
    many = say("more files than are kept for a program; what it did to the others stays")
    tell(many, done.journal.many)
    large = say("too large to be copied, and written by a program: what was in them is lost")
    tell(large, [path for path in done.journal.large if was_written(path, done.journal)])
    for note in sorted(done.journal.notes):
        said.append(say("the doctor failed, and may have missed a file: {note}", note=note))
    return said


def not_all(journal, error):
    return say(
        "not all was put back: {error}; what is kept: {folder}",
        error=f"{type(error).__name__}: {error}",
        folder=os.fsdecode(journal.folder),
    )


def was_written(path, journal):
    """Whether a file that was kept by a link alone has other bytes by now."""
    info = seen(path)
    old = journal.facts.get((info.st_dev, info.st_ino)) if info else None
    return bool(old) and (info.st_size, info.st_mtime_ns) != (old[SIZE], old[MTIME])


def of_one_left(path, why, older, work_folder):
    text = say("left: {file}: {why}", file=shown(path, work_folder), why=why)
    if older:
        lies = shown(older, work_folder)
        text = say("{text}; the older one: {file}", text=text, file=lies)
    return text


def worth_telling(paths, work_folder):
    """Not what the launcher and libraries make below the temporary folder."""
    temporary = os.fsencode(os.path.realpath(tempfile.gettempdir()))
    paths = [one for one in paths if below(one, work_folder) or not below(one, temporary)]
    return shorter(paths)


def shorter(paths):
    """A folder that was new, without each file in it."""
    paths = {*paths}
    return [path for path in paths if paths.isdisjoint(parents(path))]


def shown(path, folder):
    """A name that fits into a line, whatever bytes it has."""
    if below(path, folder):
        path = os.path.relpath(path, folder)
    text = path.decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    terminal = getattr(sys.stdout, "encoding", None) or "ascii"  # LC_ALL=C knows ASCII alone
    return text.encode(terminal, "backslashreplace").decode(terminal)
