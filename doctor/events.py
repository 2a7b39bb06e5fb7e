"""The events that are recorded: their fields, note(), the user's line; checksums of tensors.

Every event also has "line", the line of the user's code in which it was noted, as "train.py:48".
"""

import functools
import json
import os
import re
import sys
import threading

from .files import hosts

# Each kind, and its fields.
FIELDS = {
    # ---- Processes and groups
    # the script begins; gpus: how many this process sees; hash: of a string, to which the order of
    # a set of strings belongs
    "began": "gpus hash",
    # init_process_group() is called with a rank, below a launcher that has set RANK to `number`
    "joins": "rank number",
    "group": "rank local world_size",  # init_process_group() has ended; local: LOCAL_RANK
    "shards": "weights",  # fully_shard() is about to divide these: sums by name
    # A group of some of the processes is used, or a mesh was made that divides them, see groups.py;
    # size: how many it has
    "part": "size",
    # These ranks compute one model together: of: "layer", parts of each, or "pipeline", its stages
    "together": "of ranks",
    "join": "",  # torch's Join() begins: parts of unlike length are meant
    "joined": "",  # it has ended
    "spawns": "",  # a process of the launcher is about to start processes of its own
    "asks": "told",  # the script asked whether there is a GPU; told: that there is one
    "names a gpu": "",  # the first line that did so where there is none
    # where: what it waits in, or None; computes: it, and busy: or it waits for a loader's worker;
    # times: how often it has said so without another event between
    "stands": "where busy computes outside times",
    "end": "error frozen outside",  # of the script; error: "" if it ended well
    "fault": "error",  # of the doctor itself
    # ---- Collectives. shape: of the tensor; number: its sum, of a small one outside of autograd;
    # changes: how often it was changed in place; gradients: "wrapped" or "own" if it is that of a
    # weight, see optimizers.gradient_of(), or None; optimizers: the numbers of those that have it;
    # whole: among all processes; known: the line that has read what such a small tensor held, or
    # None; set: the line of a loop over a set of strings, in which it is called, or None
    "collective": "name shape number changes gradients optimizers whole known set",
    # A process sends to another one, or has got what it sends; peer: its rank, or None if not known
    "sends": "peer",
    "receives": "peer",
    # A method of a Store, as TCPStore's get(). hears: it may wait until another process tells it
    "store": "keys tells hears",
    "sum read": "",  # the result of an all_reduce() at this line was read, too
    "gradient": "one",  # a backward pass went through what all_reduce() changed in place
    "unwaited": "read",  # async_op=True, and read (or never) before wait() was called
    # ---- Models
    "wrap": "frozen",  # DDP has wrapped a model; frozen: names of weights without a gradient
    "synced": "",  # SyncBatchNorm was asked for, where there is no GPU
    # training: its mode; modes: see models.modes(); sends: DDP sends its buffers before; synced: it
    # averages the gradients, None without DDP; given: sums of what the model is given, in the first
    # passes, or None
    "forward": "trains training wrapped modes sends synced given",
    "backward": "",
    # The first pass of a model without gradients since a step that was looked at: sums of its
    # tensors by name.
    "validates": "training weights buffers wrapped modes",
    # ---- Training
    # weights: sums of those that DDP has wrapped, as "MODEL.NAME"; order: what was done since the
    # last step, by model; own: sums of weights that DDP does not know, ours: their number;
    # parts: sums of what this process has of divided weights, by name and place in them; random:
    # states by library; zeroed: calls of zero_grad(); squares: the sum of squared gradients, of
    # plain weights and of divided ones, in the first three steps
    "step": "weights own parts order lr random zeroed optimizer ours squares",
    # The script's end, or its group's: the same sums, of models that nobody has changed since their
    # last step.
    "last": "weights order",
    "mean": "counted",  # a mean of a loss, over so many numbers
    # Gradients are clipped. scaled: by a GradScaler, until unscale_(); norm: the largest, or None
    "clip": "scaled norm",
    "schedule": "number length",
    "rate": "number done",  # a schedule's step
    "plateau": "value",
    "seed": "seed",
    # ---- Data
    # A pass over a DataLoader. number: of the pass; loader: its own; made, sampler: the lines where
    # the loader and its sampler were made; batches, length, size, base: lengths of the loader, the
    # sampler, the data, and of what is below all Subsets, None of a stream; classes: names by
    # number, or None; padding: how many items the sampler repeats; trims: Accelerate cuts those
    # off; drops: drop_last; told: whether set_epoch() was called since the pass before, None of a
    # sampler of the script's own, which has it; the others are the sampler's.
    "pass": "number loader made batches workers size base sampler length seed epoch rank "
    "num_replicas shuffle padding trims drops stream classes told",
    # items: [name, sum of the label, sum of the image] each; grad: read with gradients enabled
    "batch": "number items grad",
    "cut": "number",  # --steps ended the pass
    "over": "number",  # the loader has no more batch
    "drew": "of",  # a worker of a loader drew random numbers of this library for an item
    # ---- Files
    "save": "path of_wrapped parts",  # parts: of tensors that FSDP has divided
    "writes": "path",  # a file is opened that is emptied first, or written by another library
    # waits: whether the script has a wait of its own, which torch does not see
    "load": "path waits",
    "prints": "words numbers",  # a line with numbers; words: what is between them
    "above 100 %": "",  # printed
}
FIELDS = {kind: frozenset(names.split()) for kind, names in FIELDS.items()}


