"""The model that --arch names, checked before training starts."""

import importlib

import torch
from torchvision import models

from .errors import first_line


def build_model(args, num_classes, device):
    """The module that args.arch names, on `device` in channels_last, with `num_classes` outputs.

    args.arch is a classification model of torchvision, or package.module:callable, which is called
    with num_classes=. Raises ValueError for an unknown one, and for one that does not turn an image
    of args.image_size x args.image_size into one row of class scores.
    """
    arch, image_size = args.arch, args.image_size
    if ":" in arch:
        net = _own(arch, args.pretrained)(num_classes=num_classes)
    else:
        net = _torchvision(arch, num_classes, args.pretrained, image_size)
    net = net.to(device, memory_format=torch.channels_last)
    image = torch.zeros(1, 3, image_size, image_size, device=device)
    try:
        with torch.no_grad():
            output = net.eval()(image.contiguous(memory_format=torch.channels_last))
    except Exception as error:
        reason = first_line(error)
        raise ValueError(f"{arch} cannot take --image-size {image_size}: {reason}") from None
    if getattr(output, "shape", None) != (1, num_classes):
        got = tuple(output.shape) if torch.is_tensor(output) else f"a {type(output).__name__}"
        raise ValueError(f"{arch} gives {got} for one image, not scores [1, {num_classes}]")
    return net


def _own(arch, pretrained):
    if pretrained:
        raise ValueError(f"--pretrained is for torchvision's models: let {arch} load its weights")
    module, _, name = arch.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import --arch {arch}: {error}") from None


def _torchvision(arch, num_classes, pretrained, image_size):
    names = models.list_models(module=models)
    if arch not in names:
        raise ValueError(
            f"unknown --arch {arch}: give package.module:callable or one of {' '.join(names)}"
        )
    options = {}
    if arch in ("googlenet", "inception_v3"):
        # Their two more heads make a tuple of the output.
        options = {"aux_logits": False, "init_weights": True}
        if pretrained:
            raise ValueError(f"the weights of {arch} expect pixels that were normalised otherwise")
    elif arch.startswith("vit_"):
        options = {"image_size": image_size}
    elif arch == "maxvit_t":
        options = {"input_size": (image_size, image_size)}
    try:
        net = models.get_model(arch, num_classes=num_classes, **options)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{arch} cannot take --image-size {image_size}: {error}") from None
    if pretrained:
        weights, own = models.get_model_weights(arch).DEFAULT.get_state_dict(), net.state_dict()
        # Another number of classes makes another head: that one starts afresh.
        fitting = {k: v for k, v in weights.items() if k in own and v.shape == own[k].shape}
        net.load_state_dict(fitting, strict=False)
    return net
