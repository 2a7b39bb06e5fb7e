"""Keeps what the programs that the script starts are about to touch.

A Python program has the hook itself (site/). Of any other, each word of its command that names a
file or folder is kept before it starts. What it does beyond that nobody can see: the report says
which programs there were.
"""

import contextlib
import fnmatch
import glob
import os
import re
import shlex
import shutil
import stat

from .disk import walk
from .journal import seen
from .shells import BEFORE, commands

READ_ONLY = """nvidia-smi rocm-smi uname lscpu lspci ls cat head tail grep find du df wc which file
ldconfig hostname id ps free getconf nproc numactl echo printf test true false sleep date stat
md5sum sha256sum""".split()
COMPILERS = "gcc g++ cc c++ clang clang++ nvcc ld as ptxas".split()  # they write what -o names
FINDS_AND_DOES = {"-delete", "-exec", "-execdir", "-ok", "-okdir", "-fprint", "-fprintf", "-fls"}
REMOVES = ("rm", "rmdir", "unlink", "shred", "mv")
COPIES = ("cp", "install", "ln", "rsync", "scp")
FILES, BYTES = 10_000, 256 << 20  # a folder with more is kept by links alone: bytes cost time


def on_popen(process, executable, args, cwd, env):
    words = shlex.split(os.fsdecode(args)) if isinstance(args, (str, bytes)) else args
    if isinstance(env, dict):  # an environment of its own: the hook must get through
        hand_on(env)
    starts(process, [os.fsdecode(word) for word in words], os.fsdecode(cwd or os.getcwd()))


def on_system(process, command):
    starts(process, ["sh", "-c", os.fsdecode(command)], os.getcwd())


def on_exec(process, path, args, env):
    if isinstance(env, dict):
        hand_on(env)
    starts(process, [os.fsdecode(word) for word in args], os.getcwd())


def hand_on(env):
    """The variables by which a Python program gets the hook."""
    for name in ("DOCTOR_FILES", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        value = os.environ.get(name)
        key = name.encode() if name.encode() in env else name
        if value and key not in env:
            env[key] = value
        elif value and name == "PYTHONPATH":  # of its own: our folder comes first
            theirs, ours = os.fsdecode(env[key]), value.partition(os.pathsep)[0]
            if ours not in theirs.split(os.pathsep):
                both = os.pathsep.join(filter(None, [ours, theirs]))
                env[key] = both.encode() if isinstance(env[key], bytes) else both


def starts(process, words, cwd):
    process.recorder.note([*process.recorder.written])
    inherited = [*process.recorder.written]  # open here: the program may write it
    for command in commands(words, cwd):
        with contextlib.suppress(ValueError):
            process.do(will_run, process.skips, *command, cwd)
            if command[0][:1] == ["cd"] and command[0][1:] and "$" not in command[0][1]:
                cwd = os.path.join(cwd, command[0][1])
    if inherited:
        process.do(lambda keeper: keeper.writes(inherited, "program"))


def will_run(keeper, skips, words, into, cwd):
    while words and BEFORE.match(words[0]):
        words = words[1:]
    name = os.path.basename(words[0]) if words else ""
    for path in named_by(into, cwd):
        if not skips(path):
            keep(keeper, path, "writes")
    reads = name in READ_ONLY and not (name == "find" and FINDS_AND_DOES & {*words})
    if not words or reads or has_hook(words):
        return
    named = words[1:]
    if name in COMPILERS and "-o" in words:
        named = [file for flag, file in zip(words, named, strict=False) if flag == "-o"]
    else:
        keeper.journal.append({"do": "program", "name": name})
    if name == "cd":
        return
    paths = [path for path in named_by(named, cwd) if not skips(path)]
    if name in COPIES:
        if makes_names(name, words[1:]):
            for path in paths[:-1]:  # a second name of what was there, by which it may be written
                keep(keeper, path, "removes")
        paths = targets(paths)
    how = "removes" if name in REMOVES or "-delete" in words else "writes"
    for path in paths:
        keep(keeper, path, how)
    if name == "mv":
        for path in targets(paths):
            keep(keeper, path, how)


def makes_names(name, words):
    """Whether it makes hard links: ln without -s, cp -l."""
    symbolic = any(re.match(r"-\w*s|--symbolic", word) for word in words)
    return not symbolic if name == "ln" else any(re.match(r"-\w*l|--link", w) for w in words)


def has_hook(words):
    """Whether it is a Python that reads our site folder, or a script for one."""
    name = os.path.basename(words[0])
    if fnmatch.fnmatch(name, "python*") or fnmatch.fnmatch(name, "pypy*"):
        return not any(re.match(r"-[a-zA-Z]*[IES]", word) for word in words[1:3])
    found = shutil.which(words[0])
    with contextlib.suppress(OSError), open(found or "", "rb") as file:
        return b"python" in file.read(200).partition(b"\n")[0] and bool(found)
    return False


def named_by(words, cwd):
    """The paths that words may mean: absolute, their folders without links, patterns expanded."""
    paths = []
    for word in words:
        for part in {word, word.partition("=")[2] if "=" in word else word}:  # of=FILE, --out=FILE
            if not part or part.startswith("-") or len(part) > 4096 or "\0" in part:
                continue
            path = os.path.join(cwd, os.path.expandvars(os.path.expanduser(part)))
            found = glob.glob(path) if glob.has_magic(path) else []
            paths += [os.fsencode(one) for one in found or [path]]
    return [whole(path) for path in paths]  # `cp -r a a` names one twice, and writes a/a


def whole(path):
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def targets(paths):
    """What cp or mv writes: the last, or what it gets in a folder."""
    *sources, last = paths or [b"/"]
    if os.path.isdir(last):
        return [whole(os.path.join(last, os.path.basename(source))) for source in sources]
    return [last]


def keep(keeper, path, how):
    """how: 'removes' needs a link; 'writes' a fresh inode as well, for it may be written there."""
    info = seen(path)
    if info and stat.S_ISLNK(info.st_mode) and how == "writes":
        target = os.path.realpath(path)
        if not os.path.islink(target):  # else it is a circle
            keep(keeper, target, how)
    if not info:
        new = path
        while not seen(os.path.dirname(new)):  # as mkdir -p makes them
            new = os.path.dirname(new)
        keeper.will_make(new)
    elif stat.S_ISDIR(info.st_mode):
        if path == b"/" or os.path.ismount(path):
            return
        keep_folder(keeper, path, how)
    elif how == "removes" or info.st_size > BYTES or stat.S_ISLNK(info.st_mode):
        keeper.will_remove(path)
    else:
        keeper.will_write(path, False, "program")
    keeper.writes([path], "program")


def keep_folder(keeper, path, how):
    count = size = 0
    for _, info in walk(path):
        count, size = count + 1, size + info.st_size
        if count > 10 * FILES:
            return
    if how == "removes" or count > FILES or size > BYTES:
        keeper.will_remove_tree(path)
        return
    for inner, info in [*walk(path)]:
        if stat.S_ISREG(info.st_mode):
            keeper.will_write(inner, False, "program")
        else:
            keeper.will_remove(inner)
