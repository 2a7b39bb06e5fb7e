"""The weights that --pretrained FILE takes, as other programs save them, and what is said of them.

With real scripts: tests/run/test_training.py.
"""

import argparse
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision import models

from longrun.weights import load_pretrained
from tests import nets
from tests.runs import write


def loaded(net, path, classes=10, arch="tests.nets:normed", evaluate=False, rank=0, resumed=None):
    names = [str(number) for number in range(classes)]
    known = {"arch": arch, "evaluate": evaluate, "image_size": 64}
    args = SimpleNamespace(**known, pretrained=path if path in (True, None) else str(path))
    load_pretrained(net, SimpleNamespace(args=args, classes=names, rank=rank, path=resumed))
    return net.state_dict()


def normed(classes=10, seed=1):
    torch.manual_seed(seed)
    net = nets.normed(classes)
    net[1].running_mean.fill_(3)
    return net


def prefixed(prefix):
    return {prefix + name: x for name, x in normed().state_dict().items()}


class Averaged(nn.Module):
    """As torchvision's references save it: torch.optim.swa_utils.AveragedModel."""

    def __new__(cls):
        return torch.optim.swa_utils.AveragedModel(normed())


FLAGS = argparse.Namespace(lr=0.1)
LIGHTNING = {"epoch": 3, "global_step": 9, "pytorch-lightning_version": "2", "hyper_parameters": {}}
EXAMPLES = {"epoch": 3, "arch": "a", "best_acc1": torch.tensor(1.0), "optimizer": {"state": {}}}
FORMATS = {  # what is saved, and what of it is said
    "a state_dict": (lambda: prefixed(""), ""),
    "DDP": (lambda: prefixed("module."), " below module."),
    "torch.compile": (lambda: prefixed("_orig_mod."), ""),
    "both": (lambda: prefixed("module._orig_mod."), " below module."),
    "a compiled part": (
        lambda: {k.replace("0.", "0._orig_mod."): x for k, x in prefixed("").items()},
        "",
    ),
    "Lightning": (
        lambda: LIGHTNING | {"state_dict": prefixed("model.") | {"loss.weight": torch.ones(3)}},
        " below model.",
    ),
    "examples": (lambda: EXAMPLES | {"state_dict": prefixed("module.")}, " below module."),
    "timm": (
        lambda: {
            **{"epoch": 3, "args": FLAGS, "state_dict": normed(seed=2).state_dict()},
            "state_dict_ema": prefixed(""),
        },
        "",
    ),
    "references": (
        lambda: {
            **{"model": normed(seed=2).state_dict(), "args": FLAGS, "epoch": 3},
            "model_ema": Averaged().state_dict(),
        },
        " below module.",
    ),
    "nested": (lambda: {"model": {"state_dict": prefixed("")}}, ""),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, old, tmp_path, capsys):
    """All tensors are taken, also from a file in torch's format before 2020; rank 0 says it."""
    make, told = FORMATS[name]
    torch.save(make(), tmp_path / "w.pth", _use_new_zipfile_serialization=not old)
    right = normed().state_dict()
    net = nets.normed(10).to(memory_format=torch.channels_last)
    state = loaded(net, tmp_path / "w.pth")
    assert state.keys() == right.keys() and all(state[key].equal(right[key]) for key in right)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    line = capsys.readouterr().out
    assert re.match(rf"weights of {tmp_path}/w.pth( \(\w+\))?: 9 tensors{told}\n$", line), line
    assert ("(state_dict_ema)" in line) == (name == "timm")
    loaded(net, tmp_path / "w.pth", rank=1)
    assert capsys.readouterr().out == ""


def test_safetensors(tmp_path, monkeypatch):
    safetensors.torch.save_file(prefixed("module."), tmp_path / "w.safetensors")
    state = loaded(nets.normed(10), tmp_path / "w.safetensors")
    assert all(state[key].equal(x) for key, x in normed().state_dict().items())
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    message = r"^cannot read .*/w.safetensors: python -m pip install safetensors$"
    with pytest.raises(ValueError, match=message):
        loaded(nets.normed(10), tmp_path / "w.safetensors")


