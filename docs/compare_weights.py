"""How far the weights of two runs are apart: the length of the difference, as a share of theirs.

$ python docs/compare_weights.py 1.pth 2.pth
"""

import sys

import torch

one, two = (torch.load(path, weights_only=True, map_location="cpu") for path in sys.argv[1:])
for what in ("weights", "BatchNorm statistics"):
    names = [name for name in one if one[name].is_floating_point()]
    names = [name for name in names if ("running_" in name) == (what != "weights")]
    if names:
        a, b = (torch.cat([file[name].flatten().double() for name in names]) for file in (one, two))
        print(f"{what}: {100 * ((a - b).norm() / a.norm()).item():.4f} % apart")
