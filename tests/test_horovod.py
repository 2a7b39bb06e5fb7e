"""horovod_distributed.py under the real horovodrun, against distributed.py."""

import importlib.util
import os
import shutil
import signal
import sysconfig
import time
from pathlib import Path

import pytest
from conftest import (
    PYTHON,
    ROOT,
    SMALL,
    Job,
    forked,
    forking,
    full,
    last_result,
    load,
    rows,
    run,
    same_state,
)

# In CI a missing Horovod fails the tests: they start a horovodrun that is not there.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None and not os.environ.get("CI"),
    reason="Horovod is not installed: tools/install_horovod.sh",
)
SCRIPT = ROOT / "horovod_distributed.py"
INSTALL = ROOT / "tools/install_horovod.sh"
SCRIPTS = sysconfig.get_path("scripts")
# BatchNorm, dropout and weight decay, over the end of an epoch of 29 steps.
NORMED = [*"--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2".split()]
NORMED += [*"--wd 1e-2 -j 1 --max-steps 36".split()]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def horovodrun(processes, script=SCRIPT):
    return [f"{SCRIPTS}/horovodrun", "-np", processes, PYTHON, script]


def worker(job, rank):
    """The pid of the training process of this rank: older than its loader workers."""
    mark = f"\0HOROVOD_RANK={rank}\0".encode()
    return next(p for p in job.pids() if mark in Path(f"/proc/{p}/environ").read_bytes())


@pytest.fixture(scope="module")
def reference(work):
    """The folder of two processes of distributed.py that trained on NORMED without a break."""
    run([*forked(ranks=2), *NORMED, "--checkpoint-dir", "reference"], work, env=ONE_THREAD)
    return work / "reference"


@pytest.fixture(scope="module")
def uneven(work):
    """The digits with 353 images to validate, a prime."""
    folder = work / "uneven"
    shutil.copytree(work / "data/digits", folder)
    for path in sorted((folder / "val").glob("*/*"))[::50][:7]:
        path.unlink()
    assert len(list((folder / "val").glob("*/*"))) == 353
    return folder


def result(output):
    """last_result() of what horovodrun has put the rank before."""
    return last_result(output.replace("[0]<stdout>:", ""))


@pytest.mark.parametrize("processes", [2, full(4)])
def test_trains_and_evaluates_exactly(work, uneven, processes):
    folder = work / f"hvd-np{processes}"
    flags = [*SMALL, "--data", uneven, *"-j 0 --lr 0.5 --warmup-epochs 0".split()]
    flags += ["--checkpoint-dir", folder]
    env = forking() if processes == 4 else {}
    output = run([*horovodrun(processes), *flags, "--max-steps", 50], work, env=env)
    assert f"48 = {processes} x {48 // processes}" in output
    trained = result(output)
    assert trained[1] > 50 and len(rows(folder)) == 2
    flags += ["--evaluate", "--resume", folder / "checkpoint.pth"]
    one = last_result(run([*forked(), *flags], work))
    assert trained == pytest.approx(one, abs=2e-4)
    if processes == 2:
        assert result(run([*horovodrun(2), *flags], work)) == trained


def test_is_the_same_as_ddp(work, reference):
    run([*horovodrun(2), *NORMED, "--checkpoint-dir", "hvd-same"], work, env=ONE_THREAD)
    assert same_state(load(work / "hvd-same"), load(reference))
    assert rows(work / "hvd-same", timings=False) == rows(reference, timings=False)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["resnet18", "shufflenet_v2_x0_5", "mobilenet_v3_small"])
def test_is_the_same_as_ddp_with_models_of_torchvision(work, arch):
    """In channels_last, with depthwise convolutions too."""
    flags = ["--arch", arch, *"--batch-size 32 --max-steps 3 --wd 1e-2 -j 1".split()]
    flags.append("--checkpoint-dir")
    run([*horovodrun(2), *flags, f"hvd-{arch}"], work, env=ONE_THREAD | forking())
    run([*forked(ranks=2), *flags, f"ddp-{arch}"], work, env=ONE_THREAD)
    assert same_state(load(work / f"hvd-{arch}"), load(work / f"ddp-{arch}"))
    left, right = (rows(work / f"{name}-{arch}", timings=False) for name in ("hvd", "ddp"))
    assert left == right


@pytest.mark.full
@pytest.mark.parametrize("first, second", [("hvd", "ddp"), full("ddp", "hvd")])
def test_resumes_in_mid_epoch(work, reference, first, second):
    start, folder = {"hvd": horovodrun(2), "ddp": forked(ranks=2)}, f"{first}-to-{second}"
    flags = [*NORMED, "--checkpoint-dir", folder]
    env = ONE_THREAD | forking()
    run([*start[first], *flags, "--max-steps", 10], work, env=env)
    half = load(work / folder)
    assert (half["epoch"], half["step"]) == (0, 10)
    assert all(state["momentum_buffer"].any() for state in half["optimizer"]["state"].values())
    output = run([*start[second], *flags, "--resume", "auto"], work, env=env)
    assert "resumed from" in output and "epoch 0 step 10" in output
    assert same_state(load(work / folder), load(reference))


@pytest.mark.full
def test_one_process_needs_no_launcher(work):
    flags = [*NORMED, "--max-steps", 8, "--checkpoint-dir"]
    run([PYTHON, SCRIPT, *flags, "hvd-alone"], work)
    run([*forked(), *flags, "ddp-alone"], work)
    assert same_state(load(work / "hvd-alone"), load(work / "ddp-alone"))