def test_a_checkpoint_of_these_scripts(tmp_path, capsys):
    """Its average, with the recipe ema, is its state_dict. Of other classes the head stays."""
    saved = write(tmp_path, 1).net.state_dict()
    state = loaded(nets.plain(10), tmp_path / "checkpoint.pth")
    assert all(state[key].equal(saved[key]) for key in saved)
    assert capsys.readouterr().out.endswith("checkpoint.pth (state_dict): 4 tensors\n")
    fresh = nets.plain(7)
    head = fresh[4].weight.clone()
    state = loaded(fresh, tmp_path / "checkpoint.pth", classes=7)
    assert state["0.weight"].equal(saved["0.weight"]) and state["4.weight"].equal(head)
    line = "2 tensors; new, for 7 classes: 4.bias, 4.weight; it was trained on other classes\n"
    assert capsys.readouterr().out.endswith(line)
    with pytest.raises(ValueError, match=r"no weights for these 7 classes: train it first$"):
        loaded(nets.plain(7), tmp_path / "checkpoint.pth", classes=7, evaluate=True)


def test_classes_of_the_same_number_and_other_names_are_not_evaluated(tmp_path, capsys):
    write(tmp_path, 1, images=None)
    held = torch.load(tmp_path / "checkpoint.pth", weights_only=True)
    torch.save(held | {"classes": [*"abcdefghij"]}, tmp_path / "other.pth")
    loaded(nets.plain(10), tmp_path / "other.pth")
    assert capsys.readouterr().out.endswith("; it was trained on other classes\n")
    with pytest.raises(ValueError, match="has no weights for these 10 classes"):
        loaded(nets.plain(10), tmp_path / "other.pth", evaluate=True)
    loaded(nets.plain(10), tmp_path / "checkpoint.pth", evaluate=True)


def test_what_lacks_and_what_is_left_over_is_said(tmp_path, capsys):
    """Up to a tenth of the tensors. Other parts of a checkpoint, such as a loss, do not count."""
    torch.manual_seed(1)
    source = models.resnet18().state_dict()
    backbone = {key: x for key, x in source.items() if not key.startswith("fc.")}
    more = {f"layer5.{i}": torch.ones(1) for i in range(5)}
    torch.save({"net": backbone | more}, tmp_path / "w.pth")
    net = models.resnet18(num_classes=7)
    fc = net.fc.weight.clone()
    state = loaded(net, tmp_path / "w.pth", classes=7, arch="resnet18")
    assert all(state[key].equal(x) for key, x in backbone.items()) and state["fc.weight"].equal(fc)
    told = "120 tensors; it lacks: fc.weight, fc.bias; it has also: layer5.0, layer5.1, layer5.2"
    assert capsys.readouterr().out.endswith(f"(net): {told} and 2 more\n")
    with pytest.raises(ValueError, match="train it first"):
        loaded(net, tmp_path / "w.pth", classes=7, arch="resnet18", evaluate=True)
    without_counts = {k: x for k, x in source.items() if "num_batches" not in k}
    torch.save(without_counts, tmp_path / "w.pth")  # from before torch 0.4.1
    state = loaded(models.resnet18(), tmp_path / "w.pth", 1000, "resnet18", evaluate=True)
    assert all(state[key].equal(x) for key, x in without_counts.items())


def own_code():
    return {"state_dict": prefixed(""), "hyper_parameters": SimpleNamespace()}


