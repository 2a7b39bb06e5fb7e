"""What fully_shard divides comes together again; tests/cluster/test_fsdp.py trains with it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchvision import models

from common.sharded import Shards, blocks, precision_policy
from tests import nets

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "vit_b_32", "swin_v2_t"])
def test_blocks_of_torchvisions_models(name):
    with torch.device("meta"):
        net = models.get_model(name)
    found = list(blocks(net))
    inside = [weight for block in found for weight in block.parameters()]
    assert len(set(inside)) == len(inside) > 0  # none is in two blocks
    half = sum(weight.numel() for weight in net.parameters()) / 2
    for block in found:
        assert sum(weight.numel() for weight in block.parameters()) < half


def test_blocks_of_small_models():
    assert len(list(blocks(models.resnet18()))) == 8
    assert len(list(blocks(nets.transformer(10)))) == 3  # two layers and the head
    assert not list(blocks(nn.Linear(1, 1)))


def test_batch_norm_keeps_float32():
    assert precision_policy(nets.normed(10), torch.bfloat16).param_dtype is None
    policy = precision_policy(nets.transformer(10), torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


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
        fully_shard(block)
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
