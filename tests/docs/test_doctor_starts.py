"""Whatever starts a script, the doctor looks at its processes; a GPU that is missing is played."""

import json
import re
import shutil
import subprocess

import pytest
from conftest import PYTHON, ROOT, run

from tests import ports
from tests.docs.copies import USER
from tests.docs.doctors import looked_at
from tests.docs.mutant_runs import diagnosed

# Two epochs in the same order: a mistake that is certain, at the line of the loop.
TRAIN = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(device="cpu"):
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
"""
START = 'dist.init_process_group("gloo")\n'
END = "dist.destroy_process_group()\n"
PLAIN = f"{TRAIN}\n\n{START}train()\n{END}"
DOCTOR = [PYTHON, ROOT / "doctor", "--quick"]
ORDER = "the order is that of the epoch before: call set_epoch(epoch) of its sampler"


def line_of(text, what):
    return 1 + next(i for i, line in enumerate(text.splitlines()) if what in line)


def told(line, text=ORDER):
    return f" {line}  {text}  → docs/bugs.md#set_epoch-is-forgotten\n"


LOOP = line_of(TRAIN, "for x, y in loader")


def examined(folder, *words, code=1, env=None):
    output = run([*DOCTOR, *words], folder, env=USER | (env or {}), code=code, timeout=400)
    assert "the doctor failed" not in output, output
    return output


# ---- Commands


# Two processes, as a launcher starts them; the second by another name of Python. A file is written
# by the shell, and one is removed by it.
SCRIPT = """#!/usr/bin/env bash
set -e
LOG=old.txt
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$1
rm -f gone.txt
RANK=0 LOCAL_RANK=0 python -u train.py --name first > $LOG &
RANK=1 LOCAL_RANK=1 python3 -m train
wait
"""


@pytest.mark.full
def test_a_shell_script_that_starts_python(tmp_path, free_port):
    """Each process below is looked at, also -m; what the script itself writes is put back."""
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "train.sh").write_text(SCRIPT)
    for name in ("old.txt", "gone.txt"):
        (tmp_path / name).write_text("mine")
    output = examined(tmp_path, "--by", f"bash train.sh {free_port}")
    assert told(f"train.py:{LOOP}") in output, output
    assert "looked at 2 processes, each: 8 steps, 2 passes" in output, output
    assert "\n put back as before this run: gone.txt, old.txt\n" in output, output
    assert {(tmp_path / name).read_text() for name in ("old.txt", "gone.txt")} == {"mine"}


UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.mark.full
@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode,
    reason="needs namespaces of processes",
)
def test_processes_whose_numbers_are_known_elsewhere_alone(tmp_path, free_port):
    """As in a container: by these numbers there are others here, or none."""
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"]).returncode:
        pytest.skip("needs namespaces of processes")
    (tmp_path / "train.py").write_text(PLAIN)
    # Numbers that are nobody's here, where there are some from 1 on.
    (tmp_path / "train.sh").write_text(f"echo 32000 > /proc/sys/kernel/ns_last_pid\n{SCRIPT}")
    output = examined(tmp_path, "--by", f"{' '.join(UNSHARE)} bash train.sh {free_port}")
    assert told(f"train.py:{LOOP}") in output and "without an exception" not in output, output
    assert "looked at 2 processes, each: 8 steps, 2 passes" in output, output


@pytest.fixture
def free_port():
    return ports.free_port()


@pytest.mark.full
def test_torchrun_in_a_command(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    output = examined(tmp_path, "--by", "torchrun --standalone --nproc-per-node=2 train.py")
    assert told(f"train.py:{LOOP}") in output and "looked at 2 processes, each: 8" in output


ACCELERATED = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="fp16")
torch.manual_seed(accelerator.process_index)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8))
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
torch.save({}, "last.pth")
"""


@pytest.mark.full
def test_accelerate_launch(tmp_path):
    """It asks for fp16, which a CPU has not."""
    (tmp_path / "train.py").write_text(ACCELERATED)
    launch = "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --dynamo_backend no"
    output = examined(tmp_path, "--by", f"{launch} --mixed_precision fp16 train.py")
    line = line_of(ACCELERATED, "torch.save")
    assert f" train.py:{line}  2 processes write last.pth  → docs/bugs.md#every-pro" in output
    assert "looked at 2 processes, each: 4 steps" in output, output


