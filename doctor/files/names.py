"""Which files and folders a command's words name, and how a program touches them.

Pairs (how, path), path being absolute bytes whose folder has no links:

goes      it is removed: a link keeps it
removes   it goes or gets another name, and the program may put another in its place
writes    it may also be written where it lies: its name gets a fresh inode
cuts      as writes, but it is emptied first
alone     as writes, and a large file is copied too: the program takes none that has two names
near      something of it may go or be moved, and only the program knows what
clears    as near, and what is hidden goes, too
written   as near, and it may be written where it lies
"""

import glob
import itertools
import os
import re

from .disk import without_links
from .syntax import UNKNOWN

NEAR = {"near", "clears", "written"}  # what is there at the end may be somebody else's


def paths_named(how, words, folder):
    """The paths that words may mean: patterns are expanded; one that is not clear is near."""
    found = []
    if "--" in words:  # what comes then is no flag
        at = words.index("--")
        words = [*words[:at], *(os.path.join(".", word) for word in words[at + 1 :])]
    for word in words:
        for part in {word, word.partition("=")[2] if "=" in word else word}:  # of=FILE, --out=FILE
            if not part or part.startswith("-") or len(part) > 4096 or "\0" in part:
                continue
            path = os.path.join(folder, os.path.expanduser(part))
            if UNKNOWN in path:
                found += near(path)
                continue
            deep = sum(map(glob.has_magic, path.split("/")))  # each level takes its time
            more = glob.glob(path) if 0 < deep < 4 else []
            if path.endswith("/") and os.path.islink(path.rstrip("/")):
                more += [os.path.realpath(path), path]
            if not more or os.path.lexists(path):
                more.append(path)
            found += [(how, without_links(os.fsencode(one))) for one in more]
    return found


def near(path):
    """What may be meant by it: all names that begin so, or a folder."""
    begin = path.partition(UNKNOWN)[0]
    if begin.endswith("/"):
        return [("near", without_links(os.fsencode(begin)))]
    return [
        ("near", without_links(os.fsencode(one))) for one in glob.glob(glob.escape(begin) + "*")
    ]


def values_of(words, letters, long):
    """What follows a flag: -o FILE, -oFILE, -uo FILE, --output=FILE, --output FILE."""
    found = []
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag = re.fullmatch(rf"-(?:[a-zA-Z]*?[{letters}]|-{long}=?)(.*)", word)
        if flag:
            found.append(flag[1] or after)
    return found
