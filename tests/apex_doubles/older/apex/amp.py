"""apex.amp as it looks from outside; O2 and O3 in bfloat16, for CPUs compute in it."""

import contextlib

import torch

state, model_dtype = {}, torch.float32
counts = {"scaled": 0, "forward": 0}


def initialize(models, optimizers=None, enabled=True, opt_level="O1", *, verbosity=1):
    assert enabled is True
    assert isinstance(models, torch.nn.Module) and isinstance(optimizers, torch.optim.Optimizer)
    assert not isinstance(models, torch.nn.parallel.DistributedDataParallel)
    # A power of two: the scaled and unscaled gradients are the same to the bit.
    state["loss_scaler0"] = {"loss_scale": 1.0 if opt_level == "O0" else 1024.0, "unskipped": 0}
    if opt_level in ("O2", "O3"):
        models.to(torch.bfloat16)
        forward = models.forward
        models.forward = lambda images: forward(images.to(torch.bfloat16)).float()
    models.register_forward_pre_hook(lambda module, _: count(module))
    print(f"double: amp.initialize {opt_level}", flush=True)
    return models, optimizers


def count(module):
    counts["forward"] += module.training


@contextlib.contextmanager
def scale_loss(loss, optimizer):
    scale = state["loss_scaler0"]["loss_scale"]
    yield loss.float() * scale
    counts["scaled"] += 1
    assert counts["scaled"] == counts["forward"], "each loss is scaled once"
    state["loss_scaler0"]["unskipped"] += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.div_(scale)


def state_dict():
    return {key: dict(value) for key, value in state.items()}


def load_state_dict(state_dict):
    if state_dict.keys() != state.keys():
        raise RuntimeError(f"Unexpected key(s) in state_dict: {list(state_dict)}")
    state.update(state_dict)
