"""Sees to it that a Python which the script starts has the hook, whatever the script's environment.

Three variables bring it there. They are remembered when the hook is installed: a script may set
PYTHONPATH anew, or empty os.environ.
"""

import contextlib
import fnmatch
import os
import re
import shutil

from .instead import put_instead

NAMES = ("DOCTOR_FILES", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
OURS = {}  # as this process got them


def install():
    """Before the hook looks: what goes by events is handed on in programs.py."""
    OURS.update({name: os.environ[name] for name in NAMES if name in os.environ})
    for name in ("execve", "posix_spawn", "posix_spawnp"):
        if hasattr(os, name):  # their event comes when the environment has been read
            wrap(os, name, 2, "env")
    with contextlib.suppress(ImportError):
        import _posixsubprocess  # by which multiprocessing starts its processes: no event tells

        wrap(_posixsubprocess, "fork_exec", 5, None)


def wrap(module, name, number, keyword):
    real = getattr(module, name)

    def call(*args, **kwargs):
        with contextlib.suppress(Exception):
            env = args[number] if len(args) > number else kwargs.get(keyword)
            hand_on(os.environ if env is None else env)
        return real(*args, **kwargs)

    put_instead(module, name, call)


def hand_on(env):
    """Give an environment, a dict or os.environ, what is missing; others are left as they are."""
    if not hasattr(env, "keys"):
        return
    for name in NAMES:
        value = OURS.get(name) or os.environ.get(name)
        if name == "PYTHONPATH" and value:
            value = value.partition(os.pathsep)[0]  # the others are the script's to choose
        key = name.encode() if name.encode() in list(env.keys()) else name
        if value and key not in env:
            env[key] = value
        elif value and name == "PYTHONPATH":  # of its own: our folder comes first
            theirs = os.fsdecode(env[key])
            if value not in theirs.split(os.pathsep):
                both = os.pathsep.join(filter(None, [value, theirs]))
                env[key] = both.encode() if isinstance(env[key], bytes) else both


def leads_here(path):
    """Whether a PYTHONPATH that a shell sets still has our folder."""
    ours = OURS.get("PYTHONPATH", "").partition(os.pathsep)[0]
    return ours in path.split(os.pathsep) or "PYTHONPATH" in path


def ignores_hook(words):
    """Whether what env is told, or stands before a command, takes our PYTHONPATH away."""
    text = " ".join(words)
    if re.search(r"(^| )(-\w*i\w*|-|--ignore-environment)( |$)", text):
        return True
    if re.search(r"(^| )(-u|--unset=) ?(PYTHONPATH|DOCTOR_FILES)( |$)", text):
        return True
    given = [word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")]
    return not all(map(leads_here, given))


def has_hook(words):
    """Whether it is a Python that reads our site folder, or a script for one; None: no Python."""
    found = shutil.which(words[0])
    name, real = os.path.basename(words[0]), os.path.realpath(found or words[0])
    if re.match(r"python(2|3\.\d(\D|$))", os.path.basename(real)):
        return False  # older than the doctor
    if fnmatch.fnmatch(name, "python*") or fnmatch.fnmatch(name, "pypy*"):
        return not is_isolated(words[1:])
    with contextlib.suppress(OSError), open(found or "", "rb") as file:
        first = file.read(200).partition(b"\n")[0].decode(errors="replace")
        _, python, flags = first.partition("python")
        return not is_isolated(flags.split()[1:]) if found and python else None
    return None


def is_isolated(words):
    """Whether a Python's flags say that it reads no PYTHONPATH, or no site folder."""
    words = iter(words)
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word[1:2] in ("c", "m", ""):
            return False
        flags, value = re.fullmatch(r"-([^WX]*)(.*)", word).groups()
        if set(flags) & set("IES"):
            return True
        if value in ("W", "X"):  # what it says is the next word
            next(words, None)
    return False
