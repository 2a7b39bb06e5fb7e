"""Each sentence of the doctor has its Chinese form, with the same fields."""

import ast
import re
from string import Formatter

import pytest
from conftest import ROOT

from doctor import words
from doctor.attach.words import VERBS, they
from doctor.words import both, clauses, listed, say
from doctor.zh import HEADINGS, SENTENCES
from tests.docs.test_docs import FENCE

FILES = sorted(path for path in (ROOT / "doctor").rglob("*.py") if path.parent.name != "zh")
# What is said to a person; the others' words are for those who read the code, or help.
SAYS = [path for path in FILES if path.parent.name in ("judges", "attach", "recorder")]
SAYS += [ROOT / f"doctor/{name}.py" for name in ("report", "command", "notebook", "files/tell")]
SAYS = [path for path in SAYS if path.stem not in ("places", "ranks", "look", "source")]


def calls_of(tree):
    """The calls of say(), also as words.say()."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c for c in calls if getattr(c.func, "id", getattr(c.func, "attr", "")) == "say"]


def templates():
    found = {template for pair in VERBS.values() for template in pair}
    for path in FILES:
        for call in calls_of(ast.parse(path.read_text())):
            literal = isinstance(call.args[0], ast.Constant)
            assert literal or path.name == "words.py", (path, call.lineno)
            found |= {call.args[0].value} if literal else set()
    return found


def fields(template):
    return sorted((name, spec) for _, name, spec, _ in Formatter().parse(template) if name)


def test_every_sentence_has_its_chinese_form():
    assert templates() == SENTENCES.keys()
    for english, chinese in SENTENCES.items():
        assert fields(english) == fields(chinese), english


# Names and signs alone.
SAME = {"rank {rank}", "{call} {sizes}", "{text} `{code}`", "{line}  {text}  → {page}"}
SAME |= {"{line}  rank {rank} {how}", "1/{size} of", "ranks {ranks}"}


def test_no_sentence_is_left_in_english():
    for english, chinese in SENTENCES.items():
        inside = "".join(text for text, *_ in Formatter().parse(chinese))
        signs = re.search("[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]", inside)
        silent = english in {template for verb in ("has", "is") for template in VERBS[verb]}
        assert signs or silent or english in SAME, english


def docstrings(tree):
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


# An error for those who write a judge, a command's help and errors of its words, torch's own
# errors, a kind of event, and a command.
NOT_SAID = r"^(not in ABOUT or GENERAL|finished reduction|names a gpu$|sudo sysctl|closed by peer)"
NOT_SAID += r"|^one of the job|^from the first look|^write what|^look at all nodes|^do not stop"
NOT_SAID += r"|^Look at a job|^give processes of|^0.5 to 3600: a look|^--slurm finds"
NOT_SAID += r"|^ is no notebook|^(closed|reset) by peer"


@pytest.mark.parametrize("path", SAYS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_said_goes_through_the_table(path):
    """No sentence of three words stands outside of say()."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for call in calls_of(tree) for node in ast.walk(call)} | docstrings(tree)
    keys = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and is_named(n, "GENERAL")]
    inside |= {id(node) for key in keys for node in ast.walk(key)}
    for node in ast.walk(tree):
        text = getattr(node, "value", "")
        if isinstance(node, ast.Constant) and isinstance(text, str) and id(node) not in inside:
            sentence = re.search(r"[a-z]+,? [a-z]+,? [a-z]+", text)
            names = re.search(r"^[a-z_]+(\s[a-z_]+)*$", text) and "reduce" in text
            said = sentence and not names and not re.search(NOT_SAID, text)
            assert not said, (path, node.lineno, text)


def is_named(node, name):
    return any(getattr(target, "id", "") == name for target in node.targets)


def test_parts_are_said_in_chinese_too(monkeypatch):
    said = say(
        "{said}: will the timeout be longer?",
        said=clauses(
            [
                say("rank {rank} is at {line}", rank=0, line="a.py:3"),
                say(
                    "rank {rank} waits in {call} at {line}",
                    rank=1,
                    call="the forward pass of DDP",
                    line="a.py:5",
                ),
            ]
        ),
    )
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    english = "rank 0 is at a.py:3, rank 1 waits in the forward pass of DDP at a.py:5"
    assert words.on_screen(said) == said == f"{english}: will the timeout be longer?"
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert words.on_screen(said) == (
        "rank 0 在 a.py:3\uff0crank 1 在 a.py:5 等待 DDP 的前向\uff1atimeout 够长吗\uff1f"
    )
    assert words.on_screen(both([1, 2])) == "1 和 2" and both([1, 2]) == "1 and 2"
    assert words.on_screen(listed("ab")) == "a\u3001b" and listed("ab") == "a, b"
    assert words.on_screen(they([0], "waits")) == "rank 0 在等"
    assert they([0, 1, 3], "waits") == "ranks 0, 1 and 3 wait"
    line = say("{ranks} in {call} ({line})", ranks="", call="Horovod's allreduce", line="")
    assert "Horovod 的 allreduce" in words.on_screen(line)
    assert words.on_screen("if rank == 0 (line 7)") == "if rank == 0\uff08第 7 行\uff09"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_TW.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, False),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, True),
        ({"LC_ALL": "C", "LC_MESSAGES": "zh_CN", "LANG": "zh_CN"}, False),
        ({"LC_ALL": "", "LANG": "zh"}, True),
        ({}, False),
    ],
)
def test_the_locale_of_messages(env, expected, monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert words.is_chinese() == expected
    page = words.page("bugs.md#padded-validation")
    assert page.startswith("docs/bugs.zh-CN.md#" if expected else "docs/bugs.md#padded")


def headings(page):
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", (ROOT / "docs" / page).read_text()), re.M)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in found]


def test_the_headings_are_those_of_the_chinese_pages():
    expected = {}
    for name in ("bugs", "doctor", "faq", "debugging"):
        pairs = zip(headings(f"{name}.md"), headings(f"{name}.zh-CN.md"), strict=True)
        expected |= {f"{name}.md#{english}": chinese for english, chinese in pairs}
    assert expected == HEADINGS
