"""The programs of a command: those of `sh -c LINE`, of a script, of `timeout 5 bash -c LINE`.

A line is read as if every branch of it were taken: better a file too many is kept than one lost.
"""

import contextlib
import itertools
import math
import os
import re
import shutil
from typing import NamedTuple

from .pythons import ignores_hook, leads_here
from .syntax import (
    MANY,
    SHELLS,
    SPLIT,
    UNKNOWN,
    expanded,
    flags_of,
    literal,
    matches,
    tokens,
    used_by,
    valued,
    whole,
)

KEYWORDS = "then do else if elif while until ! { } fi done esac".split()
PREFIXES = ("time", "exec", "command", "builtin")
# Programs that start another, which stands behind their flags.
STARTS = """sudo nohup nice ionice env timeout stdbuf setsid srun mpirun mpiexec taskset numactl
chrt unbuffer xargs parallel conda flock""".split()
WRITES = ("srun", "mpirun", "mpiexec", "parallel")  # what their flags name
SETS = ("export", "declare", "local", "readonly", "typeset")
OWN = """[ [[ in function set unset source . module conda ulimit trap wait exit return shift : eval
popd umask read mapfile shopt alias break continue let true false""".split()
ASSIGNS = re.compile(r"([A-Za-z_]\w*)\+?=")
CALLED = re.compile(r"\(\)\s*\{|^\s*function\s|\bshift\b", re.MULTILINE)  # $1: any of them
LONG, LONG_VALUE = 1 << 20, 10_000  # bytes of a script, letters of a variable
DEEP = 5  # shells in shells


class Command(NamedTuple):
    """A program that is started; words have UNKNOWN where only the shell can know."""

    words: list  # none, where the shell itself writes a file
    into: list  # names after >>
    cuts: list  # names after >
    folders: list  # where it may be
    hooked: bool = True  # whether its environment leads to the hook
    given: bool = False  # more words are given to it, as xargs does
    sure: bool = True  # whether it is the first, and runs at once


def commands(words, folder, env=()):
    """The Commands of a program's words, started in a folder with these variables."""
    known = {name: [literal(value)] for name, value in dict(env).items()}
    shell = Shell([folder], known)
    with contextlib.suppress(RecursionError):  # what was found until then
        shell.run([literal(word) for word in words], [], [])
    return [*shell.found.values()]


