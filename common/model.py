"""The model that --arch names, and what would make it fail once training has started."""

import contextlib
import importlib
import os

import torch
from torch.utils._pytree import tree_map
from torchvision import models

from .device import locked


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def build_model(args, num_classes, device, example=None):
    """The module that args.arch names, on `device`, in channels_last and train mode.

    args.arch is a classification model of torchvision, or package.module:callable, which is called
    with num_classes=. With args.pretrained it starts from torchvision's weights. example: a batch
    of one or two of what the model takes, on any device, with which the model is tried: two, if the
    batches of training have more than one. Raises ValueError for a model that cannot be found or
    built, for weights that cannot be loaded or fit no such classes, where there is nothing to
    evaluate, and for a model that does not make a row of class scores, [n, num_classes], of each
    item of the example.
    """
    arch, own = args.arch, ":" in args.arch
    names = models.list_models(module=models)
    if not own and arch not in names:
        choice = f"package.module:callable or one of {' '.join(names)}"
        raise ValueError(f"unknown --arch {arch}: give {choice}")
    if own and args.pretrained:
        raise ValueError(f"--pretrained is for torchvision's models: let {arch} load its weights")
    if args.evaluate and not args.resume and not own:  # a model of your own may load its weights
        if not args.pretrained:
            raise ValueError("nothing to evaluate: give --resume PATH or --pretrained")
        if num_classes != 1000:
            raise ValueError(f"--pretrained is of 1000 classes, not {num_classes}: train it first")
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
    if args.pretrained:
        _load_weights(net, args)
    if example is not None:
        example = tree_map(lambda x: x.to(device) if torch.is_tensor(x) else x, example)
        with torch.random.fork_rng([device] * (device.type == "cuda")):  # for dropout
            _try(net, example, num_classes, args)
    return net.train()


@torch.no_grad()
def _try(net, example, num_classes, args):
    """As it is evaluated and, since BatchNorm trains on no single value, as it is trained."""
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
        raise ValueError(f"{problem}: {type(error).__name__}: {_first_line(error)}") from error


@torch.no_grad()
def _load_weights(net, args):
    """Fill `net` with torchvision's weights, but for a head of another number of classes."""
    weights = models.get_model_weights(args.arch).DEFAULT
    folder = os.path.join(torch.hub.get_dir(), "checkpoints")
    try:
        os.makedirs(folder, exist_ok=True)
        with locked(os.path.join(folder, f"{args.arch}.lock")):  # one downloads, the others wait
            # Not the file's own names: some are old, and only torchvision knows what they became.
            source = models.get_model(args.arch, weights=weights).state_dict()
    except Exception as error:
        reason = f"{_first_line(error)}: without internet, put {weights.url} into {folder}"
        raise ValueError(f"cannot download the weights of {args.arch}: {reason}") from None
    for name, value in net.state_dict().items():
        if source[name].shape == value.shape:
            value.copy_(source[name])
        elif source[name].shape[1:] != value.shape[1:]:
            size = weights.meta["min_size"][0]
            raise ValueError(f"the weights of {args.arch} are for --image-size {size}")
