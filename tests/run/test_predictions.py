"""Every image is predicted once, in order, by any launcher; what is saved is finite."""

import csv
import re

import pytest
import torch
from conftest import HOROVODRUN, ROOT, SMALL, full, load, needs_horovod, python, run, torchrun
from torch.nn.functional import softmax

from common.images import image_folders
from common.prefetcher import Prefetcher
from tests import nets

FLAGS = [*SMALL, "-b", "42", "-j", "0"]
SPAWN = [*python("multiprocessing_distributed.py"), "--nprocs=2"]
DOUBLE = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}


@pytest.mark.parametrize(
    "command",
    [
        torchrun(3),
        full(python("dataparallel.py")),
        full(SPAWN),
        full([*torchrun(2, "apex_distributed.py"), "--precision", "fp32"]),
        full([*HOROVODRUN, ROOT / "horovod_distributed.py"]),
        full(torchrun(3, "fsdp_distributed.py")),
    ],
    ids=["distributed", "dataparallel", "spawn", "apex", "horovod", "fsdp"],
)
def test_every_image_is_predicted_once_in_order(command, work, tmp_path):
    if "horovodrun" in str(command[0]):
        needs_horovod()
    flags = [*FLAGS, "-e", "--predictions", tmp_path / "p.csv"]
    run([*command, *flags], work, env=DOUBLE)
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    with open(tmp_path / "p.csv", newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    assert head == ["path", "class", "predicted", "confidence"]

    _, val_set = image_folders(str(work / "data/digits"), 24)
    torch.manual_seed(0)
    net = nets.plain(10).eval()
    batch = torch.utils.data.default_collate([val_set[i] for i in range(len(val_set))])
    ((images, _),) = Prefetcher([batch], torch.device("cpu"))
    with torch.no_grad():
        scores = softmax(net(images), 1)
    assert len(lines) == len(val_set) == 360
    for i, (path, name, guess, confidence) in enumerate(lines):
        assert path == val_set.path(i).replace(f"{work}/", "")
        assert name == path.split("/")[-2] and guess == str(scores[i].argmax().item())
        assert float(confidence) == pytest.approx(scores[i].max().item(), abs=2e-6)
    assert len({guess for _, _, guess, _ in lines}) > 1


def finite(checkpoint):
    tensors = [*checkpoint["state_dict"].values()]
    tensors += [state["momentum_buffer"] for state in checkpoint["optimizer"]["state"].values()]
    return all(tensor.isfinite().all() for tensor in tensors)


def test_a_run_that_diverges_keeps_what_is_good(work, tmp_path):
    """Though each step is saved."""
    flags = [*FLAGS, "--lr", "1e30", "--checkpoint-freq", "1", "-p", "50"]
    output = run([*python(), *flags, "--checkpoint-dir", tmp_path / "c"], work, code=2)
    assert "Traceback" not in output and output.count("error: ") == 1, output
    last = output.splitlines()[-1]
    assert re.fullmatch(r"error: .*(nan|inf|NaN).*epoch 0 step \d.*--lr.*", last)
    assert not (tmp_path / "c/model_best.pth").exists()
    for path in (tmp_path / "c").glob("*.pth"):
        assert finite(load(tmp_path / "c", path.name))
