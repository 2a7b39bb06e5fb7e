"""What is judged of a job that was looked at. The first judge that answers tells it."""

from .words import Finding, at, by_place, names, of, they, waiting, where

JUDGES = []
STANDS = "doctor.md#it-stands-still"


def judge(ask):
    JUDGES.append(ask)
    return ask


def findings(sight):
    """[Finding]: what explains most, or that nothing hangs."""
    return [next(filter(None, (ask(sight) for ask in JUDGES)))]


@judge
def cannot_see(sight):
    """Nothing is said of ranks that could not be read, nor why the others wait."""
    closed, left = sight.that("unread"), waiting(sight)
    if not closed:
        return None
    text = f"{of(closed)} could not be read"
    text += f"; {they(left, 'waits')}, perhaps for it: {where(left)}" if left else ""
    return Finding(text, "doctor.md#a-job-that-hangs-now", hangs=bool(left))


@judge
def one_is_stopped(sight):
    held = sight.that("stopped")
    if not held:
        return None
    pids = " ".join(str(one["pid"]) for one in held)
    text = f"{they(held, 'is')} stopped, by SIGSTOP or a debugger: `kill -CONT {pids}`"
    return Finding(text, "doctor.md#a-job-that-hangs-now")


@judge
def one_is_gone(sight):
    left = waiting(sight)
    if not sight.gone or not left:
        return None
    text = (
        f"{they(sight.gone, 'is')} gone, ended or killed: {they(left, 'waits')} in vain. Look at "
    )
    text += "the end of its output; without an error there, `dmesg` says whether the kernel killed "
    text += "it for memory"
    return Finding(text, "bugs.md#rank-0-stops-early", at(left[0]))


@judge
def in_the_debugger(sight):
    held = sight.that("stands", "debugger")
    if held:
        text = f"{they(held, 'waits')} for your words in the debugger, and the others for it"
        return Finding(text, "debugging.md#stop-in-a-line", at(held[0]))
    return None


@judge
def all_work(sight):
    if waiting(sight) or sight.that("stands"):
        return None
    text = f"{of(sight.ranks)} moved or computed between the looks: it does not hang"
    return Finding(text, "doctor.md#a-job-that-hangs-now", hangs=False)


@judge
def some_do_not_come(sight):
    joins = sight.that("stands", "join")
    others = [one for one in sight.ranks if one not in joins]
    size = max(one["size"] or 0 for one in sight.ranks)
    if not joins or any(one["state"] == "works" for one in others):
        return None
    if others:
        text = (
            f"{they(joins, 'waits')} in init_process_group, and {where(others)}: not all come to it"
        )
    else:
        text = f"all {len(joins)} ranks that are here wait in init_process_group for {size} ranks"
        text += ": are all started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
    return Finding(text, "faq.md#starting", at(joins[0]))


@judge
def waits_for_data(sight):
    """A loader whose workers give nothing, or a data set that is read in the rank itself."""
    reads = sight.that("stands", "loader", "data")
    if not reads or any(one["times"] < 2 for one in reads):
        return None
    one = reads[0]
    text = f"{they(reads, 'waits')} for data at {at(one)}"
    for worker in [w for r in reads for w in r.get("workers", []) if w["line"]][:2]:
        disk = ", waiting for a disk" if worker["disk"] else ""
        text += f"; its worker {worker['pid']} stands at {worker['file']}:{worker['line']}{disk}"
        text += f" `{worker['text']}`" if worker["text"] else ""
    if one["kind"] == "loader" and not one["workers"]:
        text += "; it has no worker that lives"
    others = waiting(sight)
    text += f"; {they(others, 'waits')} for it" if others else ""
    return Finding(text, "debugging.md#who-waits-where", at(one))


@judge
def they_wait_for_one_that_works(sight):
    """A healthy wait: an epoch's last batch, a checkpoint, the first download."""
    busy, left = sight.that("works"), waiting(sight)
    if not busy:
        return None
    text = f"{they(busy, 'works')} (last seen at {at(busy[-1])})"
    text += f", {they(left, 'waits')} for it: no hang by now. Look again, with --seconds 60"
    slow = [one for one in busy if one["kind"] in ("loader", "data") and one["times"] > 2]
    if slow and left:
        text = f"{they(slow, 'reads')} data in most looks ({at(slow[0])}), {they(left, 'waits')}: "
        text += "a slow loader"
        return Finding(text, "debugging.md#who-waits-where", at(slow[0]), hangs=False)
    rank = f", {names([busy[0]['rank']])} under `{busy[0]['under']}`" if busy[0]["under"] else ""
    return Finding(text + rank, "doctor.md#a-job-that-hangs-now", at(busy[0]), hangs=False)


@judge
def new_group_by_some(sight):
    """Also where all are at one line: some have made a group before, the others have not."""
    found, left = sight.that("stands", "group"), waiting(sight)
    if not found or len(left) < len(sight.ranks):
        return None
    text = "all ranks must call each new_group(), in one order, also those that are not in the "
    text += f"group: is one before this made by some alone? {where(left)}"
    return Finding(text, STANDS, at(found[0]), mistake=True)


@judge
def a_rank_alone(sight):
    """A call that all must make, under an `if` that some ranks enter."""
    left = waiting(sight)
    for group in by_place(left):
        one = group[0]
        others = [other for other in left if other not in group]
        if not others:
            return None
        # The same call in the other branch is its partner.
        partners = [o for o in others if o["words"] == one["words"] or o["under"] == one["under"]]
        of_all = one["kind"] in ("collective", "forward", "wrap")
        if one["under"] and of_all and not partners:
            text = (
                f"{of(group)} alone calls {one['words']}: it stands under `{one['under']}`, which "
            )
            text += f"the others do not enter; {where(others)}"
            alone = "bugs.md#all_reduce-on-rank-0-alone"
            alone = (
                "bugs.md#the-wrapped-model-on-rank-0-alone" if one["kind"] == "forward" else alone
            )
            return Finding(text, alone, at(one), mistake=True)
    return None


