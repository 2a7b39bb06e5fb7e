"""What the commands of a shell name: those of `sh -c LINE`, and those of a script."""

import os
import re
import shlex

SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
# What may stand before a command, and what is none.
BEFORE = r"\w+=|(sudo|nohup|nice|time|exec|command|env|then|do|else|if|elif|while|!|\{)$"
BEFORE = re.compile(BEFORE)
OWN = """[ [[ for done fi esac case in } until select function set unset export source . module
conda ulimit trap wait exit return local readonly declare shift : eval pushd popd umask
read""".split()
LONG = 1 << 20  # bytes: what is longer is no script


def commands(words, cwd):
    """[(words of a program, names after > or >>)]: those of a shell's command one by one."""
    name = os.path.basename(words[0]) if words else ""
    if name in SHELLS and "-c" in words[1:3]:
        return of_line(words[words.index("-c") + 1])
    return [(words, []), *of_script(script_of(name, words, cwd))]


def script_of(name, words, cwd):
    """The path of a shell's script, or None."""
    given = [word for word in words[1:] if not word.startswith("-")] if name in SHELLS else words
    try:
        path = os.path.join(cwd, given[0])
        with open(path, "rb") as file:
            first = file.readline(200)
        shell = name in SHELLS or re.match(rb"#!.*\b(sh|bash|dash|zsh|ksh)\b", first)
        return path if shell and os.path.getsize(path) < LONG else None
    except (OSError, IndexError, ValueError):  # none, or not to be found from here
        return None


def of_script(path):
    """The commands of its lines, whatever branch they are in; variables that it sets are put in."""
    if path is None:
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().replace("\\\n", " ").splitlines()
    found, known = [], {}
    for words, into in [command for line in lines for command in of_line(line)]:
        words, into = ([expanded(word, known) for word in part] for part in (words, into))
        if words and all(re.match(r"\w+=", word) for word in words):
            known |= dict(word.split("=", 1) for word in words)
        while words and BEFORE.match(words[0]):
            words = words[1:]
        own = words and words[0] in OWN
        if (words and not own) or into:
            found.append(([] if own else words, into))
    return found


def expanded(word, known):
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: known.get(m[1] or m[2], m[0]), word)


def of_line(line):
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    found, into = [([], [])], False
    try:
        for word in reader:
            if set(word) <= set(";&|()\n"):
                found.append(([], []))
            elif set(word) <= set("<>&"):
                into = ">" in word
            else:
                found[-1][1 if into else 0].append(word)
                into = False
    except ValueError:  # an open quote: the shell will say so
        pass
    return [command for command in found if command != ([], [])]
