"""The model that --arch names, and what would make it fail once training has started."""

import contextlib
import importlib

import torch
from torch.utils._pytree import tree_map
from torchvision import models

from .messages import first_line


def build_model(args, num_classes, device, example=None):
    """The module that args.arch names, on `device`, in channels_last and train mode.

    args.arch is a classification model of torchvision, or package.module:callable, which is called
    with num_classes=. example: a batch of one or two of what the model takes, on any device, with
    which the model is tried: two, if the batches of training have more than one. Its buffers get
    memory of their own, as saving and DDP need. Raises ValueError for a model that cannot be found
    or built, and for one that does not make a row of class scores, [n, num_classes], of each item
    of the example.
    """
    arch, own = args.arch, ":" in args.arch
    names = models.list_models(module=models)
    if not own and arch not in names:
        choice = f"package.module:callable or one of {' '.join(names)}"
        raise ValueError(f"unknown --arch {arch}: give {choice}")
    options = {"num_classes": num_classes}
    if arch in ("googlenet", "inception_v3"):  # one head: more make its output a tuple
        options |= {"aux_logits": False, "init_weights": True, "transform_input": True}
    elif arch.startswith("vit_") and not own:
        options["image_size"] = args.image_size
    elif arch == "maxvit_t":
        options["input_size"] = (args.image_size, args.image_size)
    wanted = f"{num_classes} classes and --image-size {args.image_size}"
    with _one_line(f"cannot build {arch} for {wanted}"):
        if own:
            module, _, name = arch.partition(":")
            net = getattr(importlib.import_module(module), name)(**options)
        else:
            net = models.get_model(arch, **options)
        net = net.to(device)
        if not any(weight.ndim == 5 for weight in net.parameters()):  # convolutions over video
            net = net.to(memory_format=torch.channels_last)
        _make_buffers_dense(net)
        _keep_from_ddp(net)
    if example is not None:
        example = tree_map(lambda x: x.to(device) if torch.is_tensor(x) else x, example)
        with torch.random.fork_rng([device] * (device.type == "cuda")):  # for dropout
            _try(net, example, num_classes, args)
    return net.train()


def _make_buffers_dense(net):
    """Buffers become what .to() makes of them on a GPU: of elements that share no memory, no gaps.

    Nobody could write to torch.arange(4).expand(3, -1), which has four for twelve: no broadcast, no
    checkpoint.
    """
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            dense = buffer.clone()
            if dense.stride() != buffer.stride():
                setattr(module, name, dense)


def _keep_from_ddp(net):
    """Tell DDP to ignore buffers of a dtype that gloo and NCCL cannot send.

    They are the same in all processes, for each has made them alike.
    """
    unknown = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
    if names := [name for name, buffer in net.named_buffers() if buffer.dtype in unknown]:
        net._ddp_params_and_buffers_to_ignore = names


@torch.no_grad()
def _try(net, example, num_classes, args):
    """One pass in eval mode, then one in training mode: there BatchNorm fails on a single value."""
    arch, before = args.arch, [(buffer, buffer.clone()) for buffer in net.buffers()]
    problems = {False: f"{arch} cannot take --image-size {args.image_size}"}
    if not args.evaluate:
        problems[True] = f"{arch} cannot be trained with so small a --batch-size, or --image-size"
    for mode, problem in problems.items():
        with _one_line(problem):
            output = net.train(mode)(example)
        if not torch.is_tensor(output) or output.shape[1:] != (num_classes,):
            got = list(output.shape) if torch.is_tensor(output) else f"a {type(output).__name__}"
            raise ValueError(f"{arch} gives {got}, not scores [n, {num_classes}]")
    for buffer, value in before:
        buffer.copy_(value)


@contextlib.contextmanager
def _one_line(problem):
    """Turn what a model can raise, sys.exit() too, into a ValueError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{problem}: {type(error).__name__}: {first_line(error)}") from error
