"""horovod_distributed.py under the real horovodrun, against distributed.py."""

import importlib.util
import os
import re
import shutil
import signal
import sysconfig
from pathlib import Path

import pytest
from conftest import (
    HOROVODRUN,
    PYTHON,
    ROOT,
    SMALL,
    Job,
    last_result,
    load,
    python,
    rows,
    run,
    same_state,
    torchrun,
)

from tests.cluster.ddp import TWO_THREADS, ddp
from tests.launched import FLAGS, same_run

# In CI a missing Horovod fails the tests: they start a horovodrun that is not there.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None and not os.environ.get("CI"),
    reason="Horovod is not installed: tools/install_horovod.sh",
)
SCRIPT = ROOT / "horovod_distributed.py"
INSTALL = ROOT / "tools/install_horovod.sh"
TWO = [*HOROVODRUN, SCRIPT]


def worker(job, rank):
    """The pid of the training process of this rank: older than its loader workers."""
    mark = f"\0HOROVOD_RANK={rank}\0".encode()
    return next(p for p in job.pids() if mark in Path(f"/proc/{p}/environ").read_bytes())


def test_is_the_same_as_ddp(work):
    run([*TWO, *FLAGS, "--checkpoint-dir", "hvd"], work, env=TWO_THREADS)
    same_run(work / "hvd", ddp(work))


@pytest.mark.full
def test_is_the_same_as_ddp_in_channels_last(work):
    """Its depthwise convolutions would differ, if the model were contiguous."""
    flags = "--arch shufflenet_v2_x0_5 --image-size 32 --batch-size 32 --max-steps 3".split()
    for name, command in {"hvd": TWO, "ddp": torchrun(2)}.items():
        command = [*command, *flags, "--checkpoint-dir", f"{name}-shuffle"]
        run(command, work, env=TWO_THREADS)
    assert same_state(load(work / "hvd-shuffle"), load(work / "ddp-shuffle"))


@pytest.mark.full
def test_goes_on_from_ddp_is_stopped_and_ddp_goes_on(work, tmp_path):
    """SIGTERM for one worker: all save, and horovodrun kills none of them before."""
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    run([*torchrun(2), *flags, "--max-steps", 8], work, env=TWO_THREADS)
    job = Job([*TWO, *flags], work, TWO_THREADS)
    output = job.wait_for(r"epoch 0 \[14/29\]")
    assert re.search("resumed from .* at epoch 0 step 8", output)
    os.kill(worker(job, 1), signal.SIGTERM)
    code, output = job.wait(60)
    assert code == 1 and "Exit code: 75" in output and "killed" not in output
    (place,) = re.findall("stopped at (.*), saved: --resume auto goes on", output)
    output = run([*torchrun(2), *flags], work, env=TWO_THREADS)
    assert f"at {place}\n" in output
    assert same_state(load(tmp_path / "c"), load(ddp(work)))
    at_8, *others = rows(tmp_path / "c", timings=False)
    assert at_8["step"] == 8 and others == rows(ddp(work), timings=False)


@pytest.mark.full
def test_a_worker_that_hangs_ends_the_job(work, tmp_path):
    """Horovod itself would only warn, once a minute."""
    flags = [*FLAGS, "--epochs", "60", "--max-steps", "1700", "--checkpoint-dir", tmp_path / "c"]
    job = Job([*TWO, *flags, "--dist-timeout", "5"], work, TWO_THREADS)
    job.wait_for(r"epoch 0 \[5/29\]")
    suspended = worker(job, 1)
    os.kill(suspended, signal.SIGSTOP)
    output = job.wait_for(r"rank 0 failed at epoch \d+ step \d+: ", 60)
    os.kill(suspended, signal.SIGCONT)  # horovodrun's SIGTERM does not end what is suspended
    code, _ = job.wait(60)
    assert code == 1 and "in train\n" in output, output


