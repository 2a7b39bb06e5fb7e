"""Losses that are no plain mean over the batch, each as on one GPU: to copy from docs/losses.md."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize, one_hot


def weighted_cross_entropy(output, target, weight):
    """cross_entropy with weight= or ignore_index=: divided by what all processes count."""
    count = weight[target[target != -100]].sum()  # -100: the default of ignore_index
    dist.all_reduce(count)  # a number that needs no gradient
    loss = cross_entropy(output, target, weight, reduction="sum")
    return loss * dist.get_world_size() / count  # DDP divides by world_size


def masked_l1(output, depth):
    """The mean error of the pixels that have a depth: 0 and NaN are none."""
    mask = depth > 0
    count = mask.sum()
    dist.all_reduce(count)
    loss = (output[mask] - depth[mask]).abs().sum()  # selected, for NaN * 0 is NaN
    return loss * dist.get_world_size() / count.clamp(min=1)  # there may be no such pixel


def sum_of_all(part):
    """The sum over all processes, as if one process had computed it: with a gradient."""
    total = part.detach().clone()
    dist.all_reduce(total)  # alone it would be a number without a gradient
    # The difference is 0 and has the gradient of my part. DDP divides it by world_size.
    return total + dist.get_world_size() * (part - part.detach())


def dice_loss(output, target):
    """1 - Dice, the mean over the classes; output [n, classes, ...], target [n, ...]."""
    scores, truth = output.softmax(dim=1), one_hot(target, output.shape[1]).movedim(-1, 1)
    pixels = [0, *range(2, output.ndim)]
    both, either = (scores * truth).sum(dim=pixels), (scores + truth).sum(dim=pixels)
    both, either = sum_of_all(torch.stack([both, either]))
    return 1 - ((2 * both + 1) / (either + 1)).mean()  # + 1: a class may be in no image


def rmse(output, depth):
    """The root of the mean squared error of the pixels that have a depth."""
    mask = depth > 0
    squares = (output[mask] - depth[mask]).square().sum()
    squares, count = sum_of_all(torch.stack([squares, mask.sum()]))
    return (squares / count.clamp(min=1) + 1e-8).sqrt()  # the root of 0 has no gradient


def rows_of_all(part):
    """The rows of all processes, in the order of their ranks: with a gradient."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach())
    parts[dist.get_rank()] += dist.get_world_size() * (part - part.detach())
    return torch.cat(parts)


def info_nce(one, other, temperature=0.1):
    """InfoNCE over the global batch: row i of both, [n, features], is of the same item."""
    one, other = rows_of_all(normalize(one)), rows_of_all(normalize(other))
    scores = one @ other.T / temperature
    right = torch.arange(len(scores), device=scores.device)
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2
