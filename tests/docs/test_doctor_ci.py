"""The doctor in CI: lines that GitHub shows in the code, SARIF, and the repository's action."""

import json
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import yaml
from conftest import PYTHON, ROOT, without_launchers

from doctor import formats
from doctor.judges import Finding
from tests.docs.copies import USER
from tests.docs.test_doctor_starts import LOOP, ORDER, PLAIN

PAGE = "docs/bugs.md#set_epoch-is-forgotten"


def told(folder, *found, failed=(), stopped="", code=1):
    return formats.Told(list(found), list(failed), stopped, code, str(folder))


def finding(line, text="50 % of it,\r\nor: less", certain=True):
    return Finding(line, text, PAGE, certain)


@pytest.fixture
def repository(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "a b").mkdir()
    return tmp_path / "a b"


# ---- GitHub


def test_lines_for_github(repository):
    """Names are from the repository's root; signs with a meaning in its commands become codes."""
    report = told(
        repository,
        finding("x,y.py:7"),
        finding("../lib.py:3", "less", certain=False),
        finding("t.ipynb cell 2:5", "less"),
        finding("?", "less"),
        failed=["x.py:9  rank 0 failed: ValueError: no"],
        stopped="it had stood still for 15 s",
    )
    rule = "title=doctor%3A set_epoch-is-forgotten"
    assert formats.written(report, "github").splitlines() == [
        f"::error file=a b/x%2Cy.py,line=7,{rule}::50 %25 of it,%0D%0Aor: less → {PAGE}",
        f"::warning file=lib.py,line=3,{rule}::less → {PAGE}",
        f"::error file=a b/t.ipynb,{rule}::t.ipynb cell 2:5: less → {PAGE}",
        f"::error {rule}::less → {PAGE}",
        "::error file=a b/x.py,line=9,title=doctor%3A failed::rank 0 failed: ValueError: no",
        "::error title=doctor%3A stopped::it had stood still for 15 s",
    ]


def test_a_file_outside_of_the_repository_has_its_whole_name(repository):
    place = formats.place_of("../../out.py:3", str(repository))
    assert place == (str(repository.parent.parent / "out.py"), 3)
    where = formats.physical(*place)["artifactLocation"]
    assert where == {"uri": (repository.parent.parent / "out.py").as_uri()}


# ---- SARIF


def check_sarif(text, code, files):
    """What SARIF 2.1.0 requires of the objects that are there, and GitHub beside."""
    log = json.loads(text)
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (one,) = log["runs"]
    driver = one["tool"]["driver"]
    assert driver["name"] == "doctor"
    names = [rule["id"] for rule in driver["rules"]]
    assert len(names) == len({*names})
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["help"]["text"]
    (invocation,) = one["invocations"]
    assert invocation == {"executionSuccessful": code < 2, "exitCode": code}
    ((name, base),) = one["originalUriBaseIds"].items()
    assert base["uri"].startswith("file:///") and base["uri"].endswith("/")
    seen = []
    for result in one["results"]:
        assert names[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note", "none")
        assert result["message"]["text"]
        for location in result.get("locations", []):
            place = location["physicalLocation"]
            uri = place["artifactLocation"]["uri"]
            assert not urlparse(uri).scheme and not uri.startswith("/") and " " not in uri
            assert place["artifactLocation"]["uriBaseId"] == name
            assert place.get("region", {"startLine": 1})["startLine"] > 0
            seen.append(unquote(uri))
            assert Path(urlparse(base["uri"]).path).is_dir()
    assert seen == files
    return one["results"]


def test_sarif(repository):
    report = told(
        repository,
        finding("x y.py:7"),
        finding("x y.py:9", "less", certain=False),
        finding("t.ipynb cell 2:5", "less"),
        finding("?", "less"),
        failed=["x.py:9  rank 0 failed: ValueError: no"],
        code=3,
    )
    files = ["a b/x y.py", "a b/x y.py", "a b/t.ipynb", "a b/x.py"]
    results = check_sarif(formats.written(report, "sarif"), 3, files)
    assert [one["level"] for one in results] == ["error", "warning", "error", "error", "error"]
    assert [one["ruleId"] for one in results] == [PAGE] * 4 + ["failed"]
    assert results[2]["message"]["text"] == "t.ipynb cell 2:5: less"
    check_sarif(formats.written(told(repository, code=0), "sarif"), 0, [])


# ---- The action


def outcome(words, folder, env, stderr=subprocess.STDOUT):
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=without_launchers(os.environ) | USER | {"CUDA_VISIBLE_DEVICES": ""} | env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=400,
    )


ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def as_github(folder, step, **inputs):
    """(exit code, what it prints, its outputs): the step's shell lines, run as a runner does."""
    given = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    known = {f"inputs.{name}": value for name, value in given.items()}
    known["github.action_path"] = str(ROOT)
    env = {
        name: re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda found: known[found[1]], value)
        for name, value in step["env"].items()
    }
    lines = folder / "step.sh"
    lines.write_text(step["run"])
    (folder / "outputs").touch()
    env |= {"GITHUB_OUTPUT": str(folder / "outputs")}
    done = outcome(["bash", "--noprofile", "--norc", "-eo", "pipefail", lines], folder, env)
    outputs = dict(one.split("=", 1) for one in (folder / "outputs").read_text().split())
    return done.returncode, done.stdout, outputs


