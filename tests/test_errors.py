"""What a user can get wrong is said in one line, once, with exit code 2, within seconds."""

import os
import re
import shutil
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, Job, forked, full, run, torchrun
from PIL import Image

from common.device import pick_device
from common.errors import user_errors

DISTRIBUTED = forked("distributed.py")
SPAWN = [*forked("multiprocessing_distributed.py"), "--nprocs=2"]


@pytest.fixture(scope="module")
def folders(work):
    """Data folders with one thing wrong in each."""

    def copy(name):
        shutil.copytree(work / "data/digits", work / name)
        return work / name

    shutil.rmtree(copy("no_val") / "val")
    flat = copy("flat_val") / "val"
    for path in list(flat.glob("*/*")):
        path.rename(flat / path.name)
    for digit in range(10):
        (flat / str(digit)).rmdir()
    shutil.rmtree(copy("other_classes") / "val/7")
    for path in (copy("empty_class") / "train/4").iterdir():
        path.unlink()
    for path in (copy("empty_val") / "val").glob("*/*"):
        path.unlink()
    (work / "garbage.pth").write_bytes(b"not a checkpoint")
    torch.save({"state_dict": {}}, work / "weights.pth")
    (work / "a_file").write_text("")
    return work


CASES = {
    "no folder": ("--data nowhere", "no folder nowhere/train: --data needs train/ and val/ in it"),
    "no val": ("--data no_val", "no folder no_val/val: --data needs train/ and val/ in it"),
    "flat val": (
        "--data flat_val",
        "no class folders in flat_val/val: put its images into flat_val/val/CLASS/",
    ),
    "classes": ("--data other_classes", "classes in only one of train/ and val/: 7"),
    "empty class": ("--data empty_class", "no images in empty_class/train/4"),
    "empty val": ("--data empty_val", "no images (.jpg"),
    "batch too large": ("-b 2000", "1437 images to train do not fill one --batch-size 2000"),
    "unknown arch": ("-a resnet19", "unknown --arch resnet19: give package.module:callable or one"),
    "unknown module": ("-a nowhere:net", "cannot import --arch nowhere:net: No module named"),
    "unknown callable": ("-a tests.nets:x", "cannot import --arch tests.nets:x: module"),
    "size": ("-a maxvit_t", "maxvit_t cannot take --image-size 24: "),
    "tuple": ("-a tests.nets:two_outputs", "tests.nets:two_outputs gives a tuple for one image"),
    "head": ("-a tests.nets:wrong_head", "gives (1, 11) for one image, not scores [1, 10]"),
    "weights of own": ("--pretrained", "--pretrained is for torchvision's models: let tests.nets"),
    "unknown flag": ("--epoch-count 3", "unrecognized arguments: --epoch-count 3 (see --help)"),
    "not a number": ("--epochs many", "argument --epochs: invalid int value: 'many'"),
    "zero": ("--print-freq 0", "argument -p/--print-freq: 0 is not a number from 1 ("),
    "nan": ("--lr nan", "argument --lr: nan is not a number from 0 ("),
    "infinite": ("--lr inf", "argument --lr: inf is not a number from 0 ("),
    "negative seed": ("--seed -1", "argument --seed: -1 is not a number from 0 to 9"),
    "smoothing": ("--label-smoothing 2", "--label-smoothing: 2 is not a number from 0 to 1 ("),
    "timeout": ("--dist-timeout 1e15", "argument --dist-timeout: invalid int value: '1e15'"),
    "long timeout": (f"--dist-timeout {10**15}", "000 is not a number from 1 to 1000000 ("),
    "huge images": ("--image-size 1000000", "1000000 is not a number from 1 to 4096 ("),
    "no package": ("-a .a:b", "cannot import --arch .a:b: "),
    "one image": (
        "-a resnet18 -b 1",
        "resnet18 cannot take --image-size 24 with one image per process: Expected more than 1 val",
    ),
    "empty resume": ("--resume=", "--resume is empty: is a variable not set? (see --help)"),
    "empty path to evaluate": ("-e --resume=", "--resume is empty: is a variable not set?"),
    "empty folder": ("--checkpoint-dir=", "--checkpoint-dir is empty: is a variable not set?"),
    "no checkpoint": ("--resume nothing.pth", "/nothing.pth"),
    "garbage": ("--resume garbage.pth", "garbage.pth is damaged (BadZipFile: File is not a zip"),
    "not ours": ("--resume weights.pth", "weights.pth is no checkpoint of these scripts"),
    "nothing to evaluate": ("-e --resume auto --checkpoint-dir none", "no checkpoint to evaluate"),
    "folder is a file": ("--checkpoint-dir a_file", "File exists: "),
    "folder below a file": ("--checkpoint-dir a_file/c", "Not a directory: "),
    "nccl": ("--backend nccl", "--backend nccl needs GPUs and this node has none: use gloo"),
    "sync-bn": ("--sync-bn", "--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line(case, folders):
    flags, message = CASES[case]
    command = [*DISTRIBUTED, *SMALL, "--checkpoint-dir", "none", *flags.split()]
    (line,) = run(command, folders, code=2).splitlines()
    assert line.startswith("error: ") and message in line
    assert not (folders / "none").exists()  # nor is anything written


@pytest.mark.parametrize("flags", ["--data flat_val", full("-b 63")])
def test_once_with_mp_spawn(flags, folders, tmp_path):
    command = [*SPAWN, *SMALL, "--checkpoint-dir", tmp_path / "c", *flags.split()]
    (line,) = run(command, folders, timeout=150, code=2).strip().splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("flags", ["--data flat_val", full("-a tests.nets:wrong_head")])
def test_once_under_torchrun_too(flags, folders, tmp_path):
    """torchrun adds its own report and returns 1; our line comes once, from local rank 0."""
    command = [*torchrun(4), *SMALL, "--checkpoint-dir", tmp_path / "c", *flags.split()]
    output = run(command, folders, timeout=150, code=1)
    assert output.count("error: ") == 1 and output.count("Traceback") <= 1  # torchrun's
    assert "exitcode  : 2" in output and "distributed.py FAILED" in output


def test_copies_cannot_be_compiled(work):
    """With several GPUs, which are made up: each copy would run as if there was no such flag."""
    code = "import torch, dataparallel; torch.cuda.device_count = lambda: 2; "
    code += "dataparallel.pick_device = lambda *_: torch.device('cpu'); dataparallel.main()"
    command = [*forked("-c"), code, *SMALL, "--compile"]
    output = run(command, work, env={"PYTHONPATH": str(ROOT)}, code=2, timeout=60)
    assert output == "error: --compile cannot compile copies: use one GPU, or distributed.py\n"


def test_no_network_for_pretrained_weights(work, tmp_path):
    """The proxy is a port that nobody listens at."""
    env = {"https_proxy": "http://127.0.0.1:9", "TORCH_HOME": str(tmp_path)}
    command = [*DISTRIBUTED, "-a", "resnet18", "--pretrained", "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env=env, code=2, timeout=60)
    *before, line = output.splitlines()
    assert all(line.startswith("Downloading: ") for line in before)
    assert line.startswith("error: cannot download the weights of resnet18: ")
    assert not (tmp_path / "c").exists()


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def wrong_variables(env, work, folder):
    """The only line that it prints."""
    command = [*DISTRIBUTED, *SMALL, "--dist-timeout", "3", "--checkpoint-dir", folder]
    (line,) = run(command, work, env=env, code=2, timeout=60).splitlines()
    assert not folder.exists()
    return line


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"),
    ],
)
def test_partly_set_variables(env, missing, work, tmp_path):
    line = wrong_variables(env, work, tmp_path / "c")
    assert line == f"error: {missing} not set though others are: start with torchrun"


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("RANK", "abc", 0), ("RANK", "-1", 0), ("WORLD_SIZE", "0", 1), ("MASTER_PORT", "x", 0)],
)
def test_variables_that_are_no_numbers(name, value, least, work, tmp_path):
    line = wrong_variables(ALONE | {name: value}, work, tmp_path / "c")
    assert line == f"error: {name}={value} is no number of at least {least}"


