"""What docs/faq.md says of models and data that are unlike the example, in two processes."""

import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, run, torchrun
from PIL import Image
from torch import nn

import compose
from tests.docs.copies import edited, equal, patched
from tests.docs.ranks import good

pytestmark = pytest.mark.full
DEBUGGING = (ROOT / "docs/debugging.md").read_text(encoding="utf-8")
FAQ = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
TOP = """
import itertools, os, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
"""
END = """
torch.save(result, f"rank{rank}.pth")
dist.destroy_process_group()
"""


def said(start):
    """The `code` of the page that begins so: the only one."""
    (found,) = {code for code in re.findall(r"`([^`\n]+)`", FAQ) if code.startswith(start)}
    return found


@pytest.fixture
def ranks(tmp_path):
    """A function: what each of two processes has at the end as `result`."""

    def run(*lines):
        (tmp_path / "script.py").write_text("\n".join([TOP, *lines, END]))
        good(tmp_path / "script.py", ranks=2)
        return [torch.load(tmp_path / f"rank{rank}.pth", weights_only=True) for rank in range(2)]

    return run


def test_unused_parameters(ranks):
    """The same ones in each step, or others; with these flags."""
    flags = ["", "find_unused_parameters=True", "static_graph=True"]
    unused = "Expected to have finished reduction in the prior iteration"
    changed = "Your training graph has changed"
    assert all(f"`{words}`" in FAQ for words in [unused, changed, *flags[1:]])
    script = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, which):
        return self.a(x) if which else self.b(x)

def outcome(vary, **how):
    torch.manual_seed(0)
    model = DistributedDataParallel(Two(), **how)
    try:
        for i in range(4):
            model.zero_grad()
            model(torch.randn(6, 4), vary and i % 2 == 1).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "well"

"""
    calls = [f"outcome({vary}, {flag})" for vary in (False, True) for flag in flags]
    for same_plain, *same, vary_plain, vary_find, vary_static in ranks(
        script, f"result = [{', '.join(calls)}]"
    ):
        assert unused in same_plain and unused in vary_plain and changed in vary_static
        assert same == ["well", "well"] and vary_find == "well"


def test_two_models(ranks):
    """Trained in turns: they stay equal in both processes, which see different images."""
    script = """
generator, judge = nn.Linear(2, 4), nn.Linear(4, 1)
wrapped, wrapped_judge = DistributedDataParallel(generator), DistributedDataParallel(judge)
optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, judge)]
loss_of = nn.functional.binary_cross_entropy_with_logits
torch.manual_seed(rank)
for _ in range(5):
    fake = wrapped(torch.randn(8, 2))
    output = wrapped_judge(torch.cat([torch.randn(8, 4), fake.detach()]))
    loss = loss_of(output, torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]))
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    loss_of(judge(fake), torch.ones(8, 1)).backward()  # the plain one
    optimizers[0].step()
result = [*generator.parameters(), *judge.parameters()]
"""
    one, other = ranks(script)
    assert all(map(torch.equal, one, other))


def test_a_judge_with_batchnorm(ranks):
    """Two calls have the gradients of the plain one; the inputs put together have others."""
    script = f"""
judge = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
wrapped_judge = DistributedDataParallel(judge, {said("forward_sync_buffers")})
loss_of = nn.functional.binary_cross_entropy_with_logits
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
parts = torch.randn(2, 2, 16, 4) + torch.tensor([2.0, 0.0]).view(1, 2, 1, 1)
real, fake = parts[rank]

def gradient_of(loss):
    judge.zero_grad()
    loss.backward()
    return judge[0].weight.grad.clone()

losses = [loss_of(judge(a), ones) + loss_of(judge(b), zeros) for a, b in parts]
result = [gradient_of(sum(losses) / 2)]
{said("loss = loss_of(")}
result.append(gradient_of(loss))
output = wrapped_judge(torch.cat([real, fake]))
result.append(gradient_of(2 * loss_of(output, torch.cat([ones, zeros]))))
"""
    for right, apart, together in ranks(script):
        assert torch.allclose(apart, right, atol=1e-6)
        assert (together - right).norm() > 0.5 * right.norm()


def test_two_forward_passes(ranks):
    """In one call or in two, and one backward(): the gradient is that of both, averaged.

    That two backward() are wrong is seen in test_bugs.py.
    """
    script = f"""
