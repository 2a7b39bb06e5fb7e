"""What fully_shard divides comes together again; tests/cluster/test_fsdp.py trains with it."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchvision import models

from common.sharded import Shards, blocks, make_mesh, precision_policy
from tests import nets

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:The default weight init:FutureWarning")
def test_blocks_of_torchvisions_models():
    """One of each family, such as swin_v2: the others have more or larger blocks."""
    names = [name for name in models.list_models(module=models) if "regnet" not in name]
    families = {re.match(r"[a-z]+(_v\d)?", name)[0]: name for name in names}
    assert len(families) > 15
    for name in [*families.values(), "regnet_y_400mf"]:  # which cannot be built on "meta"
        with torch.device("cpu" if "regnet" in name else "meta"):
            net = models.get_model(name)
        found = list(blocks(net))
        inside = [weight for block in found for weight in block.parameters()]
        assert len(set(inside)) == len(inside), name  # none is in two blocks
        most = sum(weight.numel() for weight in net.parameters())
        most *= 0.75 if "regnet" in name else 0.5  # its stages are Sequentials of another type
        for block in found:  # a layer cannot be gathered in pieces
            size = sum(weight.numel() for weight in block.parameters())
            assert size < most or not list(block.children()), name
    assert len(list(blocks(models.resnet18()))) == 8
    assert len(list(blocks(nets.transformer(10)))) == 3  # two layers and the head
    assert not list(blocks(nn.Linear(1, 1)))


def test_batch_norm_keeps_float32():
    assert precision_policy(nets.normed(10), torch.bfloat16).param_dtype is None
    policy = precision_policy(nets.transformer(10), torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_nodes_of_different_sizes():
    with pytest.raises(ValueError, match=r"^4 processes, 3 here: start as many on each node$"):
        make_mesh(CPU, world_size=4, local_world_size=3)


OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1, 0.9, weight_decay=1e-4, foreach=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, 0.01, foreach=True),
}


def optimizer_of(name, net):
    """With two groups, in another order than that of the weights."""
    weights = list(net.parameters())
    return OPTIMIZERS[name]([{"params": weights[2:], "lr": 0.02}, {"params": weights[:2]}])


def divided(net, optimizer):
    model = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
    for block in [*blocks(model), model]:
        fully_shard(block, mesh=make_mesh(CPU, 2, 2))
    shards = Shards(net, optimizer, model)
    shards.scatter()
    return shards


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.rand(4, 3, 24, 24)).square().mean().backward()
        optimizer.step()


def assert_same(net, optimizer, plain, plain_optimizer):
    for name, value in plain.state_dict().items():
        assert value.equal(net.state_dict()[name]), name
    state, plain_state = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    assert state.keys() == plain_state.keys() and state
    for number, values in plain_state.items():
        for key, value in values.items():
            assert value.equal(state[number][key]), (number, key)


def two_train_as_one(rank, file):
    """Both take the same images, so the mean of their gradients is that of one process."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        plain = nets.normed(10)
        net = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        if rank > 0:
            for weight in net.parameters():
                weight.data.zero_()  # rank 0's are sent
        plain_optimizer, optimizer = optimizer_of(name, plain), optimizer_of(name, net)

        shards = divided(net, optimizer)
        kept = [shard.to_local().numel() for shard in shards.model.parameters()]
        assert sum(kept) < 0.6 * sum(weight.numel() for weight in net.parameters())
        train(plain, plain_optimizer, range(3))
        train(shards.model, shards.optimizer, range(3))
        shards.gather()
        assert_same(net, optimizer, plain, plain_optimizer)

        # A scheduler has changed something; then rank 0 alone has read the checkpoint.
        settings = [group for o in (shards.optimizer, plain_optimizer) for group in o.param_groups]
        for group in settings:
            group |= {"lr": group["lr"] / 2, "weight_decay": 1e-3}
        shards.gather()
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, settings[1]["lr"]]
        if rank > 0:
            for weight in net.parameters():
                weight.data.zero_()
                for value in optimizer.state[weight].values():
                    value.mul_(value.shape == ())  # but for the number of steps
        again = divided(net, optimizer)
        train(plain, plain_optimizer, range(3, 5))
        train(again.model, again.optimizer, range(3, 5))
        again.gather()
        assert_same(net, optimizer, plain, plain_optimizer)
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_train_scatter_and_gather_as_one_trains(tmp_path):
    mp.spawn(two_train_as_one, (tmp_path / "meeting",), nprocs=2)


class Three(list):
    """A validation set; rank 1 of two has a batch less than rank 0."""

    classes = "0123456789"


def test_the_forward_of_a_process_with_a_batch_less(monkeypatch):
    """Under autocast too, or layers would mix dtypes; and not compiled, while others wait."""
    import fsdp_distributed  # not above: each process of the test before would take a second more

    net, compiled, forwards = nets.plain(10), [], []
    net[0].register_forward_hook(lambda *_: forwards.append(torch.is_autocast_enabled("cpu")))
    net.compile(backend=lambda graph, _: compiled.append(graph) or graph)
    batches = Three([(torch.zeros(1, 3, 24, 24), torch.tensor([1]))])
    batches.device, batches.loader = CPU, SimpleNamespace(batch_size=1, dataset=Three("abc"))
    monkeypatch.setattr(fsdp_distributed, "reduce_mean", lambda sums, _: sums * 3 / 2)
    args = SimpleNamespace(precision="bf16", image_size=24, predictions=None)
    fsdp_distributed.validate(batches, net, 1, 2, args)
    assert forwards == [True, True] and not compiled
    net(torch.zeros(1, 3, 24, 24))
    assert compiled  # in training
