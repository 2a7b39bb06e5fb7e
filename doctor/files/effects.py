"""What a program does with the files and folders that its words name.

Pairs (how, path), path being absolute bytes whose folder has no links:

removes   it goes, or gets another name: a link keeps it
writes    it may also be written where it lies: its name gets a fresh inode
cuts      as writes, but it is emptied first
near      something of it may go or be moved, and only the program knows what
"""

import glob
import itertools
import os
import re

from .disk import walk
from .syntax import UNKNOWN

READ_ONLY = """nvidia-smi rocm-smi uname lscpu lspci ls cat head tail grep egrep fgrep find du df wc
which file ldconfig hostname id ps free getconf nproc numactl echo printf test true false sleep date
stat md5sum sha1sum sha256sum cksum diff cmp comm cut tr uniq paste column basename dirname realpath
readlink tree less more seq jq env printenv whoami uptime yes kill pkill pgrep killall xargs
sort sed git tar""".split()  # the last ones, and find: not with every flag
COMPILERS = "gcc g++ cc c++ clang clang++ nvcc ld as ptxas".split()  # they write what -o names
FINDS_AND_DOES = {"-delete", "-exec", "-execdir", "-ok", "-okdir", "-fprint", "-fprintf", "-fls"}
REMOVES = ("rm", "rmdir", "unlink", "shred")
COPIES = ("cp", "mv", "install", "ln", "rsync", "scp")
PACKS = {"gzip": ".gz", "pigz": ".gz", "bzip2": ".bz2", "xz": ".xz", "zstd": ".zst"}
PACKS |= {"gunzip": ".gz", "bunzip2": ".bz2", "unxz": ".xz", "unzstd": ".zst"}
GIT_READS = """status diff log rev-parse describe show ls-files ls-tree cat-file blame shortlog
rev-list version --version""".split()
GIT_ONLY = "commit tag fetch push branch config remote gc notes".split()  # of its own folder


def effects(words, folder):
    name, words = os.path.basename(words[0]), words[1:]
    if name == "find" and FINDS_AND_DOES & {*words}:
        return named("removes" if "-delete" in words else "writes", words, folder)
    if name == "git":
        return of_git(words, folder)
    if name == "tar" and (archive := packed_by_tar(words)) is not None:
        return named("writes", archive, folder)
    if name == "tar" or (name == "sort" and any(re.match("-o|--output", w) for w in words)):
        return named("writes", words, folder)
    if name == "sed" and any(re.match(r"-\w*i|--in-place", word) for word in words):
        return named("writes", words, folder)
    if name in READ_ONLY:
        return []
    if name in COMPILERS and "-o" in words:
        outputs = [after for flag, after in itertools.pairwise(words) if flag == "-o"]
        return named("writes", outputs, folder)
    if name in COPIES:
        return of_copies(name, words, folder)
    if name == "zip":
        archive = next((word for word in words if not word.startswith("-")), "")
        ends = "" if "." in os.path.basename(archive) or not archive else ".zip"
        moves = any(re.match(r"-[a-zA-Z]*m|--move", word) for word in words)
        found = named("removes", [w for w in words if w != archive], folder) if moves else []
        return [*found, *named("writes", [archive + ends], folder)]
    if name in PACKS:
        return of_packing(PACKS[name], words, folder)
    how = "removes" if name in REMOVES else "writes"
    found = named(how, words, folder)
    return [(h, p) for h, p in found if h != "near"] if name in ("mkdir", "mktemp") else found


def reads_only(words, found):
    """Whether it is not worth a word in the report."""
    name = os.path.basename(words[0])
    return name in COMPILERS or (name in READ_ONLY and not found)


def named(how, words, folder):
    """The paths that words may mean: patterns are expanded; one that is not clear is near."""
    found = []
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
            found += [(how, whole(os.fsencode(one))) for one in more]
    return found


def near(path):
    """What may be meant by it: all names that begin so, or a folder."""
    begin = path.partition(UNKNOWN)[0]
    if begin.endswith("/"):
        return [("near", whole(os.fsencode(begin)))]
    return [("near", whole(os.fsencode(one))) for one in glob.glob(glob.escape(begin) + "*")]