FABRIC = """import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="gpu", devices=[0, 1], strategy="ddp")
fabric.launch()
fabric.seed_everything(fabric.global_rank)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in fabric.setup_dataloaders(DataLoader(data, 8, shuffle=True)):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
torch.save({}, "last.pth")
"""


@pytest.mark.full
def test_lightning_starts_the_script_again_itself(tmp_path):
    """Its launcher starts `python train.py` with another LOCAL_RANK. It asks for two GPUs."""
    (tmp_path / "train.py").write_text(FABRIC)
    output = examined(tmp_path, "--by", "python train.py")
    line = line_of(FABRIC, "torch.save")
    assert f" train.py:{line}  2 processes write last.pth  → docs/bugs.md#every-pro" in output
    assert "looked at 2 processes, each: 4 steps" in output, output


TRAINER = """import torch
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
args = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=8, report_to=[])
trainer = Trainer(Net(), args, train_dataset=data, eval_dataset=data)
trainer.train()
torch.save(trainer.model.state_dict(), "last.pth")
"""


@pytest.mark.full
def test_the_trainer_of_transformers(tmp_path):
    """It shares the batches itself, without set_epoch to call; the last line is the mistake."""
    (tmp_path / "train.py").write_text(TRAINER)
    output = examined(tmp_path, "train.py")
    line = line_of(TRAINER, "torch.save")
    assert f" train.py:{line}  2 processes write last.pth  → docs/bugs.md#every-pro" in output
    assert "mistakes: 1," in output and "looked at 2 processes, each: 8 steps" in output, output


HYDRA = f"""import hydra
{TRAIN}

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    dist.init_process_group("gloo")
    train()
    if dist.get_rank() == 0:
        torch.save({{"epochs": config.epochs}}, config.folder + "/last.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@pytest.mark.full
def test_hydra(tmp_path):
    """What it writes is new: it is removed. Its words stand behind the script."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text("epochs: 2\nfolder: ${hydra:runtime.output_dir}\n")
    (tmp_path / "train.py").write_text(HYDRA)
    output = examined(tmp_path, "train.py", "epochs=3")
    line = line_of(HYDRA, "for x, y in loader")
    assert told(f"train.py:{line}") in output and "mistakes: 1, hints: 0" in output, output
    assert "\n removed, for it was new (--keep leaves it): outputs\n" in output, output
    assert {path.name for path in tmp_path.iterdir()} == {"conf", "train.py"}


PROCESSES = f"""import multiprocessing, sys
{TRAIN}

def work(rank, port):
    address = f"tcp://127.0.0.1:{{port}}"
    dist.init_process_group("gloo", address, rank=rank, world_size=2)
    train()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
"""


@pytest.mark.full
def test_a_script_that_starts_processes_without_mp_spawn(tmp_path, free_port):
    """Below torchrun each would start two, and all would meet on one port: it is started anew."""
    (tmp_path / "train.py").write_text(PROCESSES)
    output = examined(tmp_path, "train.py", free_port)
    line = line_of(PROCESSES, "for x, y in loader")
    assert told(f"train.py:{line}") in output and "looked at 2 processes, each: 8" in output, output


SAVES_ASIDE = """import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save(model.state_dict(), checkpoint_id="a", async_checkpointer_type=kind).result()
    print("saved\\n", end="")  # in one piece: the other rank prints too
    dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_helper_of_a_rank_is_no_rank(tmp_path):
    """It joins a group with the helpers of the others: it is not ended, and not compared."""
    (tmp_path / "train.py").write_text(SAVES_ASIDE)
    output = examined(tmp_path, "train.py", code=0)
    assert output.count("saved\n") == 2 and "looked at 2 processes, each: 1 steps" in output, output


ENDS_AT_ONCE = f"""import multiprocessing, os, time
{TRAIN}