def test_the_action_is_a_composite_one():
    """As GitHub describes it; and what it reads is there."""
    assert {"name", "description", "inputs", "outputs", "runs"} == ACTION.keys()
    assert ACTION["runs"]["using"] == "composite"
    (step,) = ACTION["runs"]["steps"]
    assert step["shell"] == "bash" and "${{" not in step["run"]
    text = (ROOT / "action.yml").read_text()
    assert {*re.findall(r"inputs\.([\w-]+)", text)} == ACTION["inputs"].keys()
    assert all(one["description"] for one in ACTION["inputs"].values())
    assert [name for name, one in ACTION["inputs"].items() if one.get("required")] == ["script"]
    assert {*re.findall(r"steps\.(\w+)\.outputs", text)} == {step["id"]}
    checked = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=step["run"], text=True, capture_output=True
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.full
def test_the_action_shows_a_mistake(tmp_path):
    """In a repository with a script in a folder; the SARIF file is the same report."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text(PLAIN)
    (step,) = ACTION["runs"]["steps"]
    code, output, outputs = as_github(
        tmp_path, step, script="src/train.py", flags="--quick", python=PYTHON, sarif="d.sarif"
    )
    said = "::error file=src/train.py,line={},title=doctor%3A set_epoch-is-forgotten::{} → {}\n"
    assert said.format(LOOP, ORDER, PAGE) in output, output
    assert code == 1 and outputs == {"code": "1"}
    (found,) = check_sarif((tmp_path / "d.sarif").read_text(), 1, ["src/train.py"])
    assert found["message"]["text"] == ORDER


@pytest.mark.parametrize(("fails_on", "code"), [("error", 2), ("mistake", 0)])
def test_what_fails_the_step(fails_on, code, tmp_path):
    """A script that cannot be found is nothing to look at, and no mistake."""
    (step,) = ACTION["runs"]["steps"]
    given = {"script": "no.py", "python": PYTHON, "fail-on": fails_on}
    ended, output, outputs = as_github(tmp_path, step, **given)
    assert (ended, outputs) == (code, {"code": "2"}), output


def test_a_format_alone_on_the_output(tmp_path):
    """SARIF can be piped on: all else goes to stderr, what the script prints too."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    words = [PYTHON, ROOT / "doctor", "--quick", "--format=sarif", "--by=python", "train.py"]
    done = outcome(words, tmp_path, {}, stderr=subprocess.PIPE)
    assert done.returncode == 2, done.stderr
    check_sarif(done.stdout, 2, [])
    assert "hello" in done.stderr and "joins no process group" in done.stderr


def test_the_workflow_of_the_pages_fits_the_action():
    for page in ("docs/doctor.md", "docs/doctor.zh-CN.md"):
        (shown,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
        steps = yaml.safe_load(shown)
        (uses,) = (step for step in steps if "OWNER/" in step.get("uses", ""))
        assert len(shown.splitlines()) == 5 and uses["with"].keys() <= ACTION["inputs"].keys()