def test_a_port_that_there_cannot_be(work, tmp_path):
    line = wrong_variables(ALONE | {"MASTER_PORT": "70000"}, work, tmp_path / "c")
    assert line.startswith("error: rank 0 cannot use 127.0.0.1:70000 to meet the others: ")


def test_a_taken_port(work, tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = wrong_variables(ALONE | {"MASTER_PORT": port}, work, tmp_path / "c")
    assert line.startswith(f"error: rank 0 cannot use 127.0.0.1:{port} to meet the others: ")
    assert "EADDRINUSE" in line


def test_nobody_at_the_port(work, tmp_path):
    """The other of two processes never comes: its port is not open."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = ALONE | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}
    command = [*DISTRIBUTED, *SMALL, "--dist-timeout", "3", "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env=env, code=2, timeout=60)
    assert output.count("error: ") == 1 and not (tmp_path / "c").exists()
    line = output.splitlines()[-1]  # after what torch itself has to say
    assert line.startswith(f"error: rank 1 cannot use 127.0.0.1:{port} to meet the others: ")


def test_arguments_of_a_checkpoint(work, tmp_path):
    folder = ["--checkpoint-dir", tmp_path / "c"]
    run([*DISTRIBUTED, *SMALL, *folder, "--max-steps", "2"], work)
    path = tmp_path / "c/checkpoint.pth"
    for flags, message in {
        "-a tests.nets:normed": f"{path} holds a tests.nets:plain, not the --arch tests.nets:"
        "normed",
        "-b 24": f"{path} is in mid-epoch with --batch-size 48: it cannot become 24",
        "--seed 5": f"{path} is in mid-epoch with --seed 0: it cannot become 5",
    }.items():
        command = [*DISTRIBUTED, *SMALL, *folder, "--resume", "auto", *flags.split()]
        assert run(command, work, code=2, timeout=40).strip() == f"error: {message}"
    # What may change is printed: here the rate, which is the command line's from now on.
    command = [
        *DISTRIBUTED,
        *SMALL,
        *folder,
        "--resume",
        "auto",
        "--max-steps",
        "3",
        "--lr",
        "0.02",
    ]
    output = run(command, work)
    assert "  changed: lr 0.1 -> 0.02\n" in output and "changed: seed" not in output


def as_two_nodes(flags, work, tmp_path):
    """The line that says what is wrong. flags: a line of Python for what each process adds."""
    script = tmp_path / "node.py"
    script.write_text(
        "import os, sys, distributed\n"
        "rank = int(os.environ['RANK'])\n"
        f"sys.argv += {flags}\n"
        "distributed.main()\n"
    )
    command = [*forked(script, ranks=2), *SMALL]
    output = run(command, work, env={"PYTHONPATH": str(ROOT)}, code=2, timeout=90)
    (line,) = [line for line in output.splitlines() if "error: " in line]
    assert "Traceback (most recent call last)" not in output.split(line)[0]
    assert "global batch" not in output  # nothing was trained
    return line


def test_processes_that_would_resume_from_different_files(work, tmp_path):
    """Two nodes with disks of their own: one process finds a checkpoint and one does not."""
    run([*DISTRIBUTED, *SMALL, "--max-steps", "2", "--checkpoint-dir", tmp_path / "c"], work)
    flags = f"['--resume', 'auto', '--checkpoint-dir', '{tmp_path}/' + 'cd'[rank]]"
    line = as_two_nodes(flags, work, tmp_path)
    assert line.startswith("error: rank 1 has not the same checkpoint to resume from as rank 0")


def test_a_folder_in_use(work, tmp_path):
    command = [*DISTRIBUTED, *SMALL, "--epochs", "500", "--checkpoint-dir", tmp_path / "c"]
    command += ["--checkpoint-freq", "5"]
    command += ["--resume", "auto"]  # as after a requeue, while the run before has not ended
    job = Job(command, work)
    job.wait_for(r"epoch 0 \[10/")
    output = run(command, work, code=2, timeout=60)
    assert output.strip() == (
        f"error: another run is writing to {tmp_path}/c: choose another --checkpoint-dir"
    )
    assert job.process.poll() is None and list(tmp_path.iterdir()) == [tmp_path / "c"]
    job.kill()
    job.wait(20)
    assert "nothing left to train" in run([*command, "--max-steps", "1"], work)  # and free again


def test_what_only_looks_like_an_image(work, tmp_path):
    """A pipe, which nobody writes to, is no image; an animation is named."""
    data = tmp_path / "data"
    shutil.copytree(work / "data/digits", data)
    os.mkfifo(data / "train/3/pipe.jpg")
    os.mkfifo(data / "val/3/pipe.jpg")
    command = [*forked("dataparallel.py"), *SMALL, "--data", data, "--checkpoint-dir"]
    output = run([*command, tmp_path / "a", "--max-steps", "1", "-j", "1"], work)
    assert "1437 images to train, 360 to validate" in output
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "green", "blue")]
    path = data / "train/3/moving.jpg"
    frames[0].save(path, "GIF", save_all=True, append_images=frames[1:])
    for workers in ("0", "1"):
        output = run([*command, tmp_path / workers, "-b", "1438", "-j", workers], work, code=1)
        last = output.splitlines()[-1]
        assert re.fullmatch(
            rf"rank 0 failed at epoch 0 step 0: .*cannot read image {path}: .*", last
        )


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    nccl, gloo = SimpleNamespace(backend=None), SimpleNamespace(backend="gloo")
    assert pick_device(1, 2, nccl) == torch.device("cuda:1")
    assert pick_device(3, 4, gloo) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="4 processes on a node with 2 GPUs: start 2, or let them"):
        pick_device(0, 4, nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device(3, 4, SimpleNamespace()) == torch.device("cpu")


def test_gpus_that_torch_cannot_use(monkeypatch):
    def fail(device):
        raise RuntimeError("The NVIDIA driver on your system is too old\nfurther lines")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(ValueError, match=r"is too old \(CUDA_VISIBLE_DEVICES= in front trains"):
        pick_device(0, 1, SimpleNamespace())


def test_the_other_processes_wait_for_local_rank_0_to_speak(monkeypatch, capfd):
    ended, waited = [], []

    def leave(code):
        ended.append(code)
        raise SystemExit

    def fail(*who):
        waited.clear()
        with pytest.raises(SystemExit), user_errors(*who):
            raise ValueError("wrong")
        return capfd.readouterr().err, list(waited)

    def stop(asked):
        wait = lambda seconds: waited.append(seconds) or asked  # noqa: E731
        return SimpleNamespace(requested=SimpleNamespace(wait=wait))

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("time.sleep", waited.append)
    assert fail(0) == fail(0, stop(False)) == ("error: wrong\n", [])
    # An error of this process alone: nobody has stopped it.
    assert fail(1) == fail(1, stop(False)) == ("error: wrong\n", [30])
    # The launcher stops those that local rank 0 has left.
    assert fail(1, stop(True)) == ("", [30])
    assert ended == [2] * 5


def test_flags_do_not_collide_with_torchruns(monkeypatch):
    """torchrun refuses a script's flag that is an abbreviation of several of its own."""
    from torch.distributed.run import get_args_parser

    import distributed

    theirs = [o for a in get_args_parser()._actions for o in a.option_strings if o[:2] == "--"]
    parsers = []
    original = distributed.ArgumentParser.parse_args
    monkeypatch.setattr(sys, "argv", ["distributed.py"])
    monkeypatch.setattr(
        distributed.ArgumentParser,
        "parse_args",
        lambda self: parsers.append(self) or original(self),
    )
    distributed.parse_args()
    ours = [o for a in parsers[0]._actions for o in a.option_strings if o[:2] == "--"]
    assert len(ours) > 25
    for flag in ours:
        assert sum(option.startswith(flag) and option != flag for option in theirs) < 2, flag
