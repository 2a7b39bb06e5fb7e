"""Is this Python process a rank? If so it becomes `python doctor SCRIPT`, which looks at it.

Python's sitecustomize (files/site) asks here, before anything is run. A process that runs a script
of the user's is replaced by `python doctor SCRIPT`, which looks at it: the same process, with the
same environment. This file is loaded alone: it imports nothing of the package.
"""

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# What tells a rank from the process that has started it.
NUMBERS = "RANK LOCAL_RANK SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK HOROVOD_RANK".split()
EXAMINED = "DOCTOR_RANK"  # the numbers of a process that is looked at, for those that it starts


def examine_if_it_is_a_rank():
    """Does not return if it is one. A helper that a rank starts has the rank's numbers: it is none.

    So a script that starts itself again with other numbers, as Lightning does, is looked at.
    """
    run = parsed(sys.orig_argv[1:])
    if run and "DOCTOR" in os.environ and os.environ.get(EXAMINED) != numbers():
        options, words = run
        if is_users(words):
            mark()
            os.execv(sys.executable, [sys.executable, *options, HERE, *words])


def mark():
    """This process is looked at."""
    os.environ[EXAMINED] = numbers()


def numbers():
    return " ".join(f"{name}={os.environ[name]}" for name in NUMBERS if name in os.environ)


def parsed(words):
    """(Python's options, [a script or -m and a module, its flags]); None for -c, or no script."""
    options, words = [], list(words)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        found = re.match(r"-([bBdEhiIOPqsSuvV?x]*)(-check-hash-based-pycs$|[cmWX]|$)(.*)", word)
        plain, last, rest = found.groups() if found else ("", "?", "")
        if last in ("c", "?"):
            return None
        if last == "m":
            options += [f"-{plain}"] if plain else []
            return options, ["-m", *([rest] if rest else []), *words]
        options.append(word)
        if last and not rest:  # -W ignore
            options += words[:1]
            del words[:1]
    return (options, words) if words and words[0] != "-" else None


def is_users(words):
    """A script of the user's; not what a library has installed as a command, such as torchrun."""
    if words[0] == "-m":
        places = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        name = words[1].replace(".", os.sep) if words[1:] else "?"
        return any(
            os.path.isfile(os.path.join(place, name + end))
            for place in filter(None, places)
            for end in (".py", f"{os.sep}__main__.py")
        )
    path = os.path.abspath(words[0])
    library = re.search(r"/lib(64)?/python\d|(site|dist)-packages", path)
    mine = os.path.realpath(path).startswith(os.path.realpath(HERE) + os.sep)
    return path.endswith(".py") and os.path.isfile(path) and not library and not mine
