"""Random numbers as a function of position: not of the process, nor of what was drawn before."""

import hashlib

import torch


def position_seed(*position):
    """A 63-bit seed from a few integers, such as (seed, epoch, step, rank)."""
    text = " ".join(map(str, position)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_step(seed, epoch, step, rank):
    """Make the random numbers of a step (dropout) a function of its position alone."""
    value = position_seed(seed, epoch, step, rank)
    torch.default_generator.manual_seed(value)  # torch.manual_seed is 30 times slower without GPU
    for i, generator in enumerate(torch.cuda.default_generators):  # one for each visible GPU
        generator.manual_seed(value + i - torch.cuda.current_device())
