"""What one process has surely done before another one does something."""

import math

# In which a process meets all others.
MEETS = ("group", "wrap", "collective", "backward")


def in_order(links, one, other):
    """Whether one event, as (rank, event), always comes before another one, or after it.

    Also where it is not known, as of a key of a store that is set more than once.
    """
    return comes_before(links, one, other) or comes_before(links, other, one)


def comes_before(links, one, other):
    rank, event = one
    known = {rank: event["place"]}  # rank: the place from which on it comes after the event
    todo = [rank]
    while todo:
        rank = todo.pop()
        for place, peer, there in links[rank]:
            if place > known[rank] and there < known.get(peer, math.inf):
                known[peer] = there
                todo.append(peer)
    rank, event = other
    return known.get(rank, math.inf) < event["place"]


def links(run):
    """{rank: [(place, other rank, place there)]}: what comes before it comes before that there."""
    found = {rank: [] for rank in range(len(run))}
    pairs = [(a, b) for a in found for b in found if a != b]
    for a, b in pairs:
        met = zip(run[a].of(*MEETS), run[b].of(*MEETS), strict=False)
        sent = zip(with_peer(run[a], "sends", b), with_peer(run[b], "receives", a), strict=False)
        found[a] += [(one["place"], b, other["place"]) for one, other in [*met, *sent]]
        heard = {}
        for event in reversed(run[b].of("store")):
            if event["hears"]:
                heard |= {last(key): event["place"] for key in event["keys"]}
        for event in run[a].of("store"):
            keys = {*map(last, event["keys"])} if event["tells"] else set()
            found[a] += [(event["place"], b, heard[key]) for key in keys & heard.keys()]
    return found


def with_peer(process, kind, rank):
    return [event for event in process.of(kind) if event["peer"] in (rank, None)]


def last(key):
    """A PrefixStore adds a prefix to it."""
    return key.rpartition("/")[2]
