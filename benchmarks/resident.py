"""A loader that loads nothing, so that computing is what is measured."""

import torch
from torch.utils.data import BatchSampler

from common.loader import Seeded


class ResidentLoader:
    """Yields one batch, which is on the device already, as often as start_loader()'s would.

    It takes the place of start_loader() and has its arguments, but for collate_fn. `sampler` is
    read as usual.
    """

    def __init__(self, dataset, sampler, batch_size, workers, device, seed=None):
        dataset = dataset if seed is None else Seeded(dataset, seed)
        self.dataset, self.batch_size = dataset, batch_size
        self.keys = BatchSampler(sampler, batch_size, drop_last=False)
        image, _ = dataset[next(iter(sampler))]
        channels, height, width = image.shape
        shape = (batch_size, height, width, channels)  # in memory as the loader's: channels_last
        pixels = torch.randint(256, shape, dtype=torch.uint8, device=device)
        self.images = pixels.permute(0, 3, 1, 2)
        self.target = torch.arange(batch_size, device=device) % 8

    def __len__(self):
        return len(self.keys)

    def __iter__(self):
        for keys in self.keys:
            yield self.images[: len(keys)], self.target[: len(keys)]
