"""What the minimal and composed scripts refuse, and how they end: signals, Slurm, other tasks."""

import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, Job, soak

from tests.docs.composed import SLURM, write
from tests.docs.copies import edited
from tests.docs.ranks import good, run_ranks
from tests.docs.test_mean_data import NODES
from tests.launched import cmdline


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.full
@pytest.mark.parametrize(
    "number, ignored",
    # Neither is handled: the parent ends at once, and its children learn it in the same way.
    [soak(signal.SIGTERM, []), (signal.SIGKILL, ["--ignore-signal=INT"])],
    ids=["SIGTERM", "SIGKILL to a background job"],
)
def test_what_mp_spawn_started_ends_with_it(number, ignored, tmp_path):
    """Its loaders' workers too, and where SIGINT is ignored, as in a shell's background job."""
    path = write(tmp_path, "spawn", features=["workers"], epochs=500)
    job = Job(["env", *ignored, PYTHON, path], tmp_path)
    job.wait_for("epoch 0:", timeout=600)  # both loaders have their workers
    ranks = [pid for pid in job.pids() if parent_of(pid) == job.process.pid]
    ranks = {pid for pid in ranks if "resource_tracker" not in cmdline(pid)}
    os.kill(job.process.pid, number)
    deadline = time.monotonic() + 40
    while (left := ranks & {*job.pids()}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ranks) == 2 and not left
    code, _ = job.wait(150)  # fails if a process is left; a worker looks every 5 seconds
    assert code == -number


