"""What fully_shard divides comes together again; tests/cluster/test_fsdp.py has two processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchvision import models

from longrun.sharded import Shards, blocks, check_shapes, precision_policy
from tests import nets


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


@pytest.mark.parametrize("shape, how", [([], "a scalar: make it one of shape"), ([0, 3], "empty:")])
def test_what_cannot_be_divided_is_named(shape, how):
    net = nets.plain(10)
    check_shapes(net)
    net[4].register_parameter("more", nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match=rf"^fully_shard cannot divide 4\.more, which is {how}"):
        check_shapes(net)


def test_batch_norm_keeps_float32():
    assert precision_policy(nets.normed(10), torch.bfloat16).param_dtype is None
    policy = precision_policy(nets.transformer(10), torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adamw(net):
    """With two groups, in another order than that of the weights."""
    weights = list(net.parameters())
    groups = [{"params": weights[2:], "lr": 0.02}, {"params": weights[:2]}]
    return torch.optim.AdamW(groups, 0.01, foreach=True)


def divided(net, optimizer):
    model = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
    for block in [*blocks(model), model]:
        fully_shard(block)
    return Shards(net, optimizer, model)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.rand(4, 3, 24, 24)).square().mean().backward()
        optimizer.step()


def test_what_is_gathered_is_what_was_trained_and_goes_on(group_of_one):
    """To the bit. What was gathered is loaded after the model was divided, as by a resume."""
    plain = nets.normed(10)
    plain_optimizer = adamw(plain)
    saved = plain.state_dict(), plain_optimizer.state_dict()
    for steps in (range(3), range(3, 5)):
        net = nets.normed(10).to(memory_format=torch.channels_last)
        optimizer = adamw(net)
        shards = divided(net, optimizer)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        shards.scatter()
        train(plain, plain_optimizer, steps)
        train(shards.model, shards.optimizer, steps)
        for group in shards.optimizer.param_groups + plain_optimizer.param_groups:
            group["lr"] /= 2  # as a scheduler does
        shards.gather()
        saved = net.state_dict(), optimizer.state_dict()
        for name, value in plain.state_dict().items():
            assert value.equal(saved[0][name]), name
        expected = plain_optimizer.state_dict()
        assert saved[1]["state"].keys() == expected["state"].keys() != set()
        for number, values in expected["state"].items():
            for key, value in values.items():
                assert value.equal(saved[1]["state"][number][key]), (number, key)
        rates = [[group["lr"] for group in x["param_groups"]] for x in (saved[1], expected)]
        assert rates[0] == rates[1]