{START}helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
helper.start()
time.sleep(1)
helper.terminate()
helper.join()
dist.barrier()
"""


@pytest.mark.full
@pytest.mark.parametrize("status, code", [(0, 2), (3, 3)])
def test_a_process_that_ends_at_once(status, code, tmp_path):
    """Well, by os._exit(0), which no exit of Python tells; or not, and by no signal of its own."""
    (tmp_path / "run").mkdir()
    text = f"{ENDS_AT_ONCE}os._exit({status})\n"
    report = diagnosed(tmp_path / "run", ["--quick"], text)
    assert report["code"] == code, report["said"]
    died = "ended without an exception, after this line" in report["said"]
    assert died == bool(status) and "SIGTERM" not in report["said"], report["said"]


def test_words_that_cannot_be_started(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "train.ipynb").write_text("no notebook")
    for words, said in [
        ([], "name your script"),
        (["--by", "no-such-launcher x"], "--by: there is no command no-such-launcher"),
        (["train.ipynb"], "train.ipynb is no notebook: JSONDecodeError"),
        (["--format=xml", "train.py"], "--format xml: it is one of github, sarif, json"),
        (["--format=sarif=no/x", "train.py"], "--format no/x: there is no such folder"),
    ]:
        output = run([*DOCTOR, *words], tmp_path, env=USER, code=2)
        assert f"error: {said}" in output, output


# ---- A notebook


def cell(source, kind="code"):
    return {"cell_type": kind, "source": source.splitlines(keepends=True), "metadata": {}}


LOOP_CELL = """for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
display(epoch)"""
CELLS = [
    cell("# Training", "markdown"),
    cell(
        "%matplotlib inline\n!pip install \\\n  torch\n"
        "import torch\nimport torch.distributed as dist"
    ),
    cell("%%bash\nrm -rf x"),
    cell("from torch.nn.parallel import DistributedDataParallel as DDP\nlines = !ls\n%time 1 + 1"),
    cell("from torch.utils.data import DataLoader, DistributedSampler, TensorDataset"),
    cell(
        "%%time\n"
        'dist.init_process_group("gloo")\n'
        "data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))\n"
        "loader = DataLoader(data, 8, sampler=DistributedSampler(data))\n"
        "model = DDP(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    ),
    cell(LOOP_CELL),
    cell("if True:\n    %matplotlib inline\ndist.destroy_process_group()"),
]


def notebook(cells):
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.full
def test_a_notebook_by_its_cells(tmp_path):
    (tmp_path / "train.ipynb").write_text(notebook(CELLS))
    output = examined(tmp_path, "--json=report.json", "--format=github", "train.ipynb")
    assert told("train.ipynb cell 6 line 2") in output, output
    assert "\n left out 8 lines of magics and shell, in cells 1, 2, 3, 7\n" in output, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["line"] for one in report["found"]] == ["train.ipynb cell 6:2"]
    said = "::error file=train.ipynb,title=doctor%3A set_epoch-is-forgotten::train.ipynb cell 6:2: "
    assert said in output, output


def test_what_fails_in_a_notebook_has_its_cell(tmp_path):
    cells = [cell("x = 1"), cell("%time\n\n1 / (x - 1)")]
    (tmp_path / "train.ipynb").write_text(notebook(cells))
    runs, _, output = looked_at(tmp_path / "train.ipynb")
    assert {process.end["line"] for process in runs[0]} == {"train.ipynb cell 2:3"}
    assert 'train.ipynb cell 2", line 3, in <module>' in output, output


# ---- Scripts that want a GPU


WANTS = {
    "asserts": ("assert torch.cuda.is_available()", "torch.cuda.set_device(0)"),
    "exits": (
        "if not torch.cuda.is_available():\n    raise SystemExit('no GPU')",
        "print(torch.cuda.get_device_properties(0).total_memory)",
    ),
    "counts": ("if torch.cuda.device_count() < 2:\n    exit()", "torch.cuda.synchronize()"),
    "names": ("if not torch.accelerator.is_available():\n    exit(1)", "torch.cuda.Stream()"),
}


@pytest.mark.parametrize("how", sorted(WANTS))
def test_a_script_that_does_not_go_on_without_a_gpu(how, tmp_path):
    """The line that asks is named, and the run goes on as if there was one."""
    asks, uses = WANTS[how]
    text = f"{TRAIN}\n{asks}\ndist.init_process_group('nccl')\n{uses}\ntrain('cuda')\n{END}"
    if how == "counts":  # it has asked before, and got on
        text = f"{TRAIN}\nprint(torch.cuda.is_available())\n{text}"
    (tmp_path / "run").mkdir()
    report = diagnosed(tmp_path / "run", ["--quick"], text)
    line = line_of(text, "is_available" if how == "counts" else asks.split("\n")[0])
    said = f"\n script.py:{line}  here it asks for a GPU, and is told that there is one: the CPU "
    assert said in report["said"] and report["code"] == 1, report["said"]
    assert "looked at 2 processes, each: 8 steps" in report["said"], report["said"]


def test_a_script_that_goes_on_without_a_gpu_is_told_the_truth(tmp_path):
    text = f"{TRAIN}\n{START}assert not torch.cuda.is_available()\ntrain()\n{END}"
    (tmp_path / "run").mkdir()
    report = diagnosed(tmp_path / "run", ["--quick"], text)
    assert report["code"] == 1 and "asks for a GPU" not in report["said"], report["said"]


ON_A_GPU = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
with torch.cuda.device(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 1).cuda(rank), device_ids=[rank])
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = torch.randn(8, 4, pin_memory=True).cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        model(x).square().mean().backward()
    x.record_stream(torch.cuda.current_stream())
    x.type(torch.cuda.HalfTensor), x.type("torch.cuda.FloatTensor")
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    generator = torch.Generator(device=f"cuda:{rank}").manual_seed(1)
    assert isinstance(generator, torch.Generator) and type(torch.Generator()) is type(generator)
    torch.multinomial(torch.ones(4, 8, device="cuda"), 1, generator=generator)
    torch.set_default_device("cuda")
    torch.compile(torch.nn.Linear(4, 1), backend="eager")(x)
    torch.cuda.memory._record_memory_history()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    assert torch.accelerator.current_device_index() == torch.cuda.initial_seed() == 0
    assert 8 / start.elapsed_time(stream.record_event()) > 0 < 8 / start.elapsed_time(start)
"""


