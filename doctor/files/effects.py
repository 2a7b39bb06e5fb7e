"""What a program does with the files that its words name, as pairs: see names.py."""

import itertools
import os
import re

from .disk import walk, without_links
from .git import of_git
from .names import near, paths_named, values_of
from .syntax import SHELLS, UNKNOWN

READ_ONLY = """nvidia-smi rocm-smi uname lscpu lspci ls cat head tail grep egrep fgrep find du df wc
which file ldconfig hostname id ps free getconf nproc numactl echo printf test true false sleep date
stat md5sum sha1sum sha256sum cksum diff cmp comm cut tr paste column basename dirname realpath
readlink tree less more seq jq env printenv whoami uptime yes kill pkill pgrep killall xargs
sort sed uniq git tar""".split()  # the last ones, and find: not with every flag
# Flags of these that name a file that is written: a letter, a long one.
OUTPUTS = {"sort": "o output", "tree": "o o", "nvidia-smi": "f filename", "less": "oO log-file"}
COMPILERS = "gcc g++ cc c++ clang clang++ nvcc ld as ptxas".split()  # they write what -o names
FINDS_AND_DOES = {"-delete", "-exec", "-execdir", "-ok", "-okdir"}
FINDS_AND_DOES |= {"-fprint", "-fprint0", "-fprintf", "-fls"}
REMOVES = ("rm", "rmdir", "unlink")
COPIES = ("cp", "mv", "install", "ln", "rsync", "scp")
PACKS = {"gzip": ".gz", "pigz": ".gz", "bzip2": ".bz2", "xz": ".xz", "zstd": ".zst"}
PACKS |= {"gunzip": ".gz", "bunzip2": ".bz2", "unxz": ".xz", "unzstd": ".zst"}


def effects(words, folder):
    name, words = os.path.basename(words[0]), words[1:]
    if name == "find" and FINDS_AND_DOES & {*words}:
        starts = [*itertools.takewhile(lambda word: word[:1] not in ("-", "(", "!"), words)]
        how = "goes" if "-delete" in words else "writes"
        return paths_named(how, [*words, *([] if starts else ["."])], folder)
    if name == "git":
        return of_git(words, folder)
    if name == "tar" and (archive := packed_by_tar(words)) is not None:
        return paths_named("writes", archive, folder)
    if name == "tar":
        return paths_named("writes", words, folder) + near(os.path.join(folder, UNKNOWN))
    if name in OUTPUTS:
        return paths_named("writes", values_of(words, *OUTPUTS[name].split()), folder)
    if name == "uniq":  # IN, OUT
        return paths_named(
            "writes", [word for word in words if not word.startswith("-")][1:], folder
        )
    if name == "sed":
        return paths_named("writes", written_by_sed(words), folder)
    if name in READ_ONLY:
        return []
    if name in COMPILERS:
        stems = [os.path.basename(os.path.splitext(word)[0]) for word in words]
        made = [stem + end for stem in stems for end in (".o", ".s") if {"-c", "-S"} & {*words}]
        return paths_named("writes", values_of(words, "o", "output") or made or ["a.out"], folder)
    if name in SHELLS:  # shells.py has read its script
        script = next((word for word in words if not word.startswith(("-", "+"))), None)
        return paths_named("writes", [word for word in words if word != script], folder)
    if name in COPIES:
        return of_copies(name, words, folder)
    if name == "zip":
        archive = next((word for word in words if not word.startswith("-")), "")
        ends = "" if "." in os.path.basename(archive) or not archive else ".zip"
        moves = any(re.match(r"-[a-zA-Z]*m|--move", word) for word in words)
        found = paths_named("removes", [w for w in words if w != archive], folder) if moves else []
        return [*found, *paths_named("writes", [archive + ends], folder)]
    if name in PACKS:
        return of_packing(PACKS[name], words, folder)
    found = paths_named("goes" if name in REMOVES else "writes", words, folder)
    if name in ("mkdir", "mktemp"):
        return [(how, path) for how, path in found if how != "near" and not os.path.lexists(path)]
    if name == "curl" and any(re.match(r"-\w*O|--remote-name", word) for word in words):
        found += paths_named("writes", [word.rpartition("/")[2] for word in words], folder)
    # These find their names in an archive, and remove a file before they write it.
    return found + (near(os.path.join(folder, UNKNOWN)) if name in ("unzip", "patch") else [])


def written_by_sed(words):
    """Its files, where it writes in place, and their old ones; those of its command w."""
    found = [name for word in words for name in re.findall(r"w\s+([^\s;}]+)", word)]
    in_place = [re.match(r"-[nErszu]*i(.*)|--in-place=?(.*)", word) for word in words]
    for end in (flag[1] or flag[2] or "" for flag in in_place if flag):
        found += [name for word in words for name in {word, word + end}]
    return found


def reads_only(words, found):
    """Whether it is not worth a word in the report."""
    name = os.path.basename(words[0])
    return name in COMPILERS or (name in READ_ONLY and not found)


# ---- programs that copy


def of_copies(name, words, folder):
    words, target, flags = parted(name, words)
    *sources, last = words if target is None else [*words, target]
    if not sources:
        sources, last = [last], "."  # ln -s ../data
    (last_how, last), *_ = paths_named("removes", [last], folder) or [("near", b"/")]
    if last_how == "near":
        how = "removes" if name == "mv" else "near"
        return paths_named(how, words, folder) + [("written" if name == "cp" else last_how, last)]
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
        for kind, path in paths_named("removes", [source], folder):
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
    return [(how, without_links(path)) for how, path in found]


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
    return [*paths_named("alone", files, folder), *paths_named("writes", made, folder)]
