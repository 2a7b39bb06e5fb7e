"""A shell's line as words and signs: quotes, comments, substitutions, variables, braces."""

import glob
import itertools
import os
import re

# In a word, until it is whole, letters of no language stand for signs that were quoted (PLAIN makes
# signs of them again), and for what only the shell can know.
SPECIAL = "$`{},"
QUOTED = {ord(sign): chr(0xE010 + number) for number, sign in enumerate(SPECIAL)}
PLAIN = {ord(code): chr(sign) for sign, code in QUOTED.items()}
UNKNOWN, IN_QUOTES, SPLIT = "\ue000", "\ue001", "\ue002"  # the second: a $ in double quotes
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
SIGN = re.compile(r"\d*(?:&>>?|<<<|<<-?|<>|>>|>\||[<>]&|[<>])|\|\||&&|;;&?|\|&|[;&|()\n]")
# $(dirname "$0"), also as $(cd "$(dirname "$0")" && pwd): by a name of ours.
SCRIPTS_FOLDER = re.compile(r"[^;|]*\bdirname\s+(--\s+)?\"?\$\{?(0|BASH_SOURCE)")
MANY = 300  # words that braces or variables may become
VARIABLE = re.compile(
    rf"([${IN_QUOTES}])(?:(\d|[A-Za-z_]\w*|[@*])"
    rf"|\{{(\w+|[@*])(?:\[[@*]\])?(?::?([-+=?])([^{{}}]*))?\}})"
)


def tokens(text):
    """Pairs: ("word", its text), ("sign", ; or > or a line break), ("line", a substitution's).

    ("body", its text) follows the line of a here-document.
    """
    text = text.replace("\\\n", "")
    at, word, bodies, ends = 0, None, [], None
    while at < len(text):
        char = text[at]
        sign = SIGN.match(text, at)
        if char == "(" and (word or "").endswith("="):  # NAME=(several words)
            end = closing(text, at + 1)
            inside = [one for kind, one in tokens(text[at + 1 : end]) if kind == "word"]
            word, at = word + SPLIT.join(inside), end + 1
        elif word is None and text.startswith("((", at):  # a sum
            at = closing(text, at + 1) + 1
        elif sign and not (word is not None and sign[0][0].isdigit()) and not is_inside(text, at):
            if word is not None:
                yield "word", word
                if ends is not None:
                    bodies.append((word.translate(PLAIN), ends))
                word = ends = None
            at = sign.end()
            sign = sign[0].lstrip("0123456789")
            if sign in ("<<", "<<-"):
                ends = sign == "<<-"
            yield "sign", sign
            if char == "\n":
                for end, tabs in bodies:
                    body, at = until(text, at, end, tabs)
                    yield "body", body
                bodies = []
        elif char in " \t\r" or (char == "#" and word is None):
            if word is not None:
                yield "word", word
                if ends is not None:
                    bodies.append((word.translate(PLAIN), ends))
                    ends = None
            word = None
            at = at + 1 if char != "#" else find(text, "\n", at)
        else:
            part, lines, at = piece(text, at)
            yield from (("line", line) for line in lines)
            word = (word or "") + part
    if word is not None:
        yield "word", word


def find(text, sign, at):
    """Where it is, or the text's end."""
    found = text.find(sign, at)
    return found if found >= 0 else len(text)


def is_inside(text, at):
    """<( and >( begin a command inside of a word."""
    return text[at : at + 2] in ("<(", ">(")


def until(text, at, end, tabs):
    """A here-document, and where the text goes on."""
    lines = []
    while at < len(text):
        stop = find(text, "\n", at)
        line, at = text[at:stop], stop + 1
        if (line.lstrip("\t") if tabs else line) == end:
            break
        lines.append(line)
    return "\n".join(lines), at


