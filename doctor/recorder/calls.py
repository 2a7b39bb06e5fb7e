"""The calls of all ranks, side by side, group by group."""

import json
import re
from typing import NamedTuple

from ..events import is_users
from ..words import Said, say

# Calls to which each rank brings a tensor of the same size. Others may differ.
ALIKE = """all_reduce allreduce_coalesced broadcast reduce all_gather _all_gather_base gather
all_gather_into_tensor reduce_scatter _reduce_scatter_base""".split()


class Call(NamedTuple):
    group: str
    number: int  # of the collectives of the group, from 1; or of the messages
    name: str  # "all_reduce"
    sizes: str  # of what the rank brings, "[23818]"
    done: bool
    line: str  # "train.py:59" of the user's code, or ""
    backward: bool  # made in backward(): DDP's sum of gradients
    peers: tuple | None  # of a message: (from, to), numbers in the group

    def said(self) -> Said:
        words = say("its sum of gradients") if self.backward else self.name
        if self.line:
            return say("{call} {sizes} ({line})", call=words, sizes=self.sizes, line=self.line)
        return say("{call} {sizes}", call=words, sizes=self.sizes)


def calls_of(dump):
    """[Call] of one rank, in their order."""
    entries = sorted(dump["entries"], key=lambda entry: entry.get("record_id", 0))
    return [call_of(entry) for entry in entries]


def call_of(entry):
    backend, _, name = entry["profiling_name"].partition(":")
    if not name:
        backend, name = "", backend
    message = re.match(r"(send|recv) (\d+)(->|<-)(\d+)", name)
    peers = None
    if message:
        one, other = int(message[2]), int(message[4])
        peers = (one, other) if message[3] == "->" else (other, one)
        name = message[1]
    number = entry.get("p2p_seq_id" if message else "collective_seq_id") or 0
    sizes = entry.get("output_sizes" if name == "recv" else "input_sizes") or []
    # gloo's stay "scheduled"; with NCCL what is retired, but not completed, has timed out.
    done = entry.get("state") == "completed" or (backend == "gloo" and bool(entry.get("retired")))
    frames = entry.get("frames") or []
    mine = next((f for f in frames if is_users(f["filename"]) and "/" in f["filename"]), None)
    line = f"{mine['filename'].rpartition('/')[2]}:{mine['line']}" if mine else ""
    back = any(frame["filename"].endswith("torch/autograd/graph.py") for frame in frames)
    group = str((entry.get("process_group") or ["?"])[0])
    shown = ", ".join(map(str, sizes))
    return Call(group, number, name, shown, done, line, back and name == "all_reduce", peers)


class Group:
    """The calls of a process group."""

    def __init__(self, name, ranks, calls):
        self.name = name
        self.ranks = ranks  # all of its ranks, by their number in it
        self.calls = calls  # {rank: {number: Call}} of collectives
        self.messages = {}  # {rank: [Call]}

    def last(self, rank):
        return max(self.calls[rank], default=0)

    def row(self, number):
        """{rank: Call} of those that have made it, or None if it was forgotten by one."""
        if any(calls and number < min(calls) for calls in self.calls.values()):
            return None
        return {rank: calls[number] for rank, calls in self.calls.items() if number in calls}

    @property
    def numbers(self):
        return sorted({number for calls in self.calls.values() for number in calls})

    def count(self, rank, like, before):
        """How many calls like this one a rank has made before a number, of those it remembers."""
        calls = self.calls[rank]
        first = max(min(found, default=0) for found in self.calls.values())
        same = [c for n, c in calls.items() if first <= n <= before]
        return sum(
            (c.name, c.sizes, c.backward) == (like.name, like.sizes, like.backward) for c in same
        )


def groups_of(dumps):
    """[Group] of {rank: dump}: those in which more than one rank should be."""
    found, members = {}, {}
    for rank, dump in dumps.items():
        for name, known in (dump.get("pg_config") or {}).items():
            members.setdefault(name, ranks_in(known))
        for call in calls_of(dump):
            group = found.setdefault(call.group, Group(call.group, [], {}))
            group.calls.setdefault(rank, {})
            if call.peers:
                group.messages.setdefault(rank, []).append(call)
            else:
                group.calls[rank].setdefault(call.number, call)
    for group in found.values():
        # gloo's first group has no name in pg_config.
        group.ranks = members.get(group.name) or members.get("") or sorted(dumps)
        for rank in group.ranks:
            if rank in dumps:
                group.calls.setdefault(rank, {})
    return [group for group in found.values() if len(group.ranks) > 1]


def ranks_in(known):
    try:
        return json.loads(known["ranks"])
    except (ValueError, KeyError, TypeError):
        return []