class Shell:
    def __init__(self, folders, known, found=None, depth=0, given=False, sure=True, scripts=None):
        self.folders, self.known, self.depth, self.given = folders, known, depth, given
        self.found = {} if found is None else found  # by their words and folders
        self.been = [*folders]  # where it was before
        self.later = []  # where it is, too, when this chain of && ends
        self.goes = []  # folders of cd, by each value of its variables
        self.kept = []  # folders outside of the parentheses that are open
        self.open = 0  # branches and loops
        self.chain = self.reads_input = False
        self.sure, self.scripts = sure, set() if scripts is None else scripts  # that it has read

    def below(self, depth=0, given=False, **known):
        depth, known = self.depth + depth, self.known | known
        sure, given = self.sure and not self.chain and not self.open, given or self.given
        return Shell([*self.folders], known, self.found, depth, given, sure, self.scripts)

    def read(self, text):
        words, files, sign = [], [], None
        for kind, token in [*tokens(text), ("sign", ";")]:
            if kind == "line":
                self.below().read(token)
            elif kind == "body":
                if self.reads_input:
                    self.below().read(token)
            elif kind == "word" and sign:
                if not (sign == ">&" and re.fullmatch(r"\d+|-", token)):
                    files.append((sign, token))
                sign = None
            elif kind == "word":
                words.append(token)
            elif set(token) & set("<>"):
                sign = token
            else:
                # NAME( begins a function, NAME) a branch of case.
                no_command = token == ("(" if words else "") or (token == ")" and not self.kept)
                self.take([] if no_command and words[:1] != ["case"] else words, files)
                self.after(token)
                words, files, sign = [], [], None

    def after(self, sign):
        if sign == "(":
            self.kept.append(self.folders)
        elif sign == ")" and self.kept:
            self.folders = self.kept.pop()
        elif sign in ("&&", "||"):
            self.chain = True
        elif sign in (";", "\n", "&"):
            self.chain = False
        if sign not in ("&&", "|", "|&"):
            self.folders = [*dict.fromkeys(self.folders + self.later)][:MANY]
            self.later = []

    def take(self, words, files):
        """One command, with each value of its variables."""
        words = self.behind_keywords(words)
        if words and all(ASSIGNS.match(word) for word in words):
            for word in words:
                self.set(word)
            words = []
        texts = [*words, *(name for _, name in files)]
        for known in self.values(texts) if texts else ():
            several = [expanded(name, known) for _, name in files]
            named = [(f[0], one) for f, all in zip(files, several, strict=True) for one in all]
            into = [name for sign, name in named if ">>" in sign or sign == "<>"]
            cuts = [name for sign, name in named if sign in (">", ">|", ">&", "&>")]
            self.run([one for word in words for one in expanded(word, known)], into, cuts)
        if self.goes:
            self.go()

    def values(self, texts):
        """What the variables in them may be: [{name: value}]."""
        known = self.known | {"PWD": self.folders}
        names = sorted(used_by(texts) & known.keys())
        if math.prod(len(known[name]) for name in names) > MANY - len(self.found) // 10:
            names = [name for name in names if len(known[name]) == 1]
        found = itertools.product(*(known[name] for name in names))
        return [dict(zip(names, values, strict=True)) for values in found]

    def behind_keywords(self, words):
        while words and words[0] in KEYWORDS:
            self.open += words[0] in ("if", "while", "until")
            self.open -= words[0] in ("fi", "done", "esac") and self.open > 0
            words = words[1:]
        if words and words[0] in ("for", "select", "case"):
            self.open += 1
            if words[0] != "case" and len(words) > 1:
                each = words[3:] if words[2:3] == ["in"] else ["$@"]
                every = [e for known in self.values(each) for w in each for e in expanded(w, known)]
                every = [name for one in every for name in matches(one, self.folders)]
                self.known[words[1]] = [*dict.fromkeys(every)] or [""]
            return []
        is_test = words and (words[0].startswith("-") or words[-1] == "]]")  # behind && in [[ ]]
        return [] if is_test else words

    def set(self, word):
        name, value = ASSIGNS.match(word)[1], word.partition("=")[2]
        value = f"${{{name}}}{value}" if word.startswith(name + "+") else value
        new = [valued(value, known) for known in self.values([value])]
        new = [one if len(one) < LONG_VALUE else UNKNOWN for one in new]
        old = self.known.get(name, []) if self.open or self.chain else []
        self.known[name] = [*dict.fromkeys([*old, *new])][:MANY]

    def go(self):
        """cd, to one of these folders. If it may fail, the next line is run where it was."""
        paths, self.goes, old = self.goes, [], self.folders
        clear = [path for path in paths if UNKNOWN not in path and path != "-"]
        ways = itertools.product(old, clear)
        new = [os.path.normpath(os.path.join(o, os.path.expanduser(p))) for o, p in ways]
        self.folders = new if len(clear) == len(paths) else [*new, *self.been]
        if self.open or self.chain or len(paths) > 1 or not all(map(os.path.isdir, new)):
            self.later += old
        self.been += new

    # ---- one command

    def run(self, words, into, cuts):
        words, hooked, given = self.program(words)
        name = os.path.basename(words[0]) if words else ""
        if name in ("cd", "pushd", "popd"):
            goes = [whole(word) for word in words[1:] if not re.match(r"-[A-Za-z@]+$", word)]
            self.goes += goes or ["-" if name == "popd" else "~"]
            words = []
        elif name in SETS:
            for word in filter(ASSIGNS.match, words[1:]):
                self.set(word)
            words = []
        elif name in OWN:
            self.own(name, words[1:])
            words = []
        elif name:
            words = self.shell(name, words, given)
            given = given or (name in SHELLS and self.reads_input)
        self.add(words, into, cuts, hooked, given)

    def add(self, words, into, cuts, hooked, given):
        plain = [[whole(word) for word in part] for part in (words, into, cuts)]
        sure = self.sure and not (self.chain or self.open or self.found)
        command = Command(*plain, [*self.folders], hooked, given or self.given, sure)
        if words or into or cuts:
            self.found.setdefault(str(command[:-1]), command)

    def program(self, words):
        """(the program and its words, whether it has the hook's variables, whether more come)"""
        hooked, given = all(map(leads_here, self.known.get("PYTHONPATH", ["PYTHONPATH"]))), False
        while words:
            name = os.path.basename(words[0])
            if ASSIGNS.match(words[0]):
                hooked = hooked and not ignores_hook([words[0]])
                words = words[1:]
            elif words[0] in PREFIXES:
                looks = words[:2] in (["command", "-v"], ["command", "-V"])
                flags = itertools.takewhile(lambda word: word.startswith("-"), words[1:])
                words = [] if looks else words[1 + len([*flags]) :]
            elif name in STARTS:
                behind = (i for i, w in enumerate(words) if i and self.is_program(w))
                at = next(behind, None)
                if at is None:
                    break
                flags = words[1:at] if name == "env" else []
                hooked = hooked and name != "sudo" and not ignores_hook(flags)
                given = given or name in ("xargs", "parallel")
                if name in WRITES:
                    self.add(words[:at], [], [], hooked, False)
                words = words[at:]
            else:
                break
        return words, hooked, given

    def is_program(self, word):
        if word.startswith("-") or "=" in word or not word:
            return False
        word = whole(word)
        if "/" in word:
            return any(os.path.isfile(os.path.join(folder, word)) for folder in self.folders)
        return bool(shutil.which(word))

    def own(self, name, words):
        """What the shell does itself."""
        self.sure = self.sure and name == "set"  # else it may end here
        if name in ("source", ".", "eval", "trap") and self.depth < DEEP and words:
            self.depth += 1
            text = " ".join(map(whole, words[:1] if name == "trap" else words))
            self.read(script(whole(words[0]), self.folders)[1] if name in ("source", ".") else text)
            self.depth -= 1
        elif name in ("read", "mapfile", "unset"):
            value = "" if name == "unset" else UNKNOWN
            self.known |= {word: [value] for word in words if re.fullmatch(r"\w+", word)}

    def shell(self, name, words, given):
        """The commands of a shell's line or script; returns the words of what is a program."""
        if self.depth >= DEEP:
            return words
        if name not in SHELLS:
            found = script(whole(words[0]), self.folders, only_shells=True)
            self.read_script(*found, words[1:], given)
            return words
        line, others = flags_of(words)
        if line:
            place = {str(number): [word] for number, word in enumerate(others[1:])}
            if place:
                place["@"] = place["*"] = [SPLIT.join(others[2:])]
            self.below(1, given, **place).read(whole(others[0]) if others else "")
            return []
        self.reads_input = not others
        if others:
            self.read_script(*script(whole(others[0]), self.folders), others[1:], given)
        return words

    def read_script(self, path, text, words, given):
        if not text or (path, *words) in self.scripts:
            return
        self.scripts.add((path, *words))
        place = {str(number): [word] for number, word in enumerate(words, 1)}
        if CALLED.search(text):
            place = {str(number): [*words, UNKNOWN] for number in range(1, 10)}
        place["@"] = place["*"] = [SPLIT.join(words)]
        place |= {"0": [literal(path)], "SCRIPTS_FOLDER": [literal(os.path.dirname(path))]}
        self.below(1, given, **place).read(text)


def script(name, folders, only_shells=False):
    """(path, text) of a script, or ("", "") where there is none."""
    for folder in folders:
        try:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                first = file.readline(200)
                shell = re.match(rb"#!.*\b(sh|bash|dash|zsh|ksh)\b", first)
                if (only_shells and not shell) or os.fstat(file.fileno()).st_size > LONG:
                    continue
                return path, (first + file.read()).decode(errors="replace")
        except (OSError, ValueError):  # none, or not to be found from here
            continue
    return "", ""
