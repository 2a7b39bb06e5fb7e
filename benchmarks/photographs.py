"""Photographs to measure loading with, made of two that come with scikit-learn."""

import fcntl
import functools
import multiprocessing
import random
import shutil
import signal
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from common.loader import die_with_parent
from longrun.device import own_cores

CLASSES = 8
VALIDATION_IMAGES = 64


def photographs(count):
    """A folder with `count` JPEGs to train and 64 to validate, made at first use; returns its path.

    They are 500 x 375 pixels and 90 KB each, about as those of ImageNet.
    """
    root = Path("data", f"photographs-{count}")
    root.parent.mkdir(exist_ok=True)
    with open(root.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.exists():
            return str(root)
        from sklearn.datasets import load_sample_images

        print(f"making {count} photographs in {root}", flush=True)
        partial = root.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        images = load_sample_images().images
        draw = random.Random(0)
        grain = np.random.default_rng(0).normal(0, 4, (500, 700, 3))  # the noise of a sensor
        jobs = []
        for i in range(count + VALIDATION_IMAGES):
            path = partial / ("train" if i < count else "val") / str(i % CLASSES) / f"{i:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            jobs.append((path, i % len(images), _choices(draw)))
        with multiprocessing.get_context("fork").Pool(own_cores(1), _begin_worker) as pool:
            for _ in pool.imap_unordered(functools.partial(_save, images, grain), jobs, 16):
                pass
        partial.rename(root)
    return str(root)


def _begin_worker():
    """Let SIGTERM, by which a pool ends its workers, end this one.

    Forked, it has the handler of the benchmark, in Python: while the worker waits for the pool's
    lock that handler may never run, and the pool would wait for the worker forever.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


def _choices(draw):
    """What is random in a photograph: (its part of the source, colours, place in grain, mirror)."""
    width = draw.uniform(300, 560)
    height = width * 3 / 4
    x, y = draw.uniform(0, 640 - width), draw.uniform(0, 427 - height)
    colours = [draw.uniform(0.7, 1.3) for _ in range(3)]
    place = draw.randrange(125), draw.randrange(200)
    return (x, y, x + width, y + height), colours, place, draw.choice([1, -1])


def _save(images, grain, job):
    """Write a photograph: a part of a source, in other colours, with grain, mirrored or not."""
    path, source, (box, colours, (top, left), mirror) = job
    image = Image.fromarray(images[source]).resize((500, 375), Image.Resampling.LANCZOS, box)
    enhancers = (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness)
    for enhance, strength in zip(enhancers, colours, strict=True):
        image = enhance(image).enhance(strength)
    pixels = np.asarray(image) + grain[top : top + 375, left : left + 500]
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)[:, ::mirror]).save(path, quality=95)