net = nn.Linear(4, 8)
model = DistributedDataParallel(net)
images = torch.randn(2, 2, 6, 4)
a, b = images[rank]
result = []

def add_gradient_of(loss):
    net.zero_grad()
    loss.backward()
    result.append(net.weight.grad.clone())

{said("one, two = ")}
add_gradient_of((one * two).mean())
add_gradient_of((model(a) * model(b)).mean())
add_gradient_of(sum((net(a) * net(b)).mean() / 2 for a, b in images))
"""
    for together, apart, whole in ranks(script):
        assert torch.allclose(together, whole, atol=1e-6)
        assert torch.allclose(apart, whole, atol=1e-6)


def test_several_classes_in_an_image():
    """The right labels are counted, and the loss is 0 where all are right, and sure."""
    target = torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    names = {"output": 99 * target - 50, "target": target, "nn": nn}
    exec(said("criterion = "), names)
    assert names["criterion"](names["output"], target) < 1e-9
    assert eval(said("((output > 0)"), names) == 1
    assert eval(said("((output > 0)"), names | {"target": 1 - target}) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_unused_parameters(reentrant, ranks):
    """The page's message, or none."""
    (message,) = re.findall(r"\*\*`(Expected to mark .*)`\.\*\*", FAQ)
    script = f"""
from torch.utils.checkpoint import checkpoint

class Two(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant={reentrant})
        return x

net = Two(nn.Linear(4, 4), nn.Linear(4, 4))
model = DistributedDataParallel(net, find_unused_parameters=True)
try:
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    result = ""
except RuntimeError as error:
    result = str(error)
"""
    assert all((message in result) == reentrant for result in ranks(script))


