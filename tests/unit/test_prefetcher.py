"""What becomes of a batch on its way to the device. On GPUs: tests/gpu."""

import torch
from torchvision.transforms import v2

from common.prefetcher import Prefetcher

CPU = torch.device("cpu")


def test_images_are_normalised_once():
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    ((got, target),) = Prefetcher([(images, "what is no tensor")], CPU)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    torch.testing.assert_close(got, normalise(images), atol=1e-5, rtol=1e-5)
    ((again, same),) = Prefetcher([(got, target)], CPU)
    assert again.equal(got) and same == target == "what is no tensor"


def test_waited_is_the_time_for_images_of_the_last_epoch(monkeypatch):
    """Not that for steps, nor that for the end."""
    now = 0.0

    def batches(*seconds):
        nonlocal now
        for wait in seconds:
            now += wait
            yield torch.ones(2)
        now += 100

    monkeypatch.setattr("time.perf_counter", lambda: now)
    prefetcher = Prefetcher(batches(1, 2), CPU)
    assert prefetcher.waited() == 0.0
    for _ in prefetcher:
        now += 10
    assert prefetcher.waited() == 3
    prefetcher.loader = batches()
    assert list(prefetcher) == [] and prefetcher.waited() == 0.0
