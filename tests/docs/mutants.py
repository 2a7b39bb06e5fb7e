"""Mutants of a script: what a slip of the hand, or of the mind, makes of a right one.

Each changes one thing: a statement is removed, done by rank 0 alone, or exchanged with the next;
a condition or an argument is gone; a rank, a size, a seed, a sign, a model is another.
"""

import ast
import builtins
import itertools
import re
from typing import NamedTuple

NAMES = {
    "rank": ["local_rank", "0"],
    "local_rank": ["0"],
    "world_size": ["1"],
}
SIGNS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}
SKIPPED = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass, ast.Global)


class Mutant(NamedTuple):
    name: str
    line: int  # where it is changed, and where that ends, in the mutant
    last: int
    text: str
    variables: frozenset  # those of the changed statement
    assigned: frozenset  # those of them that it sets


class Source:
    """A text with its tree, and where each node stands in it, in bytes."""

    def __init__(self, text):
        self.raw, self.tree = text.encode(), ast.parse(text)
        lengths = [len(line) for line in self.raw.splitlines(keepends=True)]
        self.starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def span(self, node):
        """(begin, end) of an expression; of a statement with its whole lines."""
        if isinstance(node, ast.stmt):
            return self.starts[node.lineno - 1], self.starts[node.end_lineno]
        begin, end = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def of(self, node):
        begin, end = self.span(node)
        return self.raw[begin:end].decode()

    def with_other(self, *edits):
        """The text where each (node, or span) is replaced by a string."""
        raw = self.raw
        spans = [(self.span(of) if isinstance(of, ast.AST) else of, new) for of, new in edits]
        for (begin, end), new in sorted(spans, reverse=True):
            raw = raw[:begin] + new.encode() + raw[end:]
        return raw.decode()


def variables_of(node):
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def assigned_by(node, tree):
    """The variables that a statement sets, or may change: net of net.train(), w of w.grad /= 2.

    What changes a loop's variable may change what the loop is over: net of net.buffers().
    """
    changed = set()
    for one in ast.walk(node):
        if isinstance(one, ast.AugAssign):
            changed |= variables_of(one.target)
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            call = one.value
            of_method = isinstance(call.func, ast.Attribute)
            parts = [*call.args, *([call.func.value] if of_method else [])]
            changed |= {part.id for part in parts if isinstance(part, ast.Name)}
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and changed & variables_of(loop.target):
            changed |= variables_of(loop.iter) - {*dir(builtins)}
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store}
    return frozenset((stored | changed) - {"dist", "torch", "nn"})


