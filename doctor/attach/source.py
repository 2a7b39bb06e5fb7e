"""The text of a line, and the condition on the rank around it. The file is read, never run."""

import ast
import functools
import os
import re

ABOUT_RANK = re.compile(r"rank|is_main|is_master|main_process|master_process|is_primary", re.I)
ENDS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
NO_GRAD = re.compile(r"no_grad|inference_mode")


def path_of(pid, file):
    """Where this process can read a file of another one, which may be in a container."""
    if not os.path.isabs(file):
        file = os.path.join(os.readlink(f"/proc/{pid}/cwd"), file)
    return f"/proc/{pid}/root{file}"


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


def around(pid, file, line):
    """(the condition on a rank under which a line is reached, whether it is without gradients).

    The condition is "if rank == 0 (line 72)", or "".
    """
    try:
        parsed = ast.parse("\n".join(lines_of(pid, file)))
    except (SyntaxError, ValueError):
        return "", False
    under, without = "", False
    for node in ast.walk(parsed):
        if not hasattr(node, "lineno"):
            continue
        inside = node.lineno <= line <= node.end_lineno
        if inside and isinstance(node, ast.With):
            without |= any(NO_GRAD.search(ast.unparse(item)) for item in node.items)
        if inside and isinstance(node, ast.FunctionDef):
            without |= any(NO_GRAD.search(ast.unparse(one)) for one in node.decorator_list)
        for block in blocks(node) if inside else []:
            under = condition(node, block, line) or under
    return under, without


def blocks(node):
    return [
        getattr(node, name)
        for name in ("body", "orelse")
        if isinstance(getattr(node, name, 0), list)
    ]


def condition(node, block, line):
    if not any(one.lineno <= line <= one.end_lineno for one in block):
        return ""
    if isinstance(node, ast.If) and ABOUT_RANK.search(ast.unparse(node.test)):
        other = "else of " if block is node.orelse else ""
        return f"{other}if {ast.unparse(node.test)} (line {node.lineno})"
    for one in block:  # if rank != 0: return
        leaves = isinstance(one, ast.If) and isinstance(one.body[-1], ENDS)
        if leaves and one.end_lineno < line and ABOUT_RANK.search(ast.unparse(one.test)):
            return f"if not {ast.unparse(one.test)} (line {one.lineno})"
    return ""
