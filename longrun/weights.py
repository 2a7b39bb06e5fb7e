"""The weights that a model starts from with --pretrained: torchvision's, or those in a file."""

import argparse
import os
import pickle
import re
import zipfile
from collections import Counter

import torch
from torchvision import models

from .checkpoint import KEYS, check_whole
from .locks import locked_if_possible
from .messages import first_line, print_if_possible

# Where others keep the weights in their checkpoints. Averaged ones come first: these were scored.
PLACES = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "net")
WRAPPERS = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
# What torchvision has renamed, but not in its files.
RENAMED = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


def load_pretrained(net, checkpoints):
    """Fill `net` with the weights that args.pretrained asks for, and say on rank 0 which they are.

    args.pretrained: True for torchvision's, the path of a file, or None. A head for another number
    of classes stays as it is. Nothing is done where `checkpoints` has one to restore: it has all.
    Raises ValueError for weights that cannot be read or do not fit: more than a tenth is missing or
    left over, or a layer has another size; and where there is nothing to evaluate. OSError for what
    cannot be read.
    """
    args, num_classes = checkpoints.args, len(checkpoints.classes)
    if checkpoints.path:
        return
    if not args.pretrained:
        if args.evaluate and ":" not in args.arch:  # a model of your own may load its weights
            raise ValueError("nothing to evaluate: give --resume PATH or --pretrained")
        return
    if args.pretrained is True:
        path, remedy = download_torchvision(args, num_classes)
    else:
        path, remedy = args.pretrained, "another --arch, or another --image-size?"
    held = read_file(path)
    place, tensors = find_weights(held)
    new, told = fill(net, tensors, num_classes, f"{path}{place and f' ({place})'}", remedy)
    if (
        held.keys() >= KEYS and held["classes"] != checkpoints.classes
    ):  # a checkpoint of these scripts
        new = new or ["the names of the classes"]
        told += "; it was trained on other classes"
    if args.evaluate and new:
        raise ValueError(f"{path} has no weights for these {num_classes} classes: train it first")
    if checkpoints.rank == 0:
        print_if_possible(told)


def download_torchvision(args, num_classes):
    """(path, remedy): where torchvision keeps its weights of args.arch, downloaded if need be."""
    arch = args.arch
    if ":" in arch:
        raise ValueError(f"--pretrained is for torchvision's models: give {arch} --pretrained FILE")
    weights = models.get_model_weights(arch).DEFAULT
    known = len(weights.meta["categories"])
    if args.evaluate and num_classes != known:
        raise ValueError(f"--pretrained is of {known} classes, not {num_classes}: train it first")
    folder, name = os.path.join(torch.hub.get_dir(), "checkpoints"), os.path.basename(weights.url)
    path, checksum = os.path.join(folder, name), re.search(r"-([a-f0-9]+)\.", name)
    try:
        os.makedirs(folder, exist_ok=True)
        # One process of a node downloads, the others wait.
        with locked_if_possible(os.path.join(folder, f"{arch}.lock")):
            if not os.path.exists(path):
                torch.hub.download_url_to_file(weights.url, path, checksum and checksum[1])
    except Exception as error:  # of many types
        remedy = f"without internet, put {name} into {folder}, from {weights.url}"
        reason = f"{first_line(error)}: {remedy}, or give --pretrained FILE"
        raise ValueError(f"cannot download the weights of {arch}: {reason}") from None
    return path, f"they are for --image-size {weights.meta['min_size'][0]}"


def read_file(path):
    """What is in a file of weights, a dict, on the CPU. No code in it is run."""
    if not os.path.isfile(path):
        raise ValueError(f"--pretrained: no file {path}")
    try:
        if path.endswith(".safetensors"):
            try:
                from safetensors.torch import load_file
            except ImportError:
                raise ValueError("python -m pip install safetensors") from None
            return load_file(path)
        with open(path, "rb") as file:
            if zipfile.is_zipfile(file):  # else torch's format before 2020, or something else
                check_whole(file)
            file.seek(0)
            # Checkpoints of timm and others hold their flags as a Namespace: it has no code.
            with torch.serialization.safe_globals([argparse.Namespace]):
                held = torch.load(file, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # of many types
        reason = first_line(error).partition(". ")[0]
        if isinstance(error, pickle.UnpicklingError):  # its text is advice to run the code in it
            reason = "no file of torch.save(), or damaged"
        if code := re.search(r"GLOBAL ([\w.]+) was not", str(error)):
            reason = f"it holds a {code[1]}: where it was made, save net.state_dict() alone"
        raise ValueError(f"cannot read {path}: {reason}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds a {type(held).__name__}, no weights")
    return held


def find_weights(held):
    """(place, tensors): the entry of a checkpoint that has the weights, "" for all; by name."""
    place = ""
    while found := [name for name in PLACES if isinstance(held.get(name), dict)]:
        place = found[0]
        held = held[place]
    tensors = {str(name): x for name, x in held.items() if torch.is_tensor(x)}
    return place, {WRAPPERS.sub("", name): x for name, x in tensors.items()}


@torch.no_grad()
def fill(net, tensors, num_classes, source, remedy):
    """Copy tensors into `net`; returns the names of those that it still lacks, and what to say."""
    ours = {name: x for name, x in net.state_dict().items() if torch.is_tensor(x)}
    for pattern, replacement in RENAMED:
        tensors = {k if k in ours else pattern.sub(replacement, k): x for k, x in tensors.items()}
    prefix = find_prefix(tensors, ours, source)
    tensors = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}

    # Files from before torch 0.4.1 do not count batches, and nothing needs that number.
    needed = [name for name in ours if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name not in tensors]
    left = [name for name in tensors if name not in ours]
    if len(missing) > len(needed) / 10 or len(left) > len(tensors) / 10:
        wrong = listed("it lacks", missing) + listed("it has also", left)
        raise ValueError(f"{source} is of another model than this of {len(needed)} tensors{wrong}")
    head = []
    for name in ours.keys() & tensors.keys():
        mine, its = list(ours[name].shape), list(tensors[name].shape)
        if mine[1:] == its[1:] and mine[:1] == [num_classes] != its[:1]:
            head.append(name)
        elif mine != its:
            raise ValueError(f"{source}: {name} is {its} there and {mine} here: {remedy}")
    for name in ours.keys() & tensors.keys() - {*head}:
        ours[name].copy_(tensors[name])
    told = f"weights of {source}: {len(tensors) - len(left) - len(head)} tensors"
    if prefix:
        told += f" below {prefix}"
    new = listed(f"new, for {num_classes} classes", sorted(head)) + listed("it lacks", missing)
    return head + missing, told + new + listed("it has also", left)


def find_prefix(tensors, ours, source):
    """What stands before the names in a file, such as module. or model. of Lightning; or ""."""
    prefixes = Counter()
    for name in tensors:
        for start in [0, *(dot.end() for dot in re.finditer(r"\.", name))]:
            prefixes[name[:start]] += name[start:] in ours
    (prefix, count), (other, more) = [*prefixes.most_common(2), ("", 0), ("", 0)][:2]
    if count == more > len(ours) / 2:
        places = f"{prefix} and {other}"
        raise ValueError(f"{source} has two such models, {places}: save the state_dict of one")
    return prefix


def listed(what, names):
    """ "; what: a, b, c and 7 more" for a line; "" for no names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; {what}: {', '.join(names[:3])}{more}" if names else ""
