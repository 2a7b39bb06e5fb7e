"""What is judged of the recorded calls: each judge is asked about one group. And the command."""

import os

from ..attach.words import Answer, names, they
from ..words import clauses, on_screen, page, say
from .calls import ALIKE, groups_of
from .read import dumps_in

DIFFER = "doctor.md#the-processes-do-not-do-the-same"
SKIPPED = "bugs.md#a-branch-that-depends-on-a-processs-own-data"
JUDGES = []


def judge(ask):
    JUDGES.append(ask)
    return ask


def findings(dumps):
    """[Answer] of {rank: dump}, the first of each group."""
    answers = [
        next(filter(None, (ask(group) for ask in JUDGES)), None) for group in groups_of(dumps)
    ]
    return [answer for answer in answers if answer]


def by_call(row):
    """ "rank 0 all_reduce [1] (train.py:73), rank 1 broadcast [64] (train.py:56)" """
    said = {}
    for rank, call in row.items():
        said.setdefault(call.said(), []).append(rank)
    return clauses(
        say("{ranks} {call}", ranks=names(ranks), call=call) for call, ranks in said.items()
    )


def first_that_differs(group):
    """(number, {rank: Call}) of the first call that is not the same in all, or (None, None)."""
    for number in group.numbers:
        row = group.row(number) or {}
        if (
            len({(call.name, call.sizes if call.name in ALIKE else "") for call in row.values()})
            > 1
        ):
            return number, row
    return None, None


@judge
def left_out(group):
    """A rank that skips a batch has a sum of gradients less; without stacks: one call like it."""
    number, row = first_that_differs(group)
    if row is None:
        return None
    for call in sorted(
        row.values(), key=lambda call: (not call.backward, call.name != "all_reduce")
    ):
        counts = {rank: group.count(rank, call, number) for rank in row}
        few = [rank for rank, count in counts.items() if count < max(counts.values())]
        sums = call.backward or (call.name == "all_reduce" and min(counts.values()) > 0)
        if few and sums:
            other = row[few[0]]
            text = say(
                "{they_have} left out a backward, or is past the loop: call {number} is "
                "{calls}, and of {call} {sizes} it has made {few}, the others {many}",
                they_have=they(few, "has"),
                number=number,
                calls=by_call(row),
                call=call.name,
                sizes=call.sizes,
                few=counts[few[0]],
                many=max(counts.values()),
            )
            return Answer(text, SKIPPED, other.line, mistake=True)
    return None


@judge
def sizes_differ(group):
    number, row = first_that_differs(group)
    if row and len({call.name for call in row.values()}) == 1:
        call = next(iter(row.values()))
        text = say(
            "call {number} is {call} in all, of tensors that are not alike: {calls}. "
            "Pad them to one length, or exchange the lengths first",
            number=number,
            call=call.name,
            calls=by_call(row),
        )
        return Answer(text, DIFFER, call.line, mistake=True)
    return None


@judge
def other_calls(group):
    number, row = first_that_differs(group)
    if row:
        line = next(iter(row.values())).line
        text = say("call {number} is not the same: {calls}", number=number, calls=by_call(row))
        return Answer(text, DIFFER, line, mistake=True)
    return None


@judge
def some_stay_behind(group):
    """A rank that has not come to a call that others have made."""
    last = {rank: group.last(rank) for rank in group.calls}
    behind = [rank for rank in last if last[rank] < max(last.values())]
    if not behind:
        return None
    number = min(last[rank] for rank in behind) + 1
    row = group.row(number)
    if not row or all(call.done for call in row.values()):
        return None
    before = group.calls[behind[0]].get(last[behind[0]])
    more = say("its last was {call}", call=before.said()) if before else say("it has made none")
    text = say(
        "{they_have} not come to call {number}, which is {calls}; {more}",
        they_have=they(behind, "has"),
        number=number,
        calls=by_call(row),
        more=more,
    )
    return Answer(text, DIFFER, before.line if before else "", mistake=True)


