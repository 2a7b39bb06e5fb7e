"""Passes over loaders, as the events of a process show them: what was done with their items."""


def passes_of(events):
    """Each pass over a loader: its event "pass", and what was done with its items.

    items: of all its batches; read: how many batches; backwards: how often DDP's forward pass was
    followed by backward(): a process may call it more often without DDP, as an attack does; steps:
    of optimizers; last: the place of the event of its last batch; cut: --steps has ended it; over:
    the loader had no more; whole: all batches were read; forward: its first forward pass. It is
    "trained" if backward() was called in it, else "validated" if it was read without gradients, or
    a model was called so, or in eval mode. Of loaders that are zipped, backward() is in the pass
    that was read last; the others are read again after it. A validation is over before it, and so
    is a look at the first batch.
    """
    passes, now, backward = {}, None, -1  # the pass that was read last; the last backward()
    called = False  # DDP, since the last backward()
    for event in events:
        backward = event["place"] if event["kind"] == "backward" else backward
        if event["kind"] == "pass":
            new = {"items": [], "read": 0, "backwards": 0, "steps": 0, "forward": None}
            new |= {"cut": False, "over": False, "trained": False, "validated": False}
            passes[event["number"]] = event | new
        elif event["kind"] in ("cut", "over") and event["number"] in passes:
            passes[event["number"]][event["kind"]] = True
            passes[event["number"]]["trained"] |= is_zipped(passes[event["number"]], backward)
        elif event["kind"] == "batch" and event["number"] in passes:
            now = passes[event["number"]]
            now["trained"] |= is_zipped(now, backward)
            now["items"] += map(tuple, event["items"])
            now["read"] += 1
            now["last"] = event["place"]
            now["validated"] |= not event["grad"]
        elif now:
            # Read ahead, the last batch is used when the pass is over; another's is no part of it.
            if now["over"] and now["validated"] and event["kind"] == "backward":
                now = None
                continue
            now["steps"] += event["kind"] == "step"
            if event["kind"] == "forward":
                now["forward"] = now["forward"] or event
                called |= event["trains"] and event["synced"] is not None
            if event["kind"] == "backward":
                now["trained"] = True
                now["backwards"] += called
                called = False
            now["validated"] |= event["kind"] == "forward" and not event["trains"]
            now["validated"] |= event["kind"] == "validates"
    for one in passes.values():
        one["validated"] &= not one["trained"]
        one["whole"] = one["read"] == one["batches"]
    return [one for one in passes.values() if one["read"]]


def is_zipped(one, backward):
    """Whether a pass that is read again had a batch before the last backward(), with gradients."""
    return bool(one["read"]) and one["last"] < backward and not one["validated"]
