"""The report's lines on files: what was put back, what was removed, what was left and why."""

import os
import sys
import tempfile

from .journal import below, parents

MANY = 12  # more names than this nobody reads


def lines(done, work_folder, unseen=(), of="this run"):
    """done: a Restore that was done. unseen: what the inventory found besides."""
    said = []

    def say(text, paths):
        paths = sorted({shown(path, work_folder) for path in paths})
        more = f" and {len(paths) - MANY} more" if len(paths) > MANY else ""
        if paths:
            said.append(f"{text}: {', '.join(paths[:MANY])}{more}")

    say(f"put back as before {of}", done.put)
    say("removed, for it was new (--keep leaves it)", worth_telling(done.removed, work_folder))
    say("left, for --keep was given", shorter(done.kept_new))
    if done.cached:
        say("left in caches, so that nothing is downloaded again", shorter(done.cached)[:3])
    for path, why, older in dict.fromkeys(done.left):
        lies = f"; the older one: {shown(older, work_folder)}" if older else ""
        said.append(f"left: {shown(path, work_folder)}: {why}{lies}")
    known = {path for path, *_ in done.left} | {*done.kept_new, *done.cached}
    others = [one for one in unseen if known.isdisjoint([one, *parents(one)])]
    say("changed or new, by something that the doctor cannot see", others)
    programs = sorted(done.journal.programs - {"cd"})
    if programs:
        names = ", ".join(programs[:MANY])
        said.append(f"of programs, only the files that their commands name are kept: {names}")
    for note in sorted(done.journal.notes):
        said.append(f"the doctor failed, and may have missed a file: {note}")
    return said


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