@pytest.mark.full
def test_evaluates_exactly(work, tmp_path):
    """353 images, a prime, on four processes, and then on one, which needs no launcher."""
    shutil.copytree(work / "data/digits", tmp_path / "uneven")
    for path in sorted((tmp_path / "uneven/val").glob("*/*"))[::50][:7]:
        path.unlink()
    assert len(list((tmp_path / "uneven/val").glob("*/*"))) == 353
    flags = [*SMALL, "--data", tmp_path / "uneven", *"-j 0 --lr 0.5 --warmup-epochs 0".split()]
    flags += ["--checkpoint-dir", tmp_path / "c"]
    four = [*HOROVODRUN[:2], 4, PYTHON, SCRIPT]
    output = run([*four, *flags, "--max-steps", 50], work).replace("[0]<stdout>:", "")
    assert "48 = 4 x 12" in output and len(rows(tmp_path / "c")) == 2
    trained = last_result(output)
    assert trained[1] > 50
    again = [*flags, "--evaluate", "--resume", tmp_path / "c/checkpoint.pth"]
    for script in (SCRIPT, "distributed.py"):
        assert last_result(run([*python(script), *again], work)) == pytest.approx(trained, abs=2e-4)


@pytest.mark.full
def test_fp16_allreduce_trains(work, tmp_path):
    flags = [*FLAGS, "--fp16-allreduce", "--checkpoint-dir", tmp_path / "c"]
    run([*TWO, *flags], work, env=TWO_THREADS)
    half, whole = load(tmp_path / "c")["state_dict"], load(ddp(work))["state_dict"]
    assert not half["0.weight"].equal(whole["0.weight"])  # it was rounded on its way
    assert half["0.weight"].allclose(whole["0.weight"], atol=1e-2)
    assert rows(tmp_path / "c")[-1]["acc1"] > 60


@pytest.mark.full
def test_fp16_is_the_same_as_ddp(work, tmp_path):
    """And the scaler reads no number in a step, for which the host would wait for the GPU."""
    flags = [*FLAGS, "--precision", "fp16", "--checkpoint-dir", tmp_path / "c"]
    script = tmp_path / "horovod_distributed.py"
    script.write_text(
        "import runpy, torch\n"
        "torch.amp.GradScaler._maybe_opt_step = None  # it would look whether to take the step\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    output = run([*HOROVODRUN, script, *flags], work, env=TWO_THREADS | {"PYTHONPATH": str(ROOT)})
    assert "UserWarning" not in output
    assert load(tmp_path / "c")["scaler"]["scale"] > 0
    same_run(tmp_path / "c", ddp(work, "--precision", "fp16"))


@pytest.mark.full
@pytest.mark.parametrize("init", ["raise ImportError('No module named horovod')", "_ = 0"])
def test_says_what_to_do_without_horovod(work, tmp_path, init):
    """A double stands in for no Horovod, and for one that was built without torch."""
    (tmp_path / "horovod/torch").mkdir(parents=True)
    (tmp_path / "horovod/__init__.py").write_text(init)
    (tmp_path / "horovod/torch/__init__.py").write_text("raise ImportError('not been built')")
    output = run(python(SCRIPT), work, env={"PYTHONPATH": str(tmp_path)}, code=2)
    assert output.count("\n") == 1 and "tools/install_horovod.sh" in output


@pytest.mark.full
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
def test_install_proves_what_is_there_and_names_what_it_needs(work, tmp_path):
    here = {"PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"}
    output = run([INSTALL], work, env=here)
    assert "is installed" in output and output.count("the mean of 0 and 1 is 0.5") == 2
    (tmp_path / "horovod.py").write_text("raise ImportError")
    none = here | {"PYTHONPATH": str(tmp_path), "CXX": "/no/compiler"}
    output = run([INSTALL], work, env=none, code=2)
    assert "needs a compiler of C++20, which /no/compiler is not" in output
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    no_torch = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert "needs torch" in run([INSTALL], work, env=no_torch, code=2)
