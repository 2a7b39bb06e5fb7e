"""Keeps what the programs that the script starts are about to touch.

A Python program has the hook itself (pythons.py). Of any other, each word of its command that names
a file or folder is kept before it starts: shells.py reads its line or script, effects.py knows what
usual programs do. What they do beyond that nobody can see: the report says which there were.
"""

import contextlib
import itertools
import os
import stat

from .disk import walk
from .effects import effects, reads_only
from .journal import NotKept
from .keep import Keeper
from .names import NEAR, near, paths_named
from .opened import PROGRAM
from .paths import seen
from .pythons import hand_on, has_hook
from .shells import commands
from .syntax import UNKNOWN

# Of a folder, so many files are kept by links; fewer are copied, as a program may write them.
LINKS, FILES, BYTES = 20_000, 10_000, 256 << 20


def on_popen(process, executable, args, cwd, env):
    starts(process, [executable, *args[1:]], os.fsdecode(cwd or here()), env)


def on_system(process, command):
    starts(process, ["sh", "-c", os.fsdecode(command)], here(), None)


def on_exec(process, path, args, env):
    starts(process, [path, *args[1:]], here(), env)


def here():
    try:
        return os.getcwd()
    except OSError:  # it is gone: what is named by a whole path is there
        return "/"


def starts(process, words, cwd, env):
    words = [os.fsdecode(word) for word in words]
    env = os.environ if env is None else env
    with contextlib.suppress(Exception):  # one that cannot be changed
        hand_on(env)  # the hook must get through
    process.recorder.note([*process.recorder.written])
    inherited = [*process.recorder.written]  # open here: the program may write it
    variables = {}
    if hasattr(env, "items"):
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    process.do(will_run, process.skips, commands(words, cwd, variables))
    for path in inherited:
        process.do(Keeper.writes, path, PROGRAM)


def will_run(keeper, skips, found):
    """found: the Commands of one start."""
    unclear = False
    for command in found:
        touched = {}
        for folder in command.folders:
            with contextlib.suppress(ValueError):  # a word that names nothing
                touched |= dict.fromkeys(of_command(keeper, command, os.path.abspath(folder)))
        for how, path in touched:
            unclear = unclear or how in NEAR
            if not skips(path):
                keep_or_note(keeper, path, how, command.sure)
    if unclear:  # names come from a pipe or a variable: perhaps these
        for command, folder in ((one, folder) for one in found for folder in one.folders):
            with contextlib.suppress(ValueError):
                for _, path in paths_named("near", command.words[1:], folder):
                    if not skips(path) and seen(path):
                        keep_or_note(keeper, path, "near")


def of_command(keeper, command, folder):
    """What it does with files, from this folder."""
    words = command.words
    found = [
        *paths_named("writes", command.into, folder),
        *paths_named("cuts", command.cuts, folder),
    ]
    found = [("written", path) if how == "near" else (how, path) for how, path in found]
    python = has_hook(words) if words else None
    if words and not (python and command.hooked):
        does = effects(words, folder)
        if not reads_only(words, does):
            name = os.path.basename(words[0]).replace(UNKNOWN, "$")
            keeper.journal.append({"do": "program", "name": name})
            if command.given or python is not None:  # one without the hook
                does = does + near(os.path.join(folder, UNKNOWN))
        found += does
    return found


def keep_or_note(keeper, path, *how):
    """One that may not be read, say, does not keep the others from being kept."""
    try:
        keep(keeper, path, *how)
    except NotKept:
        raise
    except OSError as error:
        keeper.journal.append({"do": "note", "text": f"{type(error).__name__}: {error}"})


def keep(keeper, path, how, sure=False):
    """how: see names.py. sure: the program begins now."""
    info = seen(path)
    writes = how not in ("goes", "removes", "near")
    if info and stat.S_ISLNK(info.st_mode) and writes:
        target = os.path.realpath(path)
        if not os.path.islink(target):  # else it is a circle
            keep(keeper, target, how, sure)
    if not info:
        if how == "goes" or how in NEAR:
            return
        new = path
        while not seen(os.path.dirname(new)):  # as mkdir -p makes them
            new = os.path.dirname(new)
        keeper.will_make(new)
    elif stat.S_ISDIR(info.st_mode):
        if path != b"/":
            keep_folder(keeper, path, how)
    elif not writes or stat.S_ISLNK(info.st_mode):
        keeper.will_remove(path)
    elif info.st_size <= BYTES:
        keeper.will_write(path, False, PROGRAM)
    elif how == "cuts" and sure:
        keeper.will_write(path, True, PROGRAM)  # nobody reads it before it is cut
    elif how in ("cuts", "alone") and has_room(path, info):
        keeper.will_write(path, False, PROGRAM)
    else:
        keeper.will_remove(path)
        if keeper.others.is_protected(info):
            keeper.journal.append({"do": "large", "path": path})
    if how != "goes" and how not in NEAR:  # what is there at the end is the run's
        keeper.writes(path, PROGRAM)


def has_room(path, info):
    """For a copy, which takes as long as the program's own."""
    place = os.statvfs(os.path.dirname(path))
    return place.f_bavail * place.f_frsize > 2 * info.st_size


def keep_folder(keeper, path, how):
    if how in ("goes", "removes"):  # all of it, as shutil.rmtree
        keeper.will_remove_tree(path)
        keeper.refuse_if_store_inside(path)  # Python's own rmtree does not see it: listing.py
        return
    few = [*itertools.islice(walk(path), LINKS + 1)]
    if len(few) > LINKS:
        keeper.journal.append({"do": "many", "path": path})
        few.pop()
    keeper.will_remove_tree(path, few)
    if how == "clears":
        keeper.refuse_if_store_inside(path)
    left = 0 if how in ("near", "clears") else BYTES
    for inner, info in sorted(few, key=lambda one: one[1].st_size)[:FILES]:
        if stat.S_ISREG(info.st_mode) and info.st_size <= left:
            left -= info.st_size
            keeper.will_write(inner, False, PROGRAM)
