"""What git does with files: its own folder is kept, and what it may change beside it."""

import contextlib
import os

from .disk import walk, without_links
from .names import paths_named, values_of

READS = """status diff log rev-parse describe show ls-files ls-tree cat-file blame shortlog
rev-list version --version show-ref for-each-ref merge-base ls-remote grep name-rev
check-ignore""".split()
# These only ask, too, with nothing but these words, or with one of those.
ASKS = {"branch": "-a -r -v -vv --all", "remote": "-v get-url show origin", "tag": "-n"}
ASKS |= {"submodule": "status", "symbolic-ref": "--short -q HEAD", "reflog": "show HEAD"}
ONLY_ASKS = """-l --list --get --get-all --get-regexp --show-current --points-at --contains
--merged""".split()
WITH_UNKNOWN = "-u -a --include-untracked --all".split()
OWN_ONLY = "commit tag fetch push branch config remote gc notes".split()  # of its own folder


def of_git(words, folder):
    words = [*words]
    while words and words[0] in ("-C", "-c"):
        folder = os.path.join(folder, words[1]) if words[0] == "-C" and words[1:] else folder
        words = words[2:]
    flags = [word for word in words if word.startswith("-")]
    name = next((word for word in words if not word.startswith("-")), flags[0] if flags else "")
    asks = name in ASKS and {*words} <= {name, *ASKS[name].split()}
    asks = asks or (name in (*ASKS, "config") and {*words} & {*ONLY_ASKS})
    if name in READS or not name or asks or words[:2] == ["stash", "list"]:
        return paths_named("writes", values_of(words, "@", "output"), folder)
    if name in ("clone", "init"):
        names = [word for word in words[words.index(name) + 1 :] if word not in flags] or ["."]
        made = os.path.join(names[-1], ".git")
        if name == "clone":  # from the first: it is only read
            made = os.path.basename(names[0].rstrip("/")).removesuffix(".git")
            made = names[-1] if names[1:] else made
        return paths_named("writes", [made], folder)
    top = os.path.realpath(folder)
    while not os.path.exists(os.path.join(top, ".git")) and os.path.dirname(top) != top:
        top = os.path.dirname(top)
    own = gits_folders(os.path.join(top, ".git"))
    if not own:  # yet, where an earlier command of the line makes it
        return [] if name in (*OWN_ONLY, "add") else [("near", without_links(os.fsencode(folder)))]
    if name == "add":
        return [("removes", os.path.join(own[0], b"index"))]
    inner = [path for one in own for path, _ in walk(one) if b"/objects/" not in path]
    found = [("writes", path) for path in inner if not os.path.isdir(path)]
    # What git does not know it takes away, too.
    clears = name == "clean" or (name == "stash" and {*flags} & {*WITH_UNKNOWN})
    beside = [("clears" if clears else "near", os.fsencode(top))]
    return found + ([] if name in OWN_ONLY else beside)


def gits_folders(path):
    """[git's own folder], or of a worktree [its own, that of all worktrees]."""
    found = []
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path) as file:
                path = os.path.join(os.path.dirname(path), file.read().partition(":")[2].strip())
            common = os.path.join(path, "commondir")
            if os.path.isfile(common):
                with open(common) as file:
                    found = [os.path.join(path, file.read().strip())]
        found = [path, *found]
    return [os.fsencode(os.path.realpath(one)) for one in found if os.path.isdir(one)]
