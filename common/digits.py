"""scikit-learn's handwritten digits as an image folder: something to train on at once."""

import fcntl
import os
import shutil

import numpy as np
from PIL import Image


def digits_folder(parent="data"):
    """1797 handwritten digits of scikit-learn as 64 x 64 PNGs in train/ and val/; returns the path.

    Written at first use, whole or not at all, by one of the processes that ask at the same time.
    Raises ValueError where scikit-learn is missing.
    """
    root = os.path.join(parent, "digits")
    os.makedirs(parent, exist_ok=True)
    with open(os.path.join(parent, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(root):
            try:
                from sklearn.datasets import load_digits
            except ImportError:
                raise ValueError("no --data: the digits need pip install scikit-learn") from None
            partial = root + ".partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            digits = load_digits()
            for i, (pixels, target) in enumerate(zip(digits.images, digits.target, strict=True)):
                folder = os.path.join(partial, "train" if i % 5 else "val", str(target))
                os.makedirs(folder, exist_ok=True)
                image = Image.fromarray((pixels * 15.9375).astype(np.uint8))
                image = image.resize((64, 64), Image.Resampling.BICUBIC)
                image.save(os.path.join(folder, f"{i:04d}.png"))
            os.rename(partial, root)
    return root
