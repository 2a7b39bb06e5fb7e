"""Judged last: in which calls the ranks wait for one another, and why those do not match."""

from ..words import say
from .judges import STANDS, judge
from .states import with_code
from .words import Answer, at, by_place, names, of, they, unknown, waiting, where


@judge
def not_sure(sight):
    """A loop outside of any function shows no variables: on a GPU each step looks like the last."""
    left = waiting(sight)
    if all(one["sure"] for one in left):
        return None
    text = say(
        "{where}: on GPUs they compute, or stand. Look again, with --seconds 60",
        where=where(left),
    )
    return Answer(text, "doctor.md#a-job-that-hangs-now", at(left[0]), hangs=False)


@judge
def one_of_how_many(sight):
    """Of a launcher that is not known: nothing is said of ranks that were not looked at."""
    left = waiting(sight)
    if not left or not unknown(sight):
        return None
    text = say(
        "it waits in {call} at {line}; its other ranks were not found",
        call=left[0]["words"],
        line=at(left[0]),
    )
    return Answer(text, "doctor.md#a-job-that-hangs-now", at(left[0]))


@judge
def new_group_by_some(sight):
    """Also where all are at one line: some have made a group before, the others have not."""
    found, left = sight.that("stands", "group"), waiting(sight)
    if not found or len(left) < len(sight.ranks):
        return None
    text = say(
        "all ranks must call each new_group(), in one order, also those that are "
        "not in the group: is one before this made by some alone? {where}",
        where=where(left),
    )
    return Answer(text, STANDS, at(found[0]), mistake=True)


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
            text = say(
                "{ranks} alone calls {call}: it stands under `{condition}`, which the "
                "others do not enter; {others}",
                ranks=of(group),
                call=one["words"],
                condition=one["under"],
                others=where(others),
            )
            alone = "bugs.md#all_reduce-on-rank-0-alone"
            alone = (
                "bugs.md#the-wrapped-model-on-rank-0-alone" if one["kind"] == "forward" else alone
            )
            return Answer(text, alone, at(one), mistake=True)
    return None


@judge
def wrapped_alone(sight):
    """DDP sends its buffers in a forward pass of validation, too."""
    alone = [one for one in sight.that("stands", "forward") if one["without"]]
    others = [one for one in waiting(sight) if one not in alone]
    if alone and others:
        text = say(
            "{ranks} calls DDP's model without gradients: it sends its buffers to the "
            "others, which do not call it: {others}. Call the plain model there",
            ranks=of(alone),
            others=where(others),
        )
        place = "bugs.md#the-wrapped-model-on-rank-0-alone"
        return Answer(text, place, at(alone[0]), mistake=True)
    return None


@judge
def some_have_left(sight):
    leave = sight.that("stands", "leave")
    others = [one for one in sight.ranks if one not in leave]
    if leave and others:
        text = say(
            "{they_have} ended its training, and {others}",
            they_have=they(leave, "has"),
            others=where(others),
        )
        return Answer(text, "bugs.md#rank-0-stops-early", at(leave[0]), mistake=True)
    return None


def skips(back):
    """The last line before backward that ends a turn of its loop, or ""."""
    if not back["leaves"]:
        return ""
    line, code = back["leaves"][-1]
    return say("`{code}` (line {line})", code=code, line=line)


@judge
def gradients_that_do_not_come(sight):
    """In backward DDP adds up gradients: all ranks must come to it, as often."""
    back, left = sight.that("stands", "backward"), waiting(sight)
    others = [one for one in left if one not in back]
    if not back or not others:
        return None
    skip = skips(back[0])
    if all(one["kind"] == "forward" and one["function"] == back[0]["function"] for one in others):
        more = say("A backward was left out: a batch skipped on one rank alone?")
        if skip:
            more = say(
                "A backward was left out: a batch skipped on one rank alone, at {line}?", line=skip
            )
        place = "bugs.md#a-branch-that-depends-on-a-processs-own-data"
    else:
        past = they([one for one in others if one["kind"] != "forward"] or others, "is")
        more = say("{they_are} past the training loop, or elsewhere: a batch less?", they_are=past)
        if skip:
            more = say(
                "{they_are} past the training loop, or elsewhere: a batch less, or one "
                "skipped at {line}?",
                they_are=past,
                line=skip,
            )
        place = "bugs.md#one-process-has-one-step-more"
    text = say(
        "{they_wait} in backward for gradients that do not come: {others}. {more}",
        they_wait=they(back, "waits"),
        others=where(others),
        more=more,
    )
    return Answer(text, place, at(back[0]), mistake=True)