def blocks(tree):
    """Each list of statements, but for the module's own and those of classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def header(source, statement):
    """Its first line, for a name."""
    return source.of(statement).strip().splitlines()[0].partition("  # ")[0][:70]


def mutants(text):
    """[Mutant], each other than the script and than those before; they can be compiled."""
    source, known, found = Source(text), {text}, []
    for kind, statement, mutated in changes(source):
        if mutated in known:
            continue
        known.add(mutated)
        try:
            compile(mutated, "mutant", "exec")
        except SyntaxError:
            continue
        name = f"{kind}: {header(source, statement)}"
        head = heads(statement)
        sets = frozenset().union(*(assigned_by(one, source.tree) for one in head))
        uses = frozenset().union(*(variables_of(one) for one in head))
        found.append(Mutant(name, *changed_lines(text, mutated), mutated, uses, sets))
    return found


def changed_lines(old, new):
    """(first, last) in the new text."""
    old, new = old.splitlines(), new.splitlines()
    pairs = list(zip(old, new, strict=False))
    same = [a == b for a, b in pairs]
    first = same.index(False)
    backwards = [a == b for a, b in zip(old[::-1], new[::-1], strict=False)]
    return first + 1, max(first + 1, len(new) - backwards.index(False))


def heads(statement):
    """A statement; of an if, a with or a loop of loops its own line alone."""
    loops = [n for n in ast.walk(statement) if isinstance(n, (ast.For, ast.While))]
    if isinstance(statement, (ast.For, ast.While)) and len(loops) > 1:
        return [statement.target, statement.iter] if isinstance(statement, ast.For) else []
    return [statement]


def changes(source):
    """(kind, the changed statement, the text)"""
    for block in blocks(source.tree):
        for statement, after in zip(block, [*block[1:], None], strict=True):
            if isinstance(statement, SKIPPED) or is_docstring(statement):
                continue
            yield from of_statement(source, statement, after)
    for statement, node, parent in expressions(source.tree):
        for kind, mutated in of_expression(source, statement, node, parent):
            yield kind, statement, mutated


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def of_statement(source, statement, after):
    lines = source.of(statement)
    indent = re.match(" *", lines)[0]
    yield "removed", statement, source.with_other((statement, f"{indent}pass\n"))
    inner = re.sub(r"^(?=.)", "    ", lines, flags=re.M)
    on_rank_0 = f"{indent}if {rank_of(source, statement)} == 0:\n{inner}"
    yield "on rank 0", statement, source.with_other((statement, on_rank_0))
    if after is not None and not isinstance(after, SKIPPED):
        swapped = [(statement, source.of(after)), (after, lines)]
        yield "after the next", statement, source.with_other(*swapped)
    if isinstance(statement, ast.If) and not statement.orelse:
        yield "without if", statement, source.with_other((statement.test, "True"))
    if isinstance(statement, ast.With) and not statement.items[0].optional_vars:
        end = source.span(statement.items[-1].context_expr)[1]
        begin = source.span(statement)[0] + len(indent)
        yield "without with", statement, source.with_other(((begin, end), "if True"))


def rank_of(source, statement):
    """How the function around it names its rank."""
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef):
            inside = any(node is statement for node in ast.walk(function))
            known = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
            if inside and "rank" in known | variables_of(function):
                return "rank"
    return "dist.get_rank()"


def expressions(tree):
    """(the innermost statement, a node of its expressions, that node's parent)"""
    for block in blocks(tree):
        for statement in block:
            if isinstance(statement, SKIPPED):
                continue
            todo = [(child, statement) for child in ast.iter_child_nodes(statement)]
            while todo:
                node, parent = todo.pop(0)
                if isinstance(node, ast.stmt):
                    continue
                yield statement, node, parent
                todo += [(child, node) for child in ast.iter_child_nodes(node)]


def of_expression(source, statement, node, parent):
    """(kind, text)"""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for other in NAMES.get(node.id, []):
            yield f"{node.id} -> {other}", source.with_other((node, other))
        for other in other_models(source, node.id):
            yield f"{node.id} -> {other}", source.with_other((node, other))
    if isinstance(node, ast.Call):
        yield from of_call(source, node)
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        between = source.span(node.left)[1], source.span(node.right)[0]
        yield from with_other_sign(source, between, SIGNS[type(node.op)])
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SIGNS:
        between = source.span(node.left)[1], source.span(node.comparators[0])[0]
        yield from with_other_sign(source, between, SIGNS[type(node.ops[0])])
    seeds = isinstance(parent, ast.Call) and "seed" in ast.unparse(parent.func)
    from_rank_0 = isinstance(parent, ast.keyword) and parent.arg in ("src", "dst", "seed")
    if isinstance(node, ast.Constant) and node.value == 0 and (seeds or from_rank_0):
        yield "0 -> rank", source.with_other((node, "rank"))


def with_other_sign(source, between, sign):
    old = source.raw[slice(*between)].decode()
    if re.fullmatch(r" \S+ ", old):
        yield f"{old.strip()} -> {sign}", source.with_other((between, f" {sign} "))


def of_call(source, call):
    arguments = [*call.args, *call.keywords]
    for i, argument in enumerate(arguments):
        if isinstance(argument, ast.keyword) and argument.arg:
            begin = source.span(arguments[i - 1])[1] if i else source.span(argument)[0]
            end = source.span(argument)[1]
            if not i and len(arguments) > 1:
                end = source.span(arguments[1])[0]
            yield f"without {argument.arg}=", source.with_other(((begin, end), ""))
    plain = [one for one in call.args if not isinstance(one, ast.Starred)]
    for first, second in itertools.pairwise(plain):
        swapped = [(first, source.of(second)), (second, source.of(first))]
        yield "arguments exchanged", source.with_other(*swapped)
    if ast.unparse(call.func).endswith("get_world_size"):
        yield "get_world_size() -> 1", source.with_other((call, "1"))


def other_models(source, name):
    """The plain model for a wrapped one, and the reverse: model = Distributed...(net)."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            wraps = re.search("Parallel|AveragedModel", ast.unparse(node.value.func))
            pair = [ast.unparse(node.targets[0]), ast.unparse(node.value.args[0])]
            if wraps and name in pair:
                yield pair[1 - pair.index(name)]