FORWARD = "the forward pass of DDP"  # what may wait there, in words
# Calls that wait for one other process, and are not collectives.
MESSAGES = "send recv isend irecv batch_isend_irecv send_object_list recv_object_list".split()


class Record:
    """A file of events, each written at once: what was seen outlives a crash."""

    pid = None
    gpus = False  # whether the script is told that there are GPUs, where there are none

    def __init__(self):  # the settings of launch.examine()
        self.__dict__ |= json.loads(os.environ.get("DOCTOR", "{}"))

    def open(self):
        self.pid, self.count = os.getpid(), 0
        self.path = f"{self.folder}/{hosts.who()}.jsonl"
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115
        self.ended = threading.Event()


RECORD = Record()
HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = ("<", os.path.dirname(os.__file__) + os.sep, HERE + os.sep)


def note(kind, **facts):
    """Write an event, with the line of the user's code in which it is; returns it.

    line: that line, where it is of something that happened before.
    """
    if facts.keys() - {"line"} != FIELDS[kind]:
        raise TypeError(f"{kind} has the fields {sorted(FIELDS[kind])}, not {sorted(facts)}")
    event = {"kind": kind, "line": users_line(sys._getframe(1))} | facts
    if os.getpid() == RECORD.pid:  # not in the workers of a loader
        RECORD.count += 1
        RECORD.file.write(json.dumps(event) + "\n")
    return event


def note_in_worker(kind, **facts):
    """Write an event of a loader's worker, which was forked, into the file of its process."""
    with open(RECORD.path, "a") as file:
        file.write(json.dumps({"kind": kind, "line": "?"} | facts) + "\n")


@functools.cache
def is_users(file):
    return not file.startswith(LIBRARIES) and not re.search(r"(site|dist)-packages", file)


@functools.cache
def short(file):
    return os.path.relpath(file, os.path.dirname(RECORD.script))


def users_line(frame=None):
    """The innermost line of the user's own code, as "train.py:48"; frame: by default, from here."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"


def sum_as_text(tensor):
    """What its numbers add up to."""
    torch = sys.modules["torch"]
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return str(tensor.sum(dtype=torch.float64).item())


def checksum(tensor):
    """The same for the same bits, in any memory format: their sum as integers, which may overflow.

    A fifth of the time of sum_as_text(): weights are looked at before each of the first steps.
    """
    whole = as_integers(tensor.detach())
    if whole is None:
        return sum_as_text(tensor)
    torch = sys.modules["torch"]
    kind = torch.int64 if whole.element_size() == 8 else torch.int32
    return str(whole.sum(dtype=kind).item())


def checksums(batch):
    """checksum() of each item, in one call."""
    whole = as_integers(batch.detach())
    if whole is None or not whole.numel():
        return [*map(sum_as_text, batch)]
    rows = whole.reshape(len(batch), -1).sum(1, dtype=sys.modules["torch"].int64)
    return [*map(str, rows.tolist())]


def as_integers(tensor):
    """Its memory as whole numbers; None of a tensor whose memory is not its numbers in a row."""
    torch = sys.modules["torch"]
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    known = not tensor.is_quantized and tensor.layout is torch.strided
    kind = kinds.get(tensor.element_size()) if known else None
    return kind and tensor.view(kind)


def is_plain(tensor):
    """False for a DTensor, of which each process has a part: to add that up is a collective."""
    return not hasattr(tensor, "placements")