def slurm_lines():
    """Those of the script that find where the tasks meet."""
    text = (ROOT / "minimal/distributed_slurm_main.py").read_text()
    return "import os, re\n" + re.sub(
        r"(?m)^ +", "", re.search(r" +nodes = .*\n.*\n.*\n.*\n", text)[0]
    )


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[01-03,07]-ib,login1", "gpu01-ib"),
        ("a,b[1-3]", "a"),
        ("rack[2,4]", "rack2"),
    ],
)
def test_slurm_tasks_meet_at_the_first_node(nodes, first, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    monkeypatch.setenv("SLURM_JOB_ID", "1234567")
    ports = set()
    for step in range(31):
        monkeypatch.setenv("SLURM_STEP_ID", str(step))
        names = {}
        exec(slurm_lines(), names)
        assert names["host"] == first
        ports.add(names["port"])
    assert len(ports) == 31 and all(10000 <= port < 30000 for port in ports)


@pytest.mark.full
def test_two_steps_of_one_slurm_job_do_not_meet(tmp_path):
    """At the same time on one node, and without scontrol; each is as one of its own."""
    outputs = {}

    def run(step):
        path = write(tmp_path / str(step), "slurm")
        before = SLURM.replace('"SLURM_STEP_ID": "0"', f'"SLURM_STEP_ID": "{step}"')
        outputs[step] = run_ranks(path, ranks=2, env={"SLURM_JOB_ID": os.getpid()}, before=before)

    threads = [threading.Thread(target=run, args=[step]) for step in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert outputs[0] == outputs[1] and outputs[0][0] == [0, 0], outputs


def task(folder, name, *edits, epochs=1):
    text = (ROOT / f"minimal/{name}.py").read_text()
    text = re.sub(r"^EPOCHS = \d+$", f"EPOCHS = {epochs}", text, flags=re.M)
    if name == "transformer":
        text = re.sub(
            "^FILES = .*", f"FILES = [Path({str(ROOT / 'docs/minimal.md')!r})]", text, flags=re.M
        )
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(edited(text, edits))
    return folder / "script.py"


SIZES = {
    "segmentation": "BATCH_SIZE = 48",
    "gan": "BATCH_SIZE = 48",
    "transformer": "BATCH_SIZE = 24",
}
SIZES |= dict.fromkeys(["distributed", "fsdp_distributed", "by_hand"], "BATCH_SIZE = 64")


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "size, says",
    [(25, r"BATCH_SIZE 25 must be a multiple of 2 \(processes\)"), (10**6, "no step in an epoch")],
)
def test_a_batch_that_cannot_be(name, size, says, tmp_path):
    """Each process ends by itself, with this line alone."""
    script = task(tmp_path, name, (SIZES[name] + " ", f"BATCH_SIZE = {size} "))
    codes, output = run_ranks(script, ranks=2)
    lines = output.splitlines()
    assert codes == [1, 1] and len(lines) == 2 and all(re.search(says, line) for line in lines), (
        output
    )


@pytest.mark.full
def test_a_warm_up_longer_than_the_training(tmp_path):
    """Its learning rate would never be reached."""
    script = write(
        tmp_path, "one_gpu", features=["schedule"], edits=[("WARMUP = 20", "WARMUP = 44")]
    )
    assert run_ranks(script) == ([1], "44 steps in all: too few for WARMUP 44\n")


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline", "pretrained"])
def test_no_text(name, tmp_path):
    """As where the script was copied out of this project."""
    script = task(tmp_path, name, ("docs/*[a-z].md", "nowhere/*"), epochs=2)
    ranks = {"tensor_parallel": 2}.get(name, 1)
    codes, output = run_ranks(script, ranks=ranks)
    assert codes == [1] * ranks and output == "0 bytes in FILES: no step in an epoch\n" * ranks


@pytest.mark.full
@pytest.mark.parametrize("name", ["gan", "transformer"])
def test_a_checkpoint_that_one_node_lacks(name, tmp_path):
    script = task(tmp_path, name, *([("range(300)", "range(5)")] if name == "transformer" else []))
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
    # The first run makes the file; dcp has a part of each process in the folder.
    before = NODES if name == "gan" else ""
    good(script, ranks=2, before=before)
    if name == "transformer":
        (tmp_path / "transformer").rename(tmp_path / "node0/transformer")
    codes, output = run_ranks(script, ranks=2, before=NODES)
    said = {"gan": r"the epochs in gan\.pth", "transformer": r"epochs in FOLDER"}[name]
    assert 0 not in codes and re.search(f"the processes differ in .*{said}", output), output


@pytest.mark.full
def test_class_folders_one_level_too_deep(tmp_path):
    """All images would have one class, and each answer would be right."""
    script = write(tmp_path, "torchrun", "images")
    for part in ("train", "val"):
        (tmp_path / "data" / part).rename(tmp_path / part)
        (tmp_path / "data" / part).mkdir()
        (tmp_path / part).rename(tmp_path / "data" / part / "images")
    codes, output = run_ranks(script, ranks=2)
    line = "1 class in data/train: is it one folder level too many?\n"
    assert codes == [1, 1] and output == line * 2


@pytest.mark.full
@pytest.mark.parametrize("start", ["one_gpu", "fsdp"])
def test_a_checkpoint_of_other_classes(start, tmp_path):
    """As many, with another name: the outputs of the last layer belong to others."""
    script = write(tmp_path, start, "images", ["resume"], epochs=1)
    ranks = 1 if start == "one_gpu" else 2
    assert "goes on after 1 of 1" in good(script, ranks=ranks) + good(script, ranks=ranks)
    for part in ("train", "val"):
        (tmp_path / "data" / part / "c").rename(tmp_path / "data" / part / "B")
    codes, output = run_ranks(script, ranks=ranks)
    assert codes == [1] * ranks and output == "checkpoint.pth is of other classes\n" * ranks


@pytest.mark.full
def test_a_checkpoint_from_before_a_feature_was_chosen(tmp_path):
    """And of one that is chosen no longer: its part would be lost without a word."""
    of = {more: write(tmp_path / more, "one_gpu", features=["resume", more]) for more in FEATURES}
    good(of["ema"])
    shutil.copy(tmp_path / "ema/checkpoint.pth", tmp_path / "schedule")
    codes, output = run_ranks(of["schedule"])
    assert codes == [1] and re.fullmatch(OTHER, output), output


FEATURES = ["ema", "schedule"]
OTHER = (
    r"checkpoint\.pth is another script's: one of them lacks "
    r"\{('average', 'scheduler'|'scheduler', 'average')\}\n"
)


@pytest.mark.full
def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """One pixel of one image is enough."""
    edits = [("    dataset = ", "    images[40, 0, 0, 0] = torch.nan\n    dataset = ")]
    script = write(tmp_path, "torchrun", features=["resume", "best"], edits=edits)
    codes, output = run_ranks(script, ranks=2)
    line = "the weights are not finite: is the learning rate too large?\n"
    assert codes == [1, 1] and output == line * 2
    assert not [*tmp_path.glob("*.pth*")]


HALF = """
import os, torch
real = torch.save
def save(obj, file):
    if os.path.exists("digits.pth") and "digits" in file:
        open(file, "wb").write(b"half")
        os._exit(9)
    real(obj, file)
torch.save = save
"""


@pytest.mark.full
def test_killed_while_it_saves_better_weights_the_best_so_far_is_whole(tmp_path):
    script = write(tmp_path, "one_gpu", features=["best"], epochs=5)
    codes, _ = run_ranks(script, before=HALF)
    assert codes == [9] and torch.load(tmp_path / "digits.pth")


@pytest.mark.full
def test_names_of_any_bytes_are_predictions_too(tmp_path):
    """As an old zip has them."""
    script = write(tmp_path, "one_gpu", "images", ["predictions"], epochs=1)
    first = tmp_path / "data/val/a/0.png"
    first.rename(first.with_name("caf\udce9.png"))
    good(script)
    assert b"data/val/a/caf\xe9.png," in (tmp_path / "predictions.csv").read_bytes()


@pytest.mark.full
def test_fsdp_goes_on_with_a_layer_that_is_not_used(tmp_path):
    """It has no momentum: nothing is to be restored."""
    edits = [
        ("    net = build_net()", "    net = build_net()\n    net[2].unused = nn.Linear(5, 5)")
    ]
    script = write(tmp_path, "fsdp", features=["resume"], epochs=1, edits=edits)
    good(script, ranks=2)
    script.write_text(script.read_text().replace("EPOCHS = 1", "EPOCHS = 2"))
    assert "goes on after 1 of 2 epochs" in good(script, ranks=2)


@pytest.mark.full
def test_labels_of_one_byte(tmp_path):
    """As many files have them: 47 classes times 40 is more than 255."""
    edits = [
        ("CLASSES = 10", "CLASSES = 47"),
        ("image, label\n", "image, torch.tensor(label).byte()\n"),
    ]
    script = write(tmp_path, "one_gpu", "own", ["f1"], epochs=1, edits=edits)
    text = script.read_text()
    begin = text.index("        $validated" if "$validated" in text else "        net.eval()")
    perfect = "                output = nn.functional.one_hot(target.long(), CLASSES).float()\n"
    rest = re.sub(r" +output = net\(.*\n", perfect, text[begin:])
    script.write_text(text[:begin] + rest)
    # Of 99 items: two or three of each class.
    assert "F1 1.0000  epoch 0: 100.0 % correct" in good(script)