@judge
def wrapped_alone(sight):
    """DDP sends its buffers in a forward pass of validation, too."""
    alone = [one for one in sight.that("stands", "forward") if one["without"]]
    others = [one for one in waiting(sight) if one not in alone]
    if alone and others:
        text = (
            f"{of(alone)} calls DDP's model without gradients: it sends its buffers to the others, "
        )
        text += f"which do not call it: {where(others)}. Call the plain model there"
        place = "bugs.md#the-wrapped-model-on-rank-0-alone"
        return Finding(text, place, at(alone[0]), mistake=True)
    return None


@judge
def some_have_left(sight):
    leave = sight.that("stands", "leave")
    others = [one for one in sight.ranks if one not in leave]
    if leave and others:
        text = f"{they(leave, 'has')} ended its training, and {where(others)}"
        return Finding(text, "bugs.md#rank-0-stops-early", at(leave[0]), mistake=True)
    return None


def skips(back):
    """The last line before backward that ends a turn of its loop, or ""."""
    return f"`{back['leaves'][-1][1]}` (line {back['leaves'][-1][0]})" if back["leaves"] else ""


@judge
def gradients_that_do_not_come(sight):
    """In backward DDP adds up gradients: all ranks must come to it, as often."""
    back, left = sight.that("stands", "backward"), waiting(sight)
    others = [one for one in left if one not in back]
    if not back or not others:
        return None
    text = f"{they(back, 'waits')} in backward for gradients that do not come: {where(others)}. "
    if all(one["kind"] == "forward" and one["function"] == back[0]["function"] for one in others):
        text += "A backward was left out: a batch skipped on one rank alone"
        text += f", at {skips(back[0])}?" if skips(back[0]) else "?"
        place = "bugs.md#a-branch-that-depends-on-a-processs-own-data"
    else:
        past = [one for one in others if one["kind"] != "forward"] or others
        text += f"{they(past, 'is')} past the training loop, or elsewhere: a batch less"
        text += f", or one skipped at {skips(back[0])}?" if skips(back[0]) else "?"
        place = "bugs.md#one-process-has-one-step-more"
    return Finding(text, place, at(back[0]), mistake=True)


@judge
def one_is_elsewhere(sight):
    """It may come: it downloads, saves, or waits for a command."""
    left = waiting(sight)
    idle = [one for one in sight.that("stands") if one not in left]
    if not idle or not left:
        return None
    doing = f" in {idle[0]['words']}" if idle[0]["words"] else ""
    text = f"{they(left, 'waits')} in {left[0]['words']} for {of(idle)}, seen{doing} at "
    text += at(idle[0])
    text += f" `{idle[0]['text']}`" if idle[0]["text"] else ""
    place = "bugs.md#rank-0-prepares-for-longer-than-the-timeout"
    return Finding(f"{text}, where nothing is computed", place, at(idle[0]))


@judge
def calls_do_not_match(sight):
    """Of a rank and of another."""
    left = waiting(sight)
    groups = by_place(left)
    if len(groups) < 2:
        return None
    if any(one["kind"] == "message" for one in left):
        text = f"no rank answers: {where(left)}. Each send needs its recv, and of two ranks one "
        return Finding(
            text + "must send first, the other receive", STANDS, at(left[0]), mistake=True
        )
    text = f"the ranks do not make the same calls: {where(left)}. "
    odd = next((group[0] for group in groups if group[0]["when"]), None)
    if odd:
        text += f"{at(odd)} is reached under `{odd['when']}`: is that the same in all?"
    else:
        text += "Which of these lines does a rank reach that another does not, or earlier?"
    place = "doctor.md#the-processes-do-not-do-the-same"
    return Finding(text, place, at(groups[0][0]), mistake=True)


@judge
def all_in_one_place(sight):
    """The same call in all: what they send differs, or does not arrive."""
    left = waiting(sight)
    if not left or len(left) < len(sight.ranks) or sight.elsewhere:
        return None
    one = left[0]
    if one["kind"] == "gpu" and not one["sure"]:
        text = (
            f"all ranks wait for their GPUs at {at(one)}: they compute, or stand. Look again, with "
        )
        return Finding(
            text + "--seconds 60", "doctor.md#a-job-that-hangs-now", at(one), hangs=False
        )
    if one["kind"] == "message":
        text = f"all ranks wait in {one['words']} at {at(one)}: each for a message that none sends"
        return Finding(text, STANDS, at(one), mistake=True)
    text = f"all ranks wait in {one['words']} at {at(one)}: their tensors differ in size, one has "
    text += "made more calls before (the flight recorder tells: --dumps), or the network fails"
    return Finding(text, "debugging.md#the-flight-recorder", at(one))


@judge
def all_wait_here(sight):
    left = waiting(sight)
    if left and sight.elsewhere:
        text = f"all that are here wait: {where(left)}; for {names(sight.elsewhere)}, on another "
        text += "machine or gone: look there with --out, and join the files"
        return Finding(text, "doctor.md#a-job-that-hangs-now", at(left[0]))
    return None


@judge
def stands_otherwise(sight):
    found = sight.that("stands")
    text = f"{where(found)}: stands, in no call that waits for another rank"
    return Finding(text, "debugging.md#who-waits-where", at(found[0]))
