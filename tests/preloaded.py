"""What a forkserver has imported before it forks the first rank: see docs/ranks.py."""

import gc
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (1, 0)]

import sklearn.datasets  # noqa: E402, F401
import torch.distributed  # noqa: E402
import torch.nn.parallel  # noqa: E402, F401
import torchvision  # noqa: E402, F401

import tests.docs.ranks  # noqa: E402, F401

gc.freeze()  # or each rank walks through all of it, while it imports the little that is left
