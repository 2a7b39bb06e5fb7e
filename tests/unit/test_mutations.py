"""The mistakes of tests/mutations.txt still fit the code: python tests/mutations.py makes them."""

import pytest
from conftest import ROOT

from tests import mutations


@pytest.mark.parametrize("mutation", mutations.read(), ids=lambda mutation: mutation.title)
def test_it_fits(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.right) == 1
    assert mutation.right != mutation.wrong
    assert (ROOT / mutation.tests[0]).exists() and mutation.tests[1] == "-k"


def test_a_mistake_is_noticed_and_undone(tmp_path):
    (tmp_path / "module.py").write_text("value = 1\n")
    (tmp_path / "test_module.py").write_text(
        "from module import value\ndef test_it(): assert value == 1\ndef test_other(): pass\n"
    )
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--all', action='store_true')\n"
    )
    for name, noticed in (("it", True), ("other", False)):
        tests = ["test_module.py", "-k", f"test_{name}"]
        mutation = mutations.Mutation("it", "module.py", "value = 1", "value = 2", tests)
        assert mutations.is_noticed(mutation, tmp_path) == noticed
    assert (tmp_path / "module.py").read_text() == "value = 1\n"
