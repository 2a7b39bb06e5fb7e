"""The model that --arch names, checked before training starts."""

import copy
import functools
import importlib

import torch
from torch.utils._pytree import tree_map
from torchvision import models

from .errors import first_line


def build_model(args, num_classes, device, local_batch_size=None, example=None):
    """The module that args.arch names, on `device`, in train mode, with `num_classes` outputs.

    args.arch is a classification model of torchvision, or package.module:callable, which is called
    with num_classes=. It is tried on `example`, a batch of one of what it takes; without one, on an
    image of args.image_size x args.image_size. With a local_batch_size of 1 a training step is
    tried too. Raises ValueError for an unknown model, and for one that does not turn the example
    into one row of class scores.
    """
    make = _imported if ":" in args.arch else _torchvision
    make = make(args.arch, args.pretrained, args.image_size)
    size = f"--image-size {args.image_size}" if example is None else "the example"
    try:
        if example is None:
            example = torch.zeros(1, 3, args.image_size, args.image_size)
            example = example.contiguous(memory_format=torch.channels_last)
        example = tree_map(lambda tensor: tensor.to(device), example)
        net = make(num_classes=num_classes).to(device)
        if not any(weight.ndim == 5 for weight in net.parameters()):  # convolutions over video
            net = net.to(memory_format=torch.channels_last)
        with torch.no_grad():
            output = net.eval()(example)
            if local_batch_size == 1 and not vars(args).get("sync_bn"):
                size = f"{size} with one image per process"  # BatchNorm may need two
                copy.deepcopy(net).train()(example)
    except Exception as error:
        reason = first_line(error)
        if "CUDA" in reason or "cuDNN" in reason:  # such as a GPU that others have filled
            raise ValueError(f"{device} cannot run {args.arch}: {reason}") from None
        if not isinstance(error, (RuntimeError, ValueError, AssertionError)):
            reason = f"{type(error).__name__}: {reason}"  # such as a name that is not defined
        raise ValueError(f"{args.arch} cannot take {size}: {reason}") from None
    if getattr(output, "shape", None) != (1, num_classes):
        got = tuple(output.shape) if torch.is_tensor(output) else f"a {type(output).__name__}"
        raise ValueError(f"{args.arch} gives {got} for one image, not scores [1, {num_classes}]")
    if args.pretrained:
        _load_weights(net, args.arch)
    return net.train()


def _load_weights(net, arch):
    try:
        weights = models.get_model_weights(arch).DEFAULT.get_state_dict()
    except OSError as error:
        raise ValueError(f"cannot download the weights of {arch}: {error}") from None
    own = net.state_dict()
    # Another number of classes makes another head: that one starts afresh.
    fitting = {k: v for k, v in weights.items() if k in own and v.shape == own[k].shape}
    net.load_state_dict(fitting, strict=False)


def _imported(arch, pretrained, image_size):
    if pretrained:
        raise ValueError(f"--pretrained is for torchvision's models: let {arch} load its weights")
    module, _, name = arch.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"cannot import --arch {arch}: {first_line(error)}") from None


def _torchvision(arch, pretrained, image_size):
    names = models.list_models(module=models)
    if arch not in names:
        choice = f"package.module:callable or one of {' '.join(names)}"
        raise ValueError(f"unknown --arch {arch}: give {choice}")
    options = {}
    if arch in ("googlenet", "inception_v3"):
        if pretrained:
            raise ValueError(f"the weights of {arch} expect pixels that were normalised otherwise")
        options = {"aux_logits": False, "init_weights": True}  # more heads would make it a tuple
    elif arch.startswith("vit_"):
        options = {"image_size": image_size}
    elif arch == "maxvit_t":
        options = {"input_size": (image_size, image_size)}
    return functools.partial(models.get_model, arch, **options)