@judge
def no_answer(group):
    """A send without its recv, or the other way round."""
    tally = {}
    for calls in group.messages.values():
        for call in calls:
            sends, recvs = tally.setdefault(call.peers, ([], []))
            (sends if call.name == "send" else recvs).append(call)
    for (source, target), (sends, recvs) in tally.items():
        more, less = (sends, recvs) if len(sends) > len(recvs) else (recvs, sends)
        seen = group.ranks[target if more is sends else source] in group.calls
        if len(more) > len(less) and not more[-1].done and seen:
            call = more[len(less)]
            who, other = (source, target) if more is sends else (target, source)
            ranks = [group.ranks[who], group.ranks[other]]
            text = say(
                "rank {rank} {call}: number {number} of its calls of {name} with rank "
                "{other}, which has made {less} of the other kind",
                rank=ranks[0],
                call=call.said(),
                number=len(less) + 1,
                name=call.name,
                other=ranks[1],
                less=len(less),
            )
            return Answer(text, "doctor.md#it-stands-still", call.line, mistake=True)
    return None


@judge
def all_have_made_it(group):
    """The same calls in all, and the last has not ended."""
    absent = [rank for rank in group.ranks if rank not in group.calls]
    number = max(group.numbers, default=0)
    row = group.row(number)
    pending = [rank for rank, call in (row or {}).items() if not call.done]
    if not pending:
        return None
    if absent:
        text = say(
            "there is no file of {ranks}: it may have died, or stands elsewhere. The "
            "others wait in call {number}, {calls}",
            ranks=names(absent),
            number=number,
            calls=by_call(row),
        )
    else:
        text = say(
            "all ranks have made the same calls; {they_have} not ended call {number}, "
            "{calls}: the network, or a GPU",
            they_have=they(pending, "has"),
            number=number,
            calls=by_call(row),
        )
    return Answer(text, "faq.md#starting", row[pending[0]].line)


def main(folder):
    """Print what the files of a folder say; returns the exit code, as --attach does."""

    def tell(said):
        print(f" {on_screen(said)}")

    if not os.path.isdir(folder):
        tell(say("doctor --dumps: {folder} is no folder", folder=folder))
        return 2
    dumps, left = dumps_in(folder)
    for reason in left:
        tell(say("left out: {reason}", reason=reason))
    if not dumps:
        tell(
            say(
                "no file of the flight recorder in {folder}: their names end with the rank",
                folder=folder,
            )
        )
        return 2
    try:
        said, found = lines(dumps), findings(dumps)
    except Exception as error:  # fields of another kind than torch's: anybody may have written it
        tell(say("the files cannot be compared: {error}", error=f"{type(error).__name__}: {error}"))
        return 2
    for line in said:
        tell(line)
    for one in found:
        line = f"{one.line}  " if one.line else ""
        print(f" {line}{on_screen(one.text)}  → {page(one.place)}")
    if not found:
        tell(say("the ranks have made the same calls, and all have ended"))
    return 1 if any(one.mistake for one in found) else 3 if found else 0


def lines(dumps):
    """A line for each rank and group."""
    pairs = [(rank, group) for rank in dumps for group in groups_of(dumps) if rank in group.calls]
    return [say("rank {rank}: {said}", rank=r, said=said(group, r)) for r, group in pairs]


def said(group, rank):
    """ "call 37 is the last, call 36 has ended; the last: broadcast [64] (train.py:56)" """
    calls = group.calls[rank]
    last = group.last(rank)
    ended = max((number for number, call in calls.items() if call.done), default=0)
    known = {"last": last, "ended": ended, "call": calls[last].said() if calls else ""}
    if not calls:
        text = say("no collective")
    elif group.name in ("0", ""):
        text = say("call {last} is the last, call {ended} has ended; the last: {call}", **known)
    else:
        text = say(
            "call {last} of group {group} is the last, call {ended} has ended; the last: {call}",
            **known,
            group=group.name,
        )
    messages = group.messages.get(rank)
    return say("{text}; {count} messages", text=text, count=len(messages)) if messages else text