def test_what_only_a_gpu_has_is_done_on_the_cpu(tmp_path):
    (tmp_path / "script.py").write_text(ON_A_GPU)
    runs, _, output = looked_at(tmp_path / "script.py")
    line = line_of(ON_A_GPU, ".cuda(rank)")
    for process in runs[0]:
        assert process.end["error"] == "", output
        assert [event["line"] for event in process.of("names a gpu")] == [f"script.py:{line}"]


COMPILED = """import torch
import torch.distributed as dist


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def forward(self, x, target):
        return torch.nn.functional.cross_entropy(self.net(x), target)


dist.init_process_group("gloo")
net = torch.compile(WithLoss(), backend="aot_eager")
net(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)).backward()
"""


@pytest.mark.full
def test_a_loss_inside_of_what_is_compiled(tmp_path):
    """It is traced with tensors that hold no numbers: there is nothing to count."""
    (tmp_path / "script.py").write_text(COMPILED)
    runs, _, output = looked_at(tmp_path / "script.py")
    for process in runs[0]:
        assert process.end["error"] == "" and process.of("fault") == [], output


JOINED = """import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
with Join([model]):
    model(torch.ones(8, 4)).mean().backward()
"""


def test_what_a_library_does_not_wait_for(tmp_path):
    """Join begins a collective for each forward pass, and has no need of its end."""
    (tmp_path / "script.py").write_text(JOINED)
    runs, _, output = looked_at(tmp_path / "script.py")
    for process in runs[0]:
        assert process.end["error"] == "" and process.of("unwaited") == [], output


# ---- In Chinese


def test_the_report_in_chinese(tmp_path, monkeypatch):
    """What programs read stays English: JSON, and the exit code."""
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    (tmp_path / "run").mkdir()
    report = diagnosed(tmp_path / "run", ["--quick"], PLAIN)
    line = f"script.py:{line_of(PLAIN, 'for x, y')}"
    page = "docs/bugs.zh-CN.md#忘了-set_epoch"
    chinese = "顺序和上一个 epoch 一样\uff1a要调用 sampler 的 set_epoch(epoch)"
    assert f"\n 错误\uff1a1\uff0c提示\uff1a0\n {line}  {chinese}  → {page}\n" in report["said"]
    assert not re.search(r"^ [a-z]+ [a-z]+ [a-z]+", report["said"], re.M), report["said"]
    assert report["code"] == 1 and [one["text"] for one in report["found"]] == [ORDER]
    assert report["found"][0]["place"] == "docs/bugs.md#set_epoch-is-forgotten"
