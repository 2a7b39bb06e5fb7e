"""Weights from a file of another program, for a minimal script: to copy from full.md."""

import re

import torch


def load_weights(net, path):
    """Those in a file that fit into the net; returns the names of the others, which stay."""
    state = torch.load(path, weights_only=True, map_location="cpu")
    for place in ("state_dict", "model"):  # of a checkpoint
        state = state.get(place, state)
    ours, fits = net.state_dict(), {}
    for name, value in state.items():
        if name not in ours:  # as DDP, torch.compile and Lightning name them
            name = re.sub(r"^(module\.|_orig_mod\.|model\.)+", "", name)
        if name in ours and value.shape == ours[name].shape:
            fits[name] = value
    new = [name for name in ours if name not in fits]
    if len(new) > len(ours) / 2:
        raise SystemExit(
            f"{path} is of another model: it has no {', '.join(new[:3])} of this shape"
        )
    net.load_state_dict(fits, strict=False)
    return new
