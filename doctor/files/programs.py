"""Keeps what the programs that the script starts are about to touch.

A Python program has the hook itself (pythons.py). Of any other, each word of its command that names
a file or folder is kept before it starts: shells.py reads its line or script, effects.py knows what
usual programs do. What they do beyond that nobody can see: the report says which there were.
"""

import contextlib
import itertools
import os
import shlex
import stat

from .disk import walk
from .effects import effects, named, near, reads_only
from .journal import seen
from .pythons import hand_on, has_hook
from .shells import commands
from .syntax import UNKNOWN

FILES, BYTES = 10_000, 256 << 20  # a folder with more is kept by links alone: bytes cost time


def on_popen(process, executable, args, cwd, env):
    words = shlex.split(os.fsdecode(args)) if isinstance(args, (str, bytes)) else args
    starts(process, [os.fsdecode(word) for word in words], os.fsdecode(cwd or here()), env)


def on_system(process, command):
    starts(process, ["sh", "-c", os.fsdecode(command)], here(), None)


def on_exec(process, path, args, env):
    starts(process, [os.fsdecode(word) for word in args], here(), env)


def here():
    try:
        return os.getcwd()
    except OSError:  # it is gone: what is named by a whole path is there
        return "/"


def starts(process, words, cwd, env):
    env = os.environ if env is None else env
    with contextlib.suppress(Exception):  # one that cannot be changed
        hand_on(env)  # the hook must get through
    process.recorder.note([*process.recorder.written])
    inherited = [*process.recorder.written]  # open here: the program may write it
    variables = {}
    if hasattr(env, "items"):
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    process.do(will_run, process.skips, commands(words, cwd, variables))
    if inherited:
        process.do(lambda keeper: keeper.writes(inherited, "program"))


def will_run(keeper, skips, found):
    """found: the Commands of one start."""
    unclear = False
    for command in found:
        touched = {}
        for folder in command.folders:
            with contextlib.suppress(ValueError):  # a word that names nothing
                touched |= dict.fromkeys(of_command(keeper, command, os.path.abspath(folder)))
        for how, path in touched:
            unclear = unclear or how == "near"
            if not skips(path):
                keep(keeper, path, how, command.sure)
    if unclear:  # names come from a pipe or a variable: perhaps these
        for command, folder in ((one, folder) for one in found for folder in one.folders):
            with contextlib.suppress(ValueError):
                for _, path in named("near", command.words[1:], folder):
                    if not skips(path) and seen(path):
                        keep(keeper, path, "near")


def of_command(keeper, command, folder):
    """What it does with files, from this folder."""
    words = command.words
    found = [*named("writes", command.into, folder), *named("cuts", command.cuts, folder)]
    is_python = bool(words) and has_hook(words)
    if words and not (is_python and command.hooked):
        does = effects(words, folder)
        if not reads_only(words, does):
            name = os.path.basename(words[0]).replace(UNKNOWN, "$")
            keeper.journal.append({"do": "program", "name": name})
            if command.given or is_python:  # without the hook
                does = does + near(os.path.join(folder, UNKNOWN))
        found += does
    return found


def keep(keeper, path, how, sure=False):
    """how: see effects.py. sure: the program begins now."""
    info = seen(path)
    writes = how in ("writes", "cuts")
    if info and stat.S_ISLNK(info.st_mode) and writes:
        target = os.path.realpath(path)
        if not os.path.islink(target):  # else it is a circle
            keep(keeper, target, how, sure)
    if not info:
        if how == "near":
            return
        new = path
        while not seen(os.path.dirname(new)):  # as mkdir -p makes them
            new = os.path.dirname(new)
        keeper.will_make(new)
    elif stat.S_ISDIR(info.st_mode):
        if path == b"/" or (os.path.ismount(path) and how != "removes"):
            return
        keep_folder(keeper, path, how)
    elif not writes or stat.S_ISLNK(info.st_mode):
        keeper.will_remove(path)
    elif info.st_size <= BYTES or (how == "cuts" and (sure or has_room(path, info))):
        large = info.st_size > BYTES  # else it is copied: another may read it before it is cut
        keeper.will_write(path, sure and large and how == "cuts", "program")
    else:
        keeper.will_remove(path)
        if keeper.others.is_protected(info):
            keeper.journal.append({"do": "large", "path": path})
    if how != "near":  # then whatever is there is the run's
        keeper.writes([path], "program")


def has_room(path, info):
    """For a copy, which takes as long as the program's own."""
    place = os.statvfs(os.path.dirname(path))
    return place.f_bavail * place.f_frsize > 2 * info.st_size


def keep_folder(keeper, path, how):
    if how == "removes":  # all of it, as shutil.rmtree
        keeper.will_remove_tree(path)
        return
    few = [*itertools.islice(walk(path), 10 * FILES + 1)]
    if len(few) > 10 * FILES:
        return
    if how == "near" or len(few) > FILES or sum(info.st_size for _, info in few) > BYTES:
        keeper.will_remove_tree(path)
        return
    for inner, info in few:
        if stat.S_ISREG(info.st_mode):
            keeper.will_write(inner, False, "program")
        else:
            keeper.will_remove(inner)