@pytest.mark.full
def test_sigterm_to_one_worker_saves_and_ends_all(work):
    flags = [*NORMED, *"--epochs 60 --max-steps 1700 -p 1 --checkpoint-dir hvd-stop".split()]
    job = Job([*horovodrun(2), *flags], work)
    job.wait_for(r"epoch 0 \[5/29\]")
    os.kill(worker(job, 1), signal.SIGTERM)
    code, output = job.wait(60)
    assert code == 1 and "saved: --resume auto goes on" in output and "Exit code: 75" in output
    saved = load(work / "hvd-stop")
    assert saved["step"] > 0 and "killed" not in output
    last = saved["epoch"] * 29 + saved["step"] + 3
    again = [*horovodrun(2), *flags, "--resume", "auto", "--max-steps", last]
    output = run(again, work, env=forking())
    assert f"at epoch {saved['epoch']} step {saved['step']}" in output
    assert load(work / "hvd-stop")["step"] == (saved["step"] + 3) % 29


def test_a_killed_worker_ends_the_job(work):
    flags = [*NORMED, *"--epochs 60 --max-steps 1700 -p 1 --checkpoint-dir hvd-kill".split()]
    job = Job([*horovodrun(2), *flags], work)
    job.wait_for(r"epoch 0 \[5/29\]")
    killed = time.monotonic()
    os.kill(worker(job, 1), signal.SIGKILL)
    code, output = job.wait(60)
    assert code == 1 and time.monotonic() - killed < 40
    assert "Process 1 exit with status code 137" in output  # horovodrun's process 1 is rank 1


@pytest.mark.full
def test_a_killed_launcher_leaves_no_worker(work):
    flags = [*NORMED, *"--epochs 60 --max-steps 1700 -p 1 --checkpoint-dir hvd-orphan".split()]
    job = Job([*horovodrun(2), *flags], work)
    job.wait_for(r"epoch 0 \[5/29\]")
    job.process.kill()
    deadline = time.monotonic() + 30
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.2)
    left = job.pids()
    job.kill()
    assert not left


@pytest.mark.full
def test_fp16_allreduce_trains(work, reference):
    flags = [*NORMED, "--fp16-allreduce", "--checkpoint-dir", "hvd-half"]
    run([*horovodrun(2), *flags], work, env=ONE_THREAD | forking())
    half, full = load(work / "hvd-half")["state_dict"], load(reference)["state_dict"]
    assert not half["0.weight"].equal(full["0.weight"])  # it was rounded on its way
    assert half["0.weight"].allclose(full["0.weight"], atol=1e-2)
    assert rows(work / "hvd-half")[-1]["acc1"] > 60


@pytest.mark.full
def test_fp16_is_the_same_as_ddp(work, tmp_path):
    """And the scaler reads no number in a step, for which the host would wait for the GPU."""
    flags = [*NORMED, "--precision", "fp16", "--checkpoint-dir"]
    script = tmp_path / "horovod_distributed.py"
    script.write_text(
        "import runpy, torch\n"
        "torch.amp.GradScaler._maybe_opt_step = None  # it would look whether to take the step\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    env = ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    output = run([*horovodrun(2, script), *flags, "hvd-fp16"], work, env=env)
    assert "UserWarning" not in output
    run([*forked(ranks=2), *flags, "ddp-fp16"], work, env=ONE_THREAD)
    assert load(work / "hvd-fp16")["scaler"]["scale"] > 0
    assert same_state(load(work / "hvd-fp16"), load(work / "ddp-fp16"))


@pytest.mark.parametrize("init", ["raise ImportError('No module named horovod')", "_ = 0"])
def test_says_what_to_do_without_horovod(work, tmp_path, init):
    """A double stands in for no Horovod, and for one that was built without torch."""
    (tmp_path / "horovod/torch").mkdir(parents=True)
    (tmp_path / "horovod/__init__.py").write_text(init)
    (tmp_path / "horovod/torch/__init__.py").write_text("raise ImportError('not been built')")
    output = run([PYTHON, SCRIPT], work, env={"PYTHONPATH": str(tmp_path)}, code=2)
    assert output.count("\n") == 1 and "tools/install_horovod.sh" in output


def test_a_horovod_for_cpus_beside_a_gpu(work):
    """The GPU is made up: this proves that it is said, and before Horovod would abort."""
    fake = (
        "import runpy, sys, torch; torch.cuda.device_count = lambda: 1; "
        "torch.cuda.set_device = print; "
        "sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    output = run([PYTHON, "-c", fake, SCRIPT], work, env={"PYTHONPATH": str(ROOT)}, code=2)
    assert "\nerror: this Horovod knows no GPUs: install nvcc, then Horovod again\n" in output


@pytest.mark.full
def test_install_is_safe_to_run_twice(work):
    output = run([INSTALL], work, env={"PATH": f"{SCRIPTS}:{os.environ['PATH']}"})
    assert "is installed" in output and output.count("the mean of 0 and 1 is 0.5") == 2


@pytest.mark.full
def test_install_names_what_it_needs(work, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert "needs torch" in run([INSTALL], work, env=path, code=2)
    (tmp_path / "horovod.py").write_text("raise ImportError")
    none = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    output = run([INSTALL], work, env={**none, "CXX": "/no/compiler"}, code=2)
    assert "needs a compiler of C++20, which /no/compiler is not" in output