def whole(path):
    path = path.rstrip(b"/") or b"/"
    folder, name = os.path.split(path)
    if name in (b"", b".", b".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(folder), name)


# ---- programs that copy


def of_copies(name, words, folder):
    words, target, flags = parted(name, words)
    *sources, last = words if target is None else [*words, target]
    if not sources:
        sources, last = [last], "."  # ln -s ../data
    (last_how, last), *_ = named("removes", [last], folder) or [("near", b"/")]
    if last_how == "near":
        return named("removes" if name == "mv" else "near", words, folder) + [(last_how, last)]
    found = [("removes", last)] if os.path.islink(last) else []
    if "--delete" in " ".join(flags):
        found.append(("removes", os.path.realpath(last)))
    short = "".join(flag[1:] for flag in flags if not flag.startswith("--"))
    into = os.path.isdir(last) and not ("T" in short or "--no-target-directory" in flags)
    hard = (
        ("s" not in short and "--symbolic" not in flags)
        if name == "ln"
        else (name == "cp" and ("l" in short or "--link" in flags))
    )
    in_place = {"--inplace", "--append", "--append-verify"} & {*flags}
    how = {"cp": "cuts", "install": "writes", "scp": "writes"}.get(name, "removes")
    how = "writes" if name == "rsync" and in_place else how
    if name == "cp" and (set(short) & set("niul") or any("--" in flag for flag in flags)):
        how = "writes"  # it may leave it as it is
    for source in sources:
        for kind, path in named("removes", [source], folder):
            if kind == "near":
                found += [(kind, path), *([("near", last)] if into else [])]
                continue
            if name == "mv" or hard or "--remove-source-files" in flags:
                found.append(("removes", path))  # hard: a second name, by which it may be written
            base = os.path.join(last, os.path.basename(path)) if into else last
            bases = {base}
            if re.search(r"(^|/)\.{0,2}$", source):  # what is in it
                bases = {last, base} if source.endswith("/") and name != "rsync" else {last}
            for one in bases:
                found += of_copy(path, one, how, name)
    return [(how, whole(path)) for how, path in found]


def parted(name, words):
    """(words without flags, the folder of -t or None, flags)"""
    flags, others, target, words = [], [], None, iter(words)
    for word in words:
        if name in ("cp", "mv", "ln", "install") and re.fullmatch(r"-[a-zA-Z]*t", word):
            target = next(words, ".")
        elif word.startswith("--target-directory"):
            target = word.partition("=")[2] or next(words, ".")
        elif name == "install" and word in ("-m", "-o", "-g"):
            next(words, None)
        elif word.startswith("-") and word != "-":
            flags.append(word)
        else:
            others.append(word)
    return others or ["."], target, flags


def of_copy(source, target, how, name):
    """What a copy of a file or folder writes."""
    if not os.path.isdir(source) or name in ("mv", "ln"):
        clear = how != "cuts" or (os.path.isfile(source) and not is_same(source, target))
        return [(how if clear else "writes", target)]
    found, new = [], None
    for path, _ in walk(source):
        one = target + path[len(source) :]
        if new and one.startswith(new):
            continue
        if not os.path.lexists(one):
            new = one + b"/"
        if not os.path.isdir(one) or os.path.islink(one):
            found.append(("writes" if how == "cuts" else how, one))
    return found


def is_same(one, other):
    return os.path.exists(other) and os.path.samefile(one, other)


# ---- others


def packed_by_tar(words):
    """[the archive] where it packs or lists, else None."""
    modes = [word.lstrip("-") for word in words[:1]]
    modes += [word[1:] for word in words[1:] if re.match(r"-\w", word)]
    flags = "".join(modes)
    if words[:1] and words[0].startswith("--"):
        flags = "".join(modes[1:])
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if "x" in flags or "--extract" in given or "--remove-files" in given:
        return None
    if "t" in flags or "--list" in given or "--diff" in given:
        return []
    if not set(flags) & set("cru") and not {"--create", "--append", "--update"} & {*given}:
        return None
    if "--file" in given:
        return [given["--file"]] if given["--file"] else None
    for number, word in enumerate(words):
        if re.fullmatch(r"-\w*f" if number else r"-?\w*f\w*", word):
            return words[number + 1 : number + 2]
    return None


def of_packing(end, words, folder):
    """FILE becomes FILE.gz, or the other way."""
    files = [word for word in words if not word.startswith("-")]
    made = [file.removesuffix(end) if file.endswith(end) else file + end for file in files]
    return named("writes", [*files, *made], folder)  # none takes a file that has two names


def of_git(words, folder):
    words = [*words]
    while words and words[0] in ("-C", "-c"):
        folder = os.path.join(folder, words[1]) if words[0] == "-C" and words[1:] else folder
        words = words[2:]
    flags = [word for word in words if word.startswith("-")]
    name = next((word for word in words if not word.startswith("-")), flags[0] if flags else "")
    if name in GIT_READS or not name:
        return []
    if name in ("clone", "init"):
        names = [word for word in words[words.index(name) + 1 :] if word not in flags] or ["."]
        made = os.path.join(names[-1], ".git")
        if name == "clone":  # from the first: it is only read
            made = os.path.basename(names[0].rstrip("/")).removesuffix(".git")
            made = names[-1] if names[1:] else made
        return named("writes", [made], folder)
    top = os.path.realpath(folder)
    while not os.path.isdir(os.path.join(top, ".git")) and os.path.dirname(top) != top:
        top = os.path.dirname(top)
    own, top = os.fsencode(os.path.join(top, ".git")), os.fsencode(top)
    if not os.path.isdir(own):  # yet, where an earlier command of the line makes it
        return [] if name in (*GIT_ONLY, "add") else [("near", whole(os.fsencode(folder)))]
    if name == "add":
        return [("removes", os.path.join(own, b"index"))]
    objects = os.path.join(own, b"objects")
    files = (path for path, _ in walk(own) if not path.startswith(objects))
    found = [("writes", path) for path in files if not os.path.isdir(path)]
    return found + ([] if name in GIT_ONLY else [("near", top)])
