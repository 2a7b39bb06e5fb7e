"""The rooms common/ and longrun/ stay what they are, and each module can be taken alone."""

import ast

import pytest
from conftest import ROOT


def imported(path):
    """The modules that a file of a room imports, such as common.loader or torch.nn."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join([path.parent.name] * node.level + [node.module or ""])
            yield from (f"{module}.{alias.name}" for alias in node.names)
            yield module


MODULES = {
    f"{room}.{path.stem}": {*imported(path)}
    for room in ("common", "longrun")
    for path in (ROOT / room).glob("[!_]*.py")
}


def test_common_needs_nothing_else_of_this_project():
    others = {"longrun", *(path.stem for path in ROOT.glob("*.py"))}
    for module, names in MODULES.items():
        if module.startswith("common."):
            assert not {name.split(".")[0] for name in names} & others, module


def test_no_import_goes_in_a_circle():
    """What imports none of those that are left can be taken away, until none is left."""
    left = set(MODULES)
    while free := {module for module in left if not MODULES[module] & left}:
        left -= free
    assert not left


@pytest.mark.parametrize("room", ["common", "longrun"])
def test_a_room_names_its_modules(room):
    words = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    words = words.replace(",", " ").replace(":", " ").split()
    for module in MODULES:
        if module.startswith(room):
            assert module.split(".")[1] in words