WRONG = {  # what is saved, or bytes, and what is said
    "another model": (
        lambda: {f"a.{i}": torch.ones(1) for i in range(9)},
        r"w.pth is of another model than this of 8 tensors; it lacks: 0.weight, 0.bias, 1.weight "
        r"and 5 more; it has also: a.0, a.1, a.2 and 6 more$",
    ),
    "a wider one": (
        lambda: prefixed("") | {"0.weight": torch.ones(16, 3, 5, 5)},
        r"w.pth: 0.weight is \[16, 3, 5, 5\] there and \[8, 3, 5, 5\] here: another --arch, or ano",
    ),
    "two models": (
        lambda: prefixed("teacher.") | prefixed("student."),
        r"has two such models, teacher. and student.: save the state_dict of one$",
    ),
    "a list": (lambda: [1], "w.pth holds a list, no weights$"),
    "a module": (
        normed,
        r"cannot read .*/w.pth: it holds a torch.nn.modules.container.Sequential: where it was "
        r"made, save net.state_dict\(\) alone$",
    ),
    "code": (own_code, "cannot read .*: it holds a types.SimpleNamespace: where it was made, save"),
    "a picture": (b"\x89PNG\r\n", "cannot read .*w.pth: no file of torch.save"),
    "nothing": (b"", "cannot read .*w.pth: "),
    "half a file": (
        b"PK\x03\x04" + bytes(99),
        "cannot read .*w.pth: .*failed finding central directory$",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_line(name, tmp_path):
    made, message = WRONG[name]
    if isinstance(made, bytes):
        (tmp_path / "w.pth").write_bytes(made)
    else:
        torch.save(made(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=message) as error:
        loaded(nets.normed(10), tmp_path / "w.pth")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_flipped_bit_is_seen(tmp_path):
    """torch.load itself does not look."""
    torch.save(prefixed(""), tmp_path / "w.pth")
    content = bytearray((tmp_path / "w.pth").read_bytes())
    content[content.index(normed()[0].weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "w.pth").write_bytes(content)
    torch.load(tmp_path / "w.pth", weights_only=True)
    with pytest.raises(ValueError, match=r"cannot read .*w.pth: .*w.pth is damaged"):
        loaded(nets.normed(10), tmp_path / "w.pth")


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"^--pretrained: no file nowhere.pth$"):
        loaded(nets.normed(10), "nowhere.pth")
    loaded(nets.normed(10), "nowhere.pth", resumed="checkpoint.pth")  # that has all


def test_nothing_to_evaluate():
    """A model of one's own may load its weights itself."""
    with pytest.raises(ValueError, match=r"^nothing to evaluate: give --resume PATH or --pretr"):
        loaded(models.resnet18(), None, 1000, "resnet18", evaluate=True)
    loaded(nets.normed(10), None, evaluate=True)


# torchvision's weights.


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder where torchvision looks for weights before it downloads any."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


def file_of(arch):
    return Path(models.get_model_weights(arch).DEFAULT.url).name


@pytest.mark.parametrize("num_classes", [1000, 7])
@pytest.mark.parametrize("where", ["hub", "file"])
def test_all_weights_but_a_head_of_other_classes_are_those_of_the_file(hub, num_classes, where):
    """Under the names that torchvision's own files have, some of which are old."""
    source = models.densenet121().state_dict()
    numbered = re.compile(r"(denselayer\d+\.(?:norm|conv))(\d)")
    old = {numbered.sub(r"\1.\2", key): value for key, value in source.items()}
    old = {key: value for key, value in old.items() if "num_batches_tracked" not in key}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    path = hub / file_of("densenet121") if where == "hub" else hub / "mine.pth"
    torch.save(old, path)
    fresh = models.densenet121(num_classes=num_classes)
    path = True if where == "hub" else path
    net = loaded(fresh, path, num_classes, "densenet121")
    head = [] if num_classes == 1000 else ["classifier.weight", "classifier.bias"]
    assert [key for key in source if not source[key].equal(net[key])] == head


def test_old_names_of_a_transformer(hub, monkeypatch):
    torch.manual_seed(0)
    source = nets.transformer(1000).state_dict()
    layers = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    old = {re.sub(r"\.mlp\.[03]\.", lambda m: layers[m[0]], key): x for key, x in source.items()}
    assert "encoder.layers.encoder_layer_0.mlp.linear_2.bias" in old
    torch.save(old, hub / file_of("vit_b_16"))
    net = loaded(nets.transformer(1000), True, 1000, "vit_b_16")
    assert all(net[key].equal(x) for key, x in source.items())


def test_weights_of_other_classes_are_not_evaluated():
    """Their head would be one that nobody has trained. Known before anything is downloaded."""
    with pytest.raises(ValueError, match=r"is of 1000 classes, not 7: train it first$"):
        loaded(models.resnet18(num_classes=7), True, 7, "resnet18", evaluate=True)


def test_weights_for_another_image_size(hub):
    torch.save(nets.transformer(7).state_dict(), hub / file_of("vit_b_32"))
    other = models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=7)
    message = r"pos_embedding is \[1, 10, 32\] there and \[1, 17, 32\] here: they are for --ima"
    with pytest.raises(ValueError, match=f"{message}ge-size 224$"):
        loaded(other, True, 7, "vit_b_32")


def test_weights_are_downloaded_once_a_node(hub, monkeypatch):
    """Three threads instead of processes: the lock is one between open files."""
    downloads = []

    def download(url, path, *_, **__):
        downloads.append(url)
        time.sleep(0.3)  # else the others would find it
        torch.save(models.squeezenet1_1().state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    fresh = [models.squeezenet1_1(num_classes=7) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda net: loaded(net, True, 7, "squeezenet1_1"), fresh))
    assert len(downloads) == 1
    assert all(x["features.0.weight"].equal(found[0]["features.0.weight"]) for x in found)
