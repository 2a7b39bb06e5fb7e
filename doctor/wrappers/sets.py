"""Whether a line stands in a loop over a set of strings, whose order is another in each process."""

import ast
import functools
import inspect
import linecache
import operator
import os
import sys

from ..events import is_users, short

SEVERAL = frozenset("ab")  # a set whose items are not known: in any order
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
FOR_COMPREHENSION = ".0"  # the iterator of one, in the frame that it has before Python 3.12


def loop_over_a_set(depth):
    """The line of the innermost such loop, of all callers from `depth` on; or None.

    Where PYTHONHASHSEED is set all processes have one order.
    """
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return None
    frame = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            for line, over, target in loops_at(file, frame.f_lineno):
                value = value_of(over, frame)
                several = isinstance(value, (set, frozenset)) and len(value) > 1
                if several and isinstance(value_of(target, frame), (str, bytes)):
                    return f"{short(file)}:{line}"
            if frame.f_code.co_name.startswith("<"):
                iterator = local(frame, FOR_COMPREHENSION)
                more = type(iterator).__name__ == "set_iterator" and operator.length_hint(iterator)
                if more and of_strings(file, frame):
                    return f"{short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache
def loops_at(file, line):
    """[(line, what it goes over, its variable)] of the loops around a line, the innermost first."""
    found = []
    for node in ast.walk(tree_of(file)):
        inside = isinstance(node, ast.For) and node.body[0].lineno <= line <= node.end_lineno
        if inside and isinstance(node.target, ast.Name):
            found.append((node.lineno, node.iter, node.target))
        if isinstance(node, COMPREHENSIONS) and node.lineno <= line <= node.end_lineno:
            last = node.generators[-1]
            found.append((node.lineno, last.iter, last.target))
    return sorted(found, key=lambda loop: -loop[0])


@functools.cache
def tree_of(file):
    try:
        return ast.parse("".join(linecache.getlines(file)))  # it knows those of a notebook, too
    except (ValueError, SyntaxError):
        return ast.Module([], [])


def local(frame, name):
    """What a variable holds. No frame may keep it: a script frees its model by `del`."""
    values = frame.f_locals
    value = values.get(name, frame.f_globals.get(name))
    # Before Python 3.13 this is a copy, which a function's frame keeps.
    if type(values) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()
    return value


def of_strings(file, frame):
    """Whether the variable of the comprehension that a frame runs is a string."""
    targets = [target for _, _, target in loops_at(file, frame.f_lineno)]
    return any(isinstance(value_of(target, frame), (str, bytes)) for target in targets)


def value_of(node, frame):
    """What a name holds, or an attribute of one; of a set that is written there: SEVERAL, or one.

    A set of one item has one order.
    """
    if isinstance(node, ast.Starred):
        return value_of(node.value, frame)
    if isinstance(node, ast.Set):
        one = node.elts[0]
        if len(node.elts) > 1:
            return SEVERAL
        return as_set(value_of(one, frame)) if isinstance(one, ast.Starred) else {None}
    if isinstance(node, ast.SetComp):
        return SEVERAL
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in ("set", "frozenset"):
            return None
        return as_set(value_of(node.args[0], frame)) if node.args else SEVERAL
    if isinstance(node, ast.BinOp):  # of sets: union, difference
        of_a_set = isinstance(value_of(node.left, frame), (set, frozenset))
        return SEVERAL if of_a_set else None
    if isinstance(node, ast.Name):
        return local(frame, node.id)
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, frame), "__dict__", {}).get(node.attr)
    return None


def as_set(value):
    try:
        return {*value} if isinstance(value, (list, tuple, dict, set, frozenset)) else SEVERAL
    except TypeError:
        return SEVERAL
