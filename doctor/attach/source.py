"""The text of a line, and the condition on the rank around it. The file is read, never run."""

import ast
import functools
import os
import re

# The rank of a matrix, and what ranks documents, are others.
ABOUT_RANK = re.compile(
    r"(?<!lora_)(?<!lora)(?<!low_)(?<!low)(?<!matrix_)(?<!re)rank(?!ing|ed|er|_loss)"
    r"|is_main|is_master|main_process|master_process|is_primary",
    re.I,
)
ENDS = (ast.Return, ast.Continue, ast.Break)  # a rank that raises is gone: it waits for none
NO_GRAD = re.compile(r"no_grad|inference_mode")


def path_of(pid, file):
    """Where this process can read a file of another one, which may be in a container."""
    if not os.path.isabs(file):
        file = os.path.join(os.readlink(f"/proc/{pid}/cwd"), file)
    return f"/proc/{pid}/root{file}"


def folder_of(pid):
    """That in which a process is, or "" where it may not be read."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def began(pid):
    """When a process was started, in seconds since 1970."""
    with open("/proc/stat") as file:
        boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return boot + 1 + ticks / os.sysconf("SC_CLK_TCK")


@functools.cache
def lines_of(pid, file):
    """[] where it cannot be read, or has changed since the process began."""
    try:
        path = path_of(pid, file)
        if os.stat(path).st_mtime > began(pid):
            return []
        with open(path, encoding="utf-8", errors="replace") as text:
            return text.read().split("\n")
    except OSError:
        return []


def text_of(pid, file, line):
    lines = lines_of(pid, file)
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


class Around:
    """What a line is inside of.

    under: the condition on a rank under which it is reached, as "if rank == 0 (line 72)", or "";
    when: the innermost condition of any kind; without: it is without gradients; leaves: what ends
    a turn of its loop before it, as [line, "if loss.isnan(): continue"]; loops: of its function,
    as [first line, last line, "for x, y in loader:"], the innermost first.
    """

    def __init__(self, pid, file, line):
        self.under, self.when, self.without, self.leaves, self.loops = "", "", False, [], []
        try:
            parsed = ast.parse("\n".join(lines_of(pid, file)))
        except (SyntaxError, ValueError):
            return
        inside = [node for node in ast.walk(parsed) if includes(node, line)]
        for node in inside:  # from the outside to the inside
            heads = [*getattr(node, "items", []), *getattr(node, "decorator_list", [])]
            self.without |= any(NO_GRAD.search(ast.unparse(head)) for head in heads)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.loops = []
            if isinstance(node, (ast.For, ast.While)):
                self.leaves = list(leaves(node, line, lines_of(pid, file)))
                text = text_of(pid, file, node.lineno)
                self.loops.insert(0, [node.lineno, node.end_lineno, text])
            for name in ("body", "orelse"):
                block = getattr(node, name, None)
                if isinstance(block, list) and any(includes(one, line) for one in block):
                    self.look(node, name, [one for one in block if one.end_lineno < line])

    def look(self, node, name, before):
        """before: what stands in this block before the line."""
        if isinstance(node, ast.If):
            self.keep("else of if" if name == "orelse" else "if", node)
        for one in before:
            leaves = isinstance(one, ast.If) and isinstance(one.body[-1], ENDS)
            if leaves and tells_ranks_apart(one.test):  # if rank != 0: return
                self.keep("if not", one)

    def keep(self, word, node):
        test = ast.unparse(node.test)
        if same_in_all(node.test):
            return
        said = f"{word} {test} (line {node.lineno})"
        self.under = said if tells_ranks_apart(node.test) else self.under
        self.when = "" if "__name__" in test else said


def tells_ranks_apart(test):
    """Of a condition, as "rank == 0"."""
    if isinstance(test, ast.BoolOp):
        return any(tells_ranks_apart(one) for one in test.values)
    return bool(ABOUT_RANK.search(ast.unparse(test))) and not same_in_all(test)


def same_in_all(test):
    """Whether it asks only for a job of several: "RANK != -1", "rank is not None", "rank >= 0"."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return same_in_all(test.operand)
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return False
    if not ABOUT_RANK.search(ast.unparse(test)):
        return False
    left, op, right = test.left, test.ops[0], test.comparators[0]
    if any(ast.unparse(side) in ("-1", "None") for side in (left, right)):
        return True
    signs = (right, (ast.GtE, ast.Lt)), (left, (ast.LtE, ast.Gt))  # rank >= 0, 0 <= rank
    return any(ast.unparse(side) == "0" and isinstance(op, ops) for side, ops in signs)


def leaves(loop, line, lines):
    """[line, its text, with that of the line above where it is a word alone]"""
    for node in ast.walk(loop):
        if isinstance(node, (ast.Continue, ast.Break)) and node.lineno < line:
            text = lines[node.lineno - 1].strip()
            above = lines[node.lineno - 2].strip() + " " if text in ("continue", "break") else ""
            yield [node.lineno, above + text]


def includes(node, line):
    return hasattr(node, "lineno") and node.lineno <= line <= node.end_lineno
