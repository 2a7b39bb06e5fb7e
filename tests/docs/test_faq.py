"""What docs/faq.md says of models and data that are unlike the example, in two processes."""

import re

import pytest
import torch
from conftest import ROOT

from tests.docs.ranks import good

pytestmark = pytest.mark.full
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


@pytest.mark.parametrize("mended", [True, False])
def test_a_loss_with_weights(mended, ranks):
    """Shares of 6 and 4 targets, three of them ignored, have the gradient of all ten."""
    data = """
net = nn.Linear(4, 3)
images, targets = torch.randn(10, 4), torch.randint(3, (10,))
targets[:3] = -100
weight = torch.tensor([1.0, 5.0, 2.0])
nn.functional.cross_entropy(net(images), targets, weight).backward()
whole = net.weight.grad.clone()
net.zero_grad()
part = slice(0, 6) if rank == 0 else slice(6, 10)
model = DistributedDataParallel(net)
target, output = targets[part], model(images[part])
"""
    lines = [said("count = "), said("dist.all_reduce(count)"), said("loss = nn.")]
    if not mended:
        lines = ["loss = nn.functional.cross_entropy(output, target, weight)"]
    for whole, shared in ranks(data, *lines, "loss.backward()", "result = whole, net.weight.grad"):
        assert torch.allclose(whole, shared, atol=1e-6) == mended


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


def test_an_iterable_data_set():
    """Each item is in one share of the processes' workers."""
    shares = []
    for rank, worker in [(rank, worker) for rank in range(3) for worker in range(2)]:
        names = dict(items=range(20), rank=rank, world_size=3, workers=2, worker=worker)
        exec("import itertools\n" + said("share = "), names)
        shares.append([*names["share"]])
    assert sorted(item for share in shares for item in share) == [*range(20)]
    assert len({*map(tuple, shares)}) == 6