def piece(text, at, inside=False):
    """One part of a word that begins here: its text, the lines that it runs, where it ends."""
    char, two = text[at], text[at : at + 2]
    if char == "\\":
        return text[at + 1 : at + 2].translate(QUOTED), [], at + 2
    if char == "'" and not inside:
        end = find(text, "'", at + 1)
        return text[at + 1 : end].translate(QUOTED), [], end + 1
    if char == '"' and not inside:
        at, found, lines = at + 1, "", []
        while at < len(text) and text[at] != '"':
            part, more, at = piece(text, at, inside=True)
            found, lines = found + part, lines + more
        return found, lines, at + 1
    if two in ("$(", "<(", ">(") and not (inside and char != "$"):
        end = closing(text, at + 2)
        line = text[at + 2 : end]
        if line.strip() == "pwd":
            return IN_QUOTES + "{PWD}", [], end + 1
        if SCRIPTS_FOLDER.match(line):
            return IN_QUOTES + "{SCRIPTS_FOLDER}", [], end + 1
        return UNKNOWN, [] if line.startswith("(") else [line], end + 1  # ((: a sum
    if char == "`":
        end = find(text, "`", at + 1)
        return UNKNOWN, [text[at + 1 : end]], end + 1
    if char == "$":
        return (IN_QUOTES if inside else "$"), [], at + 1
    if inside:
        return char.translate(QUOTED) if not is_name(text, at) else char, [], at + 1
    return char, [], at + 1


def is_name(text, at):
    """Whether a brace belongs to ${NAME} in double quotes."""
    begun = text.rfind("${", max(0, at - 200), at + 1)
    return begun >= 0 and "}" not in text[begun:at]


def closing(text, at):
    """Where the parenthesis that is open here is closed."""
    depth = 1
    while at < len(text):
        if text[at] in "'\"\\":
            _, _, at = piece(text, at)
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
        at += 1
    return len(text)


def used_by(words):
    """The variables that they use."""
    return {m[2] or m[3] for word in words for m in VARIABLE.finditer(word)}


def expanded(word, known):
    """The words that it becomes; known: {name: its value}. What is not known stays as it is."""
    text = valued(word, known, splits=True)
    words = [part for part in text.split(SPLIT) if part] if SPLIT in text else [text]
    return [one for part in words for one in braces(part)]


def valued(word, known, splits=False):
    """With the values of its variables."""

    def value(match):
        sign, name, how, other = match[1], match[2] or match[3], match[4], match[5] or ""
        found = known.get(name)
        if how == "+":
            found = valued(other, known) if found else ""
        elif how and how != "?" and not found:
            found = valued(other, known)
        if found is None:
            return match[0]
        return re.sub(r"\s+", SPLIT, found) if splits and sign == "$" else found

    return VARIABLE.sub(value, word)


def braces(word):
    """a{b,c} and a{1..3}."""
    found = re.search(r"(?<!\$)\{([^{}]*)\}", word)
    if not found:
        return [word]
    inside, span = found[1].split(","), re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span and abs(int(span[2]) - int(span[1])) < MANY:
        low, high = sorted((int(span[1]), int(span[2])))
        inside = [str(number) for number in range(low, high + 1)]
    if len(inside) < 2:
        return [word]
    both = (word[: found.start()] + one + word[found.end() :] for one in inside)
    return [*itertools.islice((one for part in both for one in braces(part)), MANY)]


def matches(word, folders):
    """The names that a pattern of a loop means; itself where they are many."""
    names = []
    for folder in folders if glob.has_magic(word) and UNKNOWN not in word else ():
        found = glob.iglob(os.path.join(glob.escape(folder), whole(word)))
        start = 0 if os.path.isabs(word) else len(os.path.join(folder, ""))
        names += [literal(name[start:]) for name in itertools.islice(found, MANY)]
    return names if 0 < len(names) < MANY else [word]


def whole(word):
    """Without our signs: what only the shell can know is one UNKNOWN."""
    word = re.sub(rf"[$`{IN_QUOTES}]|\{{(?=.*\}})", UNKNOWN, word)
    return word.translate(PLAIN)


def literal(word):
    """A word that no shell reads."""
    return word.translate(QUOTED)


def flags_of(words):
    """(whether a shell has -c, the words behind its flags)"""
    line, at = False, 1
    while at < len(words) and len(words[at]) > 1 and words[at][0] in "-+":
        flag, at = words[at], at + 1
        if not flag.startswith("--"):
            line = line or (flag[0] == "-" and "c" in flag)
            at += flag[-1] in "oO"
        at += flag in ("--rcfile", "--init-file")
    return line, words[at:]
