"""What is computed in a step: the loss, the gradients, collectives, what is drawn at random."""

from ..words import both, say
from . import Finding, judge

LIBRARIES = {"torch": "torch", "random": say("Python's random"), "numpy": "numpy"}


@judge("gradient", "the-loss-is-reduced-before-backward", certain=True, explains=["weights"])
def reduced_loss(row, run):
    """Certain where backward() brings another gradient than 1 to what was reduced.

    Where the sum is only added to a loss, each process's own part gets a gradient of 1: right.
    """
    text = say("backward() goes through what was reduced here, as if it had not been")
    place = None if row[0]["one"] else "all_reduce-of-a-ratios-sums"
    return Finding(row[0]["line"], text, place)


@judge("means", "a-mean-over-what-each-process-counts", certain=False)
def own_count(means, run):
    """A hint where most differ; a last batch may be shorter."""
    others = [row for row in means if not near(*(event["counted"] for event in row))]
    if len(others) > len(means) / 2:
        counts = both(f"{event['counted']:.6g}" for event in others[0])
        text = say("the means of the loss are over {counts} items", counts=counts)
        return Finding(others[0][0]["line"], text)


def near(*numbers):
    """Whether they are the same but for rounding: weights of classes are no whole numbers."""
    return max(numbers) - min(numbers) <= 1e-4 * max(map(abs, numbers))


@judge("clip", "clipped-before-unscale_", certain=True)
def clipped_scaled(row, run):
    """Certain between scale() and unscale_() of a scaler that is on."""
    if row[0]["scaled"]:
        text = say("the gradients are still scaled: call scaler.unscale_() first")
        return Finding(row[0]["line"], text)


@judge("schedule", "a-schedule-counted-in-one-processs-images", certain=False)
def own_schedule(row, run):
    """A hint, for such a length may be meant."""
    rates = [e["done"] for e in run[0].of("rate") if e["number"] == row[0]["number"]]
    done, length = max(rates, default=0), row[0]["length"]
    if done > 9 and run[0].end["error"] == "" and abs(length / done / len(run) - 1) < 0.05:
        text = say(
            "the schedule has {length} steps, and {done} were done", length=length, done=done
        )
        return Finding(row[0]["line"], text)


@judge("run", "the-same-seed-everywhere", certain=False)
def same_seed(run):
    """A hint, for what is drawn may be meant to be the same. Only where a step has drawn some."""
    drawn = [library for library in LIBRARIES if drawn_alike(run, library)]
    if drawn:
        line = (run[0].of("seed") or run[0].of("step"))[-1]["line"]
        text = say("all processes draw the same random numbers")
        if drawn != ["torch"]:
            of = both(LIBRARIES[one] for one in drawn)
            text = say("all processes draw the same random numbers of {libraries}", libraries=of)
        return Finding(line, text)


def drawn_alike(run, library):
    """Whether all processes drew the same numbers between two steps of a pass, or for its items."""
    tables = [states_in_passes(process, library) for process in run]
    for states in zip(*tables, strict=False):
        same = all(state == states[0] for state in states)
        if same and len({*states[0]}) > 1:
            return True
    # Workers of a loader are seeded by a number that their process draws.
    in_workers = all(any(e["of"] == library for e in process.of("drew")) for process in run)
    rows = run.rows("step")
    return in_workers and bool(rows) and all(not differ_in(row, "torch") for row in rows)


@judge("run", "every-process-reads-all-images", certain=False)
def same_inputs(run):
    """A hint where no loader was seen, and the models are given the same, each time something else.

    What a script reads by itself it may share out in the model, or later.
    """
    given = [[e for e in p.of("forward") if e["trains"] and e["given"]] for p in run]
    rows = [*zip(*given, strict=False)]
    seen = {str(row[0]["given"]) for row in rows}
    alike = all(event["given"] == row[0]["given"] for row in rows for event in row)
    if len(seen) < 2 or not alike or run.divided() or any(process.passes for process in run):
        return None
    text = say("all processes give the model the same items: does each read a part of its own?")
    return Finding(rows[0][0]["line"], text)


def differ_in(row, library):
    return len({event["random"].get(library) for event in row}) > 1


def states_in_passes(process, library):
    """For each pass: the states of a library's random numbers at its steps.

    Without a loader: those of all steps, where most have drawn some.
    """
    passes, states = [], []
    for event in process.of("step", "pass"):
        if event["kind"] == "pass":
            passes.append(states := [])
        elif library in event["random"]:
            states.append(event["random"][library])
    if not passes and len({*states}) > len(states) / 2:
        passes = [states]
    return passes


@judge("unwaited", "doctor.md#a-result-is-read-too-early", certain=True)
def unwaited(row, run):
    """Certain where a number was read before wait() was called; else it may not be needed."""
    read = row[0]["read"]
    text = say("async_op=True, and the process has ended before wait() was called")
    if read:
        text = say("async_op=True, and the result is read before wait() was called")
    return Finding(row[0]["line"], text, certain=read)


@judge("run", "doctor.md#the-gradients-are-averaged-twice", certain=False)
def averaged_twice(run):
    """A hint: a mean of equal numbers changes nothing, a sum is wrong."""
    for event in run[0].of("collective"):
        if event["gradients"] == "wrapped":
            text = say("DDP has averaged these gradients already: a sum makes them larger")
            return Finding(event["line"], text)


@judge("run", "doctor.md#the-processes-do-not-do-the-same", certain=True)
def other_shapes(run):
    """Certain: gloo and NCCL take a number of bytes, whatever the others send."""
    for row in zip(*(whole(process) for process in run), strict=False):
        calls = {(event["line"], event["name"]) for event in row}
        shapes = [event["shape"] for event in row]
        needs_one = row[0]["name"] not in ("broadcast", "all_to_all", "all_to_all_single")
        if len(calls) == 1 and needs_one and any(shape != shapes[0] for shape in shapes):
            said = both(shape and shape[1:] for shape in shapes)
            text = say(
                "{name} is given tensors of shape {shapes}", name=row[0]["name"], shapes=said
            )
            return Finding(row[0]["line"], text)


@judge("run", "doctor.md#the-processes-do-not-do-the-same", certain=True)
def order_of_a_set(run):
    """Certain where strings have other hashes: forks of one process have the same order."""
    hashes = {event["hash"] for process in run for event in process.of("began")}
    for event in run[0].of("collective"):
        if event["set"] and event["whole"]:
            text = say(
                "the order of this set may be another in each process, and it calls "
                "{name}(): sort it",
                name=event["name"],
            )
            return Finding(event["set"], text, certain=len(hashes) > 1)


def whole(process):
    """Its collectives among all processes, of tensors."""
    return [event for event in process.of("collective") if event["whole"] and event["shape"]]
