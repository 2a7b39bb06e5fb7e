"""benchmarks.gpu_hour: rehearsed whole at a small size; what fails or is killed takes one part."""

import json
import shutil
import signal
import time

import pytest
from conftest import PYTHON, Job, full, run

from benchmarks.gpu_hour import NAMES
from tests.launched import IN_ROOT
from tests.run.test_benchmark import PATIENCE, command, has_torch

# A network of its own, in which there is nothing but this machine.
NO_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"']
NO_NETWORK += ["sh"]
# What each part measures: the benchmark that writes it, the names of its runs, and a figure.
FOUND = {
    "facts": ("facts", {"matrix product, bf16", "copy within the device"}, "rate"),
    "steps": ("step", {"script", "bare", "plain"}, "ms"),
    "fp16": ("step", {"script", "bare", "plain"}, "ms"),
    "compile": ("step", {"script", "bare", "plain"}, "ms"),
    "batches": ("batches", {"as it is", "compiled"}, "ms"),
    "strategies": ("strategies", {"distributed"}, "images_per_second"),
    "loader": ("loader", {"decoding whole images alone"}, "images_per_second"),
}
SETTINGS = {"fp16": ("precision", "fp16"), "compile": ("compile", True)}


def parts_in(folder):
    return json.loads((folder / "gpu_hour.json").read_text())["parts"]


@pytest.mark.full
@pytest.mark.timeout(2200)
def test_all_parts_at_a_small_size(work, tmp_path):
    shutil.copytree(work / "data", tmp_path / "data")
    words = [*NO_NETWORK, *command("gpu_hour", "--small", "--out", "out")]
    # Two parts compile the same model: g++ is called once for both.
    env = IN_ROOT | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    output = run(words, tmp_path, 2000, env=env)
    parts = parts_in(tmp_path / "out")
    limits = [part["limit"] for part in parts.values()]
    assert max(limits) < 10 * 60 and sum(limits) <= 49 * 60  # as docs/measured.md says
    assert list(parts) == NAMES and output.endswith("gpu_hour.json; failed: none\n")
    for name, part in parts.items():
        assert part["end"] == "done" and part["exit_code"] == 0 and part["began"], name
        assert 0 < part["seconds"] < part["limit"]
        assert "no GPU" in part["machine"]["hardware"] and part["machine"]["torch"]
        if name not in FOUND:
            continue
        benchmark, expected, figure = FOUND[name]
        (results,) = part["results"].values()
        assert [*part["results"]] == [benchmark] and "torch" in results["versions"]
        runs = results["runs"]
        found = {run.get("name") or run.get("model") or run["strategy"] for run in runs}
        assert expected <= found
        values = [run[figure] for run in runs]
        assert all((x["median"] if isinstance(x, dict) else x) > 0 for x in values), name
        assert benchmark != "step" or all(run["peak_memory_mb"] for run in runs)
        key, value = SETTINGS.get(name, (None, None))
        assert results["settings"].get(key) == value
    # Each of these tests says by itself that there is no GPU; each is in one part.
    tests = {name: part["tests"] for name, part in parts.items() if part["tests"]}
    assert list(tests) == ["prefetcher", "waiting", "tests"]
    assert len(tests["prefetcher"]) == len(tests["waiting"]) == 1 and len(tests["tests"]) > 9
    assert {outcome for part in tests.values() for outcome in part.values()} == {"skipped"}
    assert len({test for part in tests.values() for test in part}) == sum(map(len, tests.values()))


@pytest.mark.full
def test_killed_in_the_midst_of_a_benchmark(tmp_path):
    """Itself, its keeper, the benchmark and three contestants have torch, but for the keeper."""
    words = command("gpu_hour", "--small", "--only", "steps")
    job = Job(words, tmp_path, IN_ROOT | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + PATIENCE
    while sum(map(has_torch, job.pids())) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    job.process.kill()
    job.finish(code=-9, timeout=60)  # fails if a process is left


# Parts that are run in place of the real ones: `python -m` one of these modules.
MODULES = {
    "fails": "import sys\nprint('nothing to measure')\nsys.exit(3)",
    # Below it a process that has left its session and its parent, and does not end when told to.
    "late": """
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    if os.fork() == 0:
        open("detached", "w").close()
        time.sleep(1000)
    os._exit(0)
print("so far so good", flush=True)
time.sleep(1000)
""",
    "good": """
import json, sys
json.dump({"runs": [7]}, open(sys.argv[-1] + "/good.json", "w"))
open(sys.argv[-1] + "/half.json", "w").write('{"runs": [')
print("../test_a.py::test[a b] PASSED  [ 50%]\\n../test_a.py::test_b FAILED  [100%]")
""",
}


def start(parts, folder, *flags):
    """The driver with these parts: {name: (seconds at most, module)}. The names are real ones'."""
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    code = f"import benchmarks.gpu_hour as hour\nhour.parts = lambda _: {parts}\nhour.main()"
    env = {"PYTHONPATH": f"{IN_ROOT['PYTHONPATH']}:{folder}"}
    return Job([PYTHON, "-c", code, "--small", "--out", "out", *flags], folder, env)


@pytest.mark.full
def test_a_part_that_fails_or_is_late_leaves_the_others(tmp_path):
    """And what was measured stays, whatever a later call does."""
    three = {"facts": (60, "fails"), "steps": (15, "late"), "tests": (60, "good")}
    output = start(three, tmp_path).finish(code=1)  # fails if a process is left
    assert "tests: done, 1 passed, 1 failed, " in output
    assert output.endswith("failed: facts, steps\n") and (tmp_path / "detached").exists()
    first = parts_in(tmp_path / "out")
    ends = {name: (part["end"], part["exit_code"]) for name, part in first.items()}
    late = ("over its limit", None)
    assert ends == {"facts": ("failed", 3), "steps": late, "tests": ("done", 0)}
    assert first["facts"]["tail"] == "nothing to measure\n"
    assert first["steps"]["tail"] == "so far so good\n"
    assert first["tests"]["results"] == {"good": {"runs": [7]}}
    assert first["tests"]["tests"] == {
        "test_a.py::test[a b]": "passed",
        "test_a.py::test_b": "failed",
    }

    # Again: what is not measured yet. Then a measured one, which fails now.
    start(three | {"facts": (60, "good"), "steps": (60, "fails")}, tmp_path).finish(code=1)
    again = parts_in(tmp_path / "out")
    assert again["facts"]["end"] == "done" and again["steps"]["exit_code"] == 3
    assert again["tests"] == first["tests"]
    start({"tests": (60, "fails"), "loader": (60, "fails")}, tmp_path, "--only", "tests").finish(1)
    last = parts_in(tmp_path / "out")
    assert last["tests"].pop("later")["exit_code"] == 3 and last == again


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), full(signal.SIGTERM, 143)])
def test_ended_it_leaves_no_process(number, code, tmp_path):
    job = start({"steps": (1000, "late")}, tmp_path)
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "detached").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.process.send_signal(number)
    job.finish(code, timeout=30)  # fails if a process is left


@pytest.mark.full
def test_what_it_refuses(tmp_path):
    """Neither a rehearsal nor a file of something else gets into what was measured."""
    (tmp_path / "gpu_hour.json").write_text('{"small": false, "parts": {}}')
    words = command("gpu_hour", "--out", tmp_path)
    output = run([*words, "--small"], tmp_path, env=IN_ROOT, code=2)
    line = "gpu_hour.json holds no rehearsal (no --small): choose another --out\n"
    assert output.startswith("error: ") and output.endswith(line)
    assert "--small rehearses on CPUs" in run(words, tmp_path, env=IN_ROOT, code=2)
