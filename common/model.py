"""The model that --arch names, checked before training starts."""

import contextlib
import copy
import functools
import importlib

import torch
from torch.utils._pytree import tree_map
from torchvision import models

from .errors import first_line, time_limit


def build_model(args, num_classes, device, local_batch_size=None, example=None):
    """The module that args.arch names, on `device`, in train mode, with `num_classes` outputs.

    args.arch is a classification model of torchvision, or package.module:callable, which is called
    with num_classes=. It is tried on `example`, a batch of one of what it takes; without one, on an
    image of args.image_size x args.image_size. With a local_batch_size of 1 a training step is
    tried too. Raises ValueError for an unknown model, and for one that does not turn the example
    into one row of class scores. Ends the process where a GPU does not answer within
    args.dist_timeout seconds, or 600 where a script has no such flag.
    """
    make = _imported if ":" in args.arch else _torchvision
    make = make(args.arch, args.pretrained, args.image_size)
    size = f"--image-size {args.image_size}" if example is None else "the example"
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        if example is None:
            example = torch.zeros(1, 3, args.image_size, args.image_size)
            example = example.contiguous(memory_format=torch.channels_last)
        net = make(num_classes=num_classes)
        with _gpu_limit(device, args), torch.no_grad():
            example = tree_map(lambda tensor: tensor.to(device), example)
            net = net.to(device)
            if not any(weight.ndim == 5 for weight in net.parameters()):  # convolutions over video
                net = net.to(memory_format=torch.channels_last)
            output = net.eval()(example)
            if local_batch_size == 1 and not vars(args).get("sync_bn"):
                size = f"{size} with one image per process"  # BatchNorm may need two
                copy.deepcopy(net).train()(example)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # else it shows later that a GPU fails or hangs
    except Exception as error:
        reason = first_line(error)
        if "CUDA" in reason or "cuDNN" in reason:  # such as a GPU that others have filled
            raise ValueError(f"{device} cannot run {args.arch}: {reason}") from None
        if not isinstance(error, (RuntimeError, ValueError, AssertionError)):
            reason = f"{type(error).__name__}: {reason}"  # such as a name that is not defined
        raise ValueError(f"{args.arch} cannot take {size}: {reason}") from None
    finally:
        # It tries every algorithm for every shape: seconds, and these shapes do not come again.
        torch.backends.cudnn.benchmark = benchmark
    if getattr(output, "shape", None) != (1, num_classes):
        got = tuple(output.shape) if torch.is_tensor(output) else f"a {type(output).__name__}"
        raise ValueError(f"{args.arch} gives {got} for one image, not scores [1, {num_classes}]")
    if args.pretrained:
        _load_weights(net, args.arch)
    return net.train()


def _gpu_limit(device, args):
    if device.type != "cuda":
        return contextlib.nullcontext()  # a large model takes its time
    seconds = vars(args).get("dist_timeout", 600)
    return time_limit(seconds, f"{device} has not answered for {seconds} s: it waits as above")


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