def test_breakpoint_under_torchrun(tmp_path):
    """It gets the keyboard, and the other process waits."""
    stop = next(line for line in DEBUGGING.split("`") if "breakpoint()" in line)
    lines = [TOP, stop, "dist.barrier()", "print('went on')"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    typed = subprocess.run(
        torchrun(2, tmp_path / "script.py"),
        cwd=tmp_path,
        input="p 40 + 2\nc\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "(Pdb) 42" in typed.stdout and typed.stdout.count("went on") == 2, typed


def test_the_calls_that_were_made(tmp_path):
    """The page's lines print what it shows, but for the numbers of lines, which are a script's."""
    codes = re.findall(r"`([^`\n]+)`", DEBUGGING)
    read, show = (code for code in codes if code.startswith(("calls = ", "print(rank, [")))
    script = f"""
import datetime, os, pickle, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
numbers = torch.ones(3)
dist.all_reduce(numbers)
try:
    if rank == 0:
        dist.all_reduce(numbers)
    else:
        dist.broadcast(torch.ones(5), src=1)
        dist.barrier()
except RuntimeError:
    {read}
    time.sleep(2 * rank)  # else their words may be mixed
    {show}
os._exit(0)  # the group is broken
"""
    (tmp_path / "script.py").write_text(script)
    output = good(tmp_path / "script.py", ranks=2)
    (sample,) = re.findall(r"^```text\n(0 .*?)^```", DEBUGGING, re.M | re.S)
    output, sample = (re.sub(r", \d+\)", ", #)", text) for text in (output, sample))
    assert sorted(output.splitlines()) == sample.splitlines()


def test_the_lines_where_processes_wait(tmp_path):
    """Those of the page's stacks, in a script with that mistake."""
    script = shutil.copy(ROOT / "minimal/distributed.py", tmp_path)
    assert patched(script, "bugs/all_reduce_on_rank_0.diff")
    lines = ["", *Path(script).read_text().splitlines()]
    reduces, forward = map(int, re.findall(r"main \(minimal/distributed\.py:(\d+)\)", DEBUGGING))
    assert "dist.all_reduce(" in lines[reduces] and "model(images" in lines[forward]


def test_a_warning_that_names_no_file(tmp_path):
    """Stands below the one of the three whose end has bytes too many, and no other does."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    data = buffer.getvalue()
    for name, more in [("a", b""), ("b", b"\0abcdefghijklm"), ("c", b"")]:
        (tmp_path / f"{name}.jpg").write_bytes(data[:-2] + more + data[-2:])
    lines = [said("from common.decode"), "paths = ['a.jpg', 'b.jpg', 'c.jpg']", said("for path in")]
    output = run([PYTHON, "-c", "\n".join(lines)], tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert output.splitlines() == ["a.jpg", "b.jpg", said("Corrupt JPEG data"), "c.jpg"]


def test_an_iterable_data_set():
    """Each item is in one share of the processes' workers."""
    shares = []
    for rank, worker in [(rank, worker) for rank in range(3) for worker in range(2)]:
        names = dict(items=range(20), rank=rank, world_size=3, workers=2, worker=worker)
        exec("import itertools\n" + said("share = "), names)
        shares.append([*names["share"]])
    assert sorted(item for share in shares for item in share) == [*range(20)]
    assert len({*map(tuple, shares)}) == 6


WARNED = "Detected call of lr_scheduler.step() before optimizer.step()"


def test_fp16_leaves_out_steps_of_a_schedule(tmp_path):
    """torch warns once in each process; the rates end as they do without, and weights are alike."""
    assert f"`{WARNED}`" in FAQ
    end = "    dist.destroy_process_group()\n"
    save = """    last = scheduler.last_epoch, scheduler.get_last_lr()[0]
    torch.save((net.state_dict(), last), f"rank{rank}.pth")
"""
    edits = [("torch.bfloat16  #", "torch.float16  #"), ("EPOCHS = 5", "EPOCHS = 2")]
    edits += [("enabled=fp16)", "enabled=fp16, init_scale=2.0**40)"), (end, save + end)]
    text = compose.script("torchrun", features=["amp", "schedule"])
    (tmp_path / "script.py").write_text(edited(text, edits))
    output = good(tmp_path / "script.py", ranks=2)
    assert output.replace("`", "").count(WARNED) == 2
    (weights, last), (others, other) = (
        torch.load(tmp_path / f"rank{rank}.pth", weights_only=True) for rank in (0, 1)
    )
    assert equal(weights, others) and last == other
    assert last[0] == 2 * (1437 // 64) and last[1] == pytest.approx(0, abs=1e-4)


PICKLED = """
import sys
from torch.utils.data import DataLoader


class Data(list):
    def __init__(self, transform):
        super().__init__(range(4))
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(index)


def twice(x):
    return 2 * x


def main(context):
    for transform in (twice, lambda x: 2 * x):
        loader = DataLoader(Data(transform), None, num_workers=1, multiprocessing_context=context)
        print([*loader])


if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_a_lambda_is_not_sent_to_a_worker(tmp_path):
    """As Python 3.14 starts workers by itself, and with the argument that the page names."""
    assert said('multiprocessing_context="fork"') and said("Can't pickle local object")
    (tmp_path / "script.py").write_text(PICKLED)
    output = run([PYTHON, "script.py", "fork"], tmp_path)
    assert output.count("[0, 2, 4, 6]") == 2
    output = run([PYTHON, "script.py", "forkserver"], tmp_path, code=1)
    assert output.count("[0, 2, 4, 6]") == 1
    assert re.search("Can't (get|pickle) local object.*<lambda>", output), output


@pytest.mark.full
def test_workers_by_a_forkserver(tmp_path):
    """With the argument that the page names a composed script ends as it does without."""
    how = said('multiprocessing_context="forkserver').partition("=")[2]
    weights = []
    for more in ("", f', "multiprocessing_context": {how}'):
        text = compose.script("torchrun", features=["workers"])
        workers = '{"num_workers": 4, "persistent_workers": True'
        edits = [("EPOCHS = 5", "EPOCHS = 1"), (workers, workers.replace("4", "1") + more)]
        (tmp_path / "script.py").write_text(edited(text, edits))
        if more:  # a forkserver of its own needs processes that are none of the tests'
            run(torchrun(2, tmp_path / "script.py"), tmp_path, env={"OMP_NUM_THREADS": "1"})
        else:
            good(tmp_path / "script.py", ranks=2)
        weights.append(torch.load(tmp_path / "digits.pth", weights_only=True))
    assert equal(*weights)
