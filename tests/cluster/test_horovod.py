"""horovod_distributed.py under the real horovodrun, against distributed.py.

How it is killed, stopped and evaluates: tests/run.
"""

import importlib.util
import os

import pytest
from conftest import (
    HOROVODRUN,
    ONE_THREAD,
    PYTHON,
    ROOT,
    load,
    python,
    rows,
    run,
    same_state,
)

from tests.docs.ranks import good
from tests.launched import FLAGS, IN_ROOT, straight

# In CI a missing Horovod fails the tests: they start a horovodrun that is not there.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None and not os.environ.get("CI"),
    reason="Horovod is not installed: tools/install_horovod.sh",
)
SCRIPT = ROOT / "horovod_distributed.py"
INSTALL = ROOT / "tools/install_horovod.sh"


@pytest.mark.full
def test_is_the_same_as_ddp_in_fp16_and_channels_last(work, tmp_path):
    """Its depthwise convolutions would differ, if the model were contiguous.

    In fp32: tests/run/test_resume.py.
    """
    flags = "--arch shufflenet_v2_x0_5 --image-size 32 --batch-size 32 --max-steps 12".split()
    flags += ["--precision", "fp16"]
    hvd = [*HOROVODRUN, SCRIPT, *flags, "--checkpoint-dir", tmp_path / "hvd"]
    assert "UserWarning" not in run(hvd, work, env=ONE_THREAD)
    ddp = [ROOT / "distributed.py", *flags, "--checkpoint-dir", tmp_path / "ddp"]
    good(*ddp, ranks=2, cwd=work)
    assert same_state(load(tmp_path / "hvd"), load(tmp_path / "ddp"))


@pytest.mark.full
def test_fp16_allreduce_trains(work, tmp_path):
    flags = [*FLAGS, "--fp16-allreduce", "--checkpoint-dir", tmp_path / "c"]
    run([*HOROVODRUN, SCRIPT, *flags], work, env=ONE_THREAD)
    folders = tmp_path / "c", straight("distributed", work)
    half, whole = (load(folder)["state_dict"]["0.weight"] for folder in folders)
    assert not half.equal(whole) and half.allclose(whole, atol=1e-2)  # it was rounded on its way
    assert rows(tmp_path / "c")[-1]["acc1"] > 60


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
    fake = "import torch; torch.cuda.device_count = lambda: 1; torch.cuda.set_device = print; "
    fake += "torch.cuda.get_device_capability = lambda: (8, 0); "
    fake += "import horovod_distributed; horovod_distributed.main()"
    output = run([PYTHON, "-c", fake], work, env=IN_ROOT, code=2)
    assert "\nerror: this Horovod knows no GPUs: install nvcc, then Horovod again\n" in output


@pytest.mark.full
def test_install_proves_what_is_there_and_names_what_it_needs(work, tmp_path):
    output = run([INSTALL], work)
    assert "is installed" in output and output.count("the mean of 0 and 1 is 0.5") == 2
    (tmp_path / "horovod.py").write_text("raise ImportError")
    none = {"PYTHONPATH": str(tmp_path), "CXX": "/no/compiler"}
    output = run([INSTALL], work, env=none, code=2)
    assert "needs a compiler of C++20, which /no/compiler is not" in output
