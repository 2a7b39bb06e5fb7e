"""Judged first: what each rank does by itself. One is gone, one works, one reads data."""

from ..words import say
from . import places
from .judges import judge
from .words import Answer, at, names, of, they, unknown, waiting, where


@judge
def cannot_see(sight):
    """Nothing is said of ranks that could not be read, nor why the others wait."""
    closed, left = sight.that("unread"), waiting(sight)
    if not closed:
        return None
    text = say("{ranks} could not be read", ranks=of(closed))
    if left:
        text = say(
            "{text}; {they_wait}, perhaps for it: {where}",
            text=text,
            they_wait=they(left, "waits"),
            where=where(left),
        )
    return Answer(text, "doctor.md#a-job-that-hangs-now", hangs=bool(left))


@judge
def one_is_stopped(sight):
    held = sight.that("stopped")
    if not held:
        return None
    pids = " ".join(str(one["pid"]) for one in held)
    text = say(
        "{they_are} stopped, by SIGSTOP or a debugger: `kill -CONT {pids}`",
        they_are=they(held, "is"),
        pids=pids,
    )
    return Answer(text, "doctor.md#a-job-that-hangs-now")


@judge
def one_is_gone(sight):
    left = waiting(sight)
    if not sight.gone or not left:
        return None
    text = say(
        "{they_are} gone, ended or killed: {others_wait} in vain. Look at the end "
        "of its output; without an error there, `dmesg` says whether the kernel "
        "killed it for memory",
        they_are=they(sight.gone, "is"),
        others_wait=they(left, "waits"),
    )
    return Answer(text, "bugs.md#rank-0-stops-early", at(left[0]))


@judge
def in_the_debugger(sight):
    held = sight.that("stands", "debugger")
    if held:
        text = say(
            "{they_wait} for your words in the debugger, and the others for it",
            they_wait=they(held, "waits"),
        )
        return Answer(text, "debugging.md#stop-in-a-line", at(held[0]))
    return None


@judge
def all_work(sight):
    if waiting(sight) or sight.that("stands"):
        return None
    text = say(
        "{ranks} moved or computed between the looks: it does not hang", ranks=of(sight.ranks)
    )
    return Answer(text, "doctor.md#a-job-that-hangs-now", hangs=False)


@judge
def on_its_processor(sight):
    """On a GPU's machine one that only waits for the GPU is as busy: it may compute, or not."""
    busy = [one for one in sight.that("stands") if one["gpu"] and one["busy"]]
    busy = [one for one in busy if one["kind"] not in {*places.WAITS, "loader"}]
    if not busy:
        return None
    text = say(
        "{they_compute} at {line}, or a GPU does: no hang by now. Look again, with --seconds 60",
        they_compute=they(busy, "computes"),
        line=at(busy[0]),
    )
    return Answer(text, "doctor.md#a-job-that-hangs-now", at(busy[0]), hangs=False)


@judge
def some_do_not_come(sight):
    joins = sight.that("stands", "join")
    others = [one for one in sight.ranks if one not in joins]
    size = max(one["size"] or 0 for one in sight.ranks)
    if not joins or unknown(sight) or any(one["state"] == "works" for one in others):
        return None
    if others:
        text = say(
            "{they_wait} in init_process_group, and {others}: not all come to it",
            they_wait=they(joins, "waits"),
            others=where(others),
        )
    else:
        text = say(
            "all {here} ranks that are here wait in init_process_group for {size} "
            "ranks: are all started, with the same MASTER_ADDR, MASTER_PORT and "
            "WORLD_SIZE?",
            here=len(joins),
            size=size,
        )
    return Answer(text, "faq.md#starting", at(joins[0]))


@judge
def waits_for_data(sight):
    """A loader whose workers give nothing, or a data set that is read in the rank itself."""
    reads = sight.that("stands", "loader", "data")
    if not reads or any(one["times"] < 2 for one in reads):
        return None
    one = reads[0]
    text = say("{they_wait} for data at {line}", they_wait=they(reads, "waits"), line=at(one))
    workers = [worker for rank in reads for worker in rank["workers"]]
    busy = [worker for worker in workers if worker["busy"]]
    for worker in [worker for worker in busy or workers if worker["line"]][:2]:
        known = {"text": text, "pid": worker["pid"], "line": at(worker)}
        text = say("{text}; its worker {pid} stands at {line}", **known)
        if busy:
            text = say("{text}; its worker {pid} is at {line}", **known)
        if worker["disk"]:
            text = say("{text}, waiting for a disk", text=text)
        text = with_code(text, worker["text"])
    if one["kind"] == "loader" and not one["children"]:
        text = say("{text}; it has no worker that lives", text=text)
    elif one["kind"] == "loader" and not one["workers"]:
        text = say(
            "{text}; no worker was found among its processes ({count})",
            text=text,
            count=one["children"],
        )
    others = waiting(sight)
    if others:
        text = say("{text}; {they_wait} for it", text=text, they_wait=they(others, "waits"))
    if any(worker["starts"] for worker in busy):
        text = say("{text}: its workers still start", text=text)
    elif busy:
        text = say("{text}: its workers compute, a slow loader", text=text)
    return Answer(text, "debugging.md#who-waits-where", at(one), hangs=not busy)


def with_code(text, code):
    return say("{text} `{code}`", text=text, code=code) if code else text


@judge
def they_wait_for_one_that_works(sight):
    """A healthy wait: an epoch's last batch, a checkpoint, the first download."""
    busy, left = sight.that("works"), waiting(sight)
    if not busy:
        return None
    known = {"they_work": they(busy, "works"), "line": at(busy[-1])}
    if not left:
        others = sight.that("stands")
        text = say("{they_work} (last seen at {line}): no hang by now", **known)
        if others:
            text = say(
                "{they_work} (last seen at {line}), and {others}: no hang by now",
                **known,
                others=where(others),
            )
        return Answer(text, "doctor.md#a-job-that-hangs-now", at(busy[0]), hangs=False)
    text = say(
        "{they_work} (last seen at {line}), {others_wait} for it: no hang by now. "
        "Look again, with --seconds 60",
        **known,
        others_wait=they(left, "waits"),
    )
    slow = [one for one in busy if one["kind"] in ("loader", "data") and one["times"] > 2]
    if slow and left:
        text = say(
            "{they_read} data in most looks ({line}), {others_wait}: a slow loader",
            they_read=they(slow, "reads"),
            line=at(slow[0]),
            others_wait=they(left, "waits"),
        )
        return Answer(text, "debugging.md#who-waits-where", at(slow[0]), hangs=False)
    if busy[0]["under"]:
        text = say(
            "{text}, {ranks} under `{condition}`",
            text=text,
            ranks=names([busy[0]["rank"]]),
            condition=busy[0]["under"],
        )
    return Answer(text, "doctor.md#a-job-that-hangs-now", at(busy[0]), hangs=False)