@judge
def past_the_loop(sight):
    """It asks again and again for what comes after a loop that another is still in."""
    left = waiting(sight)
    for idle in sight.that("stands"):
        polls = [loop for loop in idle.get("loops", []) if loop[2].startswith("while ")]
        same = [one for one in left if of_one_function(one, idle) and one is not idle]
        for one in same if polls and idle not in left else []:
            passed = [loop for loop in one.get("loops", []) if loop[1] < polls[0][0]]
            if passed:
                text = say(
                    "{they_wait} in {call} for {ranks}, which is past this loop, `{loop}` (line "
                    "{first}): a batch less? It stands in `{polls}` (line {second}): what this "
                    "asks for does not come, if it is done after the loop",
                    they_wait=they(same, "waits"),
                    call=one["words"],
                    ranks=of([idle]),
                    loop=passed[-1][2],
                    first=passed[-1][0],
                    polls=polls[0][2],
                    second=polls[0][0],
                )
                place = "bugs.md#one-process-has-one-step-more"
                return Answer(text, place, at(one), mistake=True)
    return None


def of_one_function(one, other):
    return (one["file"], one["function"]) == (other["file"], other["function"])


@judge
def one_is_elsewhere(sight):
    """It may come: it downloads, saves, or waits for a command."""
    left = waiting(sight)
    idle = [one for one in sight.that("stands") if one not in left]
    if not idle or not left:
        return None
    known = {"they_wait": they(left, "waits"), "call": left[0]["words"], "ranks": of(idle)}
    text = say("{they_wait} in {call} for {ranks}, seen at {line}", **known, line=at(idle[0]))
    if idle[0]["words"]:
        text = say(
            "{they_wait} in {call} for {ranks}, seen in {other} at {line}",
            **known,
            other=idle[0]["words"],
            line=at(idle[0]),
        )
    text = say("{text}, where nothing is computed", text=with_code(text, idle[0]["text"]))
    return Answer(text, "bugs.md#rank-0-prepares-for-longer-than-the-timeout", at(idle[0]))


@judge
def asynchronous(sight):
    """Which call it was is not seen: a message, or a collective."""
    left = waiting(sight)
    found = [one for one in left if one["kind"] == "work"]
    if not found or sight.elsewhere or len(left) < len(sight.ranks):
        return None
    text = say(
        "no rank answers: {where}. Each send needs its recv, and a collective is called "
        "by all, in one order (the flight recorder tells: --dumps)",
        where=where(left),
    )
    return Answer(text, "debugging.md#the-flight-recorder", at(found[0]))


@judge
def calls_do_not_match(sight):
    """Of a rank and of another."""
    left = waiting(sight)
    groups = by_place(left)
    if len(groups) < 2 or any(one["kind"] == "work" for one in left):
        return None
    if any(one["kind"] == "message" for one in left):
        text = say(
            "no rank answers: {where}. Each send needs its recv, and of two ranks one "
            "must send first, the other receive",
            where=where(left),
        )
        return Answer(text, STANDS, at(left[0]), mistake=True)
    odd = next((group[0] for group in groups if group[0]["when"]), None)
    if odd:
        more = say(
            "{line} is reached under `{condition}`: is that the same in all?",
            line=at(odd),
            condition=odd["when"],
        )
    else:
        more = say("Which of these lines does a rank reach that another does not, or earlier?")
    text = say(
        "the ranks do not make the same calls: {where}. {more}", where=where(left), more=more
    )
    place = "doctor.md#the-processes-do-not-do-the-same"
    return Answer(text, place, at(groups[0][0]), mistake=True)


@judge
def all_in_one_place(sight):
    """The same call in all: what they send differs, or does not arrive."""
    left = waiting(sight)
    if not left or len(left) < len(sight.ranks) or sight.elsewhere:
        return None
    one = left[0]
    known = {"call": one["words"], "line": at(one)}
    if one["kind"] == "message":
        text = say(
            "all ranks wait in {call} at {line}: each for a message that none sends", **known
        )
        return Answer(text, STANDS, at(one), mistake=True)
    text = say(
        "all ranks wait in {call} at {line}: their tensors differ in size, one has "
        "made more calls before (the flight recorder tells: --dumps), or the "
        "network fails",
        **known,
    )
    return Answer(text, "debugging.md#the-flight-recorder", at(one))


@judge
def all_wait_here(sight):
    left = waiting(sight)
    if left and sight.elsewhere:
        text = say(
            "all that are here wait: {where}; for {ranks}, on another machine or gone: "
            "look there with --out, and join the files",
            where=where(left),
            ranks=names(sight.elsewhere),
        )
        return Answer(text, "doctor.md#a-job-that-hangs-now", at(left[0]))
    return None


@judge
def stands_otherwise(sight):
    found = sight.that("stands")
    text = say("{where}: in no call that is known to wait for another rank", where=where(found))
    return Answer(text, "debugging.md#who-waits-where", at(found[0]))
