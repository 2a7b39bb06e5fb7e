"""Photographs to measure loading with, made of two that come with scikit-learn."""

import fcntl
import random
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

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
        sources = [Image.fromarray(image) for image in load_sample_images().images]
        draw = random.Random(0)
        grain = np.random.default_rng(0).normal(0, 4, (500, 700, 3))  # the noise of a sensor
        for i in range(count + VALIDATION_IMAGES):
            pixels = _photograph(sources[i % len(sources)], draw, grain)
            path = partial / ("train" if i < count else "val") / str(i % CLASSES) / f"{i:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=95)
        partial.rename(root)
    return str(root)


def _photograph(source, draw, grain):
    """A random part of the source, in random colours, with grain, mirrored or not."""
    width = draw.uniform(300, 560)
    height = width * 3 / 4
    x, y = draw.uniform(0, 640 - width), draw.uniform(0, 427 - height)
    box = (x, y, x + width, y + height)
    image = source.resize((500, 375), Image.Resampling.LANCZOS, box)
    for enhance in (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness):
        image = enhance(image).enhance(draw.uniform(0.7, 1.3))
    top, left = draw.randrange(125), draw.randrange(200)
    pixels = np.asarray(image) + grain[top : top + 375, left : left + 500]
    return pixels.clip(0, 255).astype(np.uint8)[:, :: draw.choice([1, -1])]
