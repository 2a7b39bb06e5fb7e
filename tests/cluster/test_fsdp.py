"""fsdp_distributed.py: the training of distributed.py, with weights and momentum in parts."""

import shutil

import pytest
from conftest import ROOT, assert_close, load, rows, same_state

from tests.docs.ranks import good, run_ranks
from tests.launched import FLAGS, SMOOTH, straight

SCRIPT = "fsdp_distributed.py"


def test_trains_as_ddp_does(work):
    ours, theirs = straight("fsdp", work), straight("distributed", work)
    assert_close(load(ours), load(theirs))
    ours, theirs = rows(ours, timings=False), rows(theirs, timings=False)
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    assert ours[-1]["acc1"] > 50  # of 100: it has learnt


@pytest.mark.full
def test_an_empty_parameter_is_one_line(work, tmp_path):
    """Before the processes meet; torch would fail in the first step, in _chunk_cat."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom tests import nets\n"
        "def net(num_classes):\n"
        "    net = nets.plain(num_classes)\n"
        "    net[0].register_parameter('more', torch.nn.Parameter(torch.zeros(0, 3)))\n"
        "    return net\n"
    )
    flags = [*FLAGS, "--arch", "mine:net", "--checkpoint-dir", tmp_path / "c"]
    here = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    codes, output = run_ranks(ROOT / SCRIPT, flags, 1, work, before=here)
    line = "error: fully_shard cannot divide 0.more, which is empty: remove it\n"
    assert codes == [2] and line in output and "_chunk_cat" not in output


@pytest.mark.full
def test_a_resnet_is_ddps_to_the_bit_where_both_run_the_same_kernels(work, tmp_path):
    """Without channels_last, which FSDP does not take."""
    for room in ("common", "longrun"):
        shutil.copytree(ROOT / room, tmp_path / room)
    path, faster = tmp_path / "longrun/model.py", "net = net.to(memory_format=torch.channels_last)"
    assert path.read_text().count(faster) == 1
    path.write_text(path.read_text().replace(faster, "pass"))
    flags = "--arch resnet18 --image-size 32 --batch-size 32 --max-steps 6 -j 0".split()
    for name, script in {"ddp": "distributed.py", "fsdp": SCRIPT}.items():
        script = shutil.copy(ROOT / script, tmp_path)
        good(script, *flags, "--checkpoint-dir", tmp_path / name, ranks=2, cwd=work)
    assert same_state(load(tmp_path / "ddp"), load(tmp_path / "fsdp"))


@pytest.mark.full
def test_nodes_keep_a_copy_each(work, tmp_path):
    """With a mesh of two dimensions, as of two nodes of two processes: parts of halves."""
    text = (ROOT / SCRIPT).read_text()
    mesh = "dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('node', 'process'))"
    one = "DeviceMesh.from_group(dist.group.WORLD, device.type)"
    assert text.count(one) == 1
    text = text.replace(one, mesh)
    script = tmp_path / SCRIPT
    script.write_text(text)
    flags = [*FLAGS, *SMOOTH, "--checkpoint-dir", tmp_path / "c"]
    output = good(script, *flags, ranks=4, cwd=work)
    assert "processes: 4, gloo, cpu" in output
    assert_close(load(tmp_path / "c"), load(straight("distributed", work, *SMOOTH)))
