"""What all judges say of a run whose events are made up: of right ones nothing."""

import argparse

import pytest

from doctor import command, judges, report
from doctor.judges import comparing
from doctor.run import Process, Run
from doctor.wrappers import groups

FACTS = {
    "group": {"rank": 0, "world_size": 2},
    "batch": {"grad": True},
    "pass": {"made": "t.py:5", "sampler": "t.py:4", "batches": 2, "size": 32, "base": 32}
    | {"workers": 0, "length": 16, "padding": 0, "seed": 0, "epoch": 0, "num_replicas": 2}
    | {"loader": 0, "rank": 0, "shuffle": True, "trims": False, "drops": False}
    | {"stream": False, "classes": None, "told": False},
    "forward": {"trains": True, "training": True, "wrapped": True, "modes": False}
    | {"sends": False, "synced": True, "given": None},
    "validates": {"training": False, "buffers": {}, "wrapped": True, "modes": False},
    "step": {"weights": {}, "own": {}, "parts": {}, "order": {}, "lr": [0.1], "random": {}}
    | {"zeroed": 1, "optimizer": 0, "ours": 0, "squares": None},
    "collective": {"name": "all_reduce", "shape": ["float32", 1], "number": 1.0, "changes": 1}
    | {"gradients": None, "optimizers": [], "whole": True, "known": None, "set": None},
    "end": {"error": "", "frozen": [], "outside": False},
}


def event(kind, line=1, **facts):
    return {"kind": kind, "line": f"t.py:{line}"} | FACTS.get(kind, {}) | facts


def run_of(events_of):
    """Two processes; events_of(rank): what each does."""
    return Run(
        Process([event("group", rank=rank), event("wrap", 9, frozen=[]), *events_of(rank)])
        for rank in (0, 1)
    )


def found_in(run):
    found = judges.findings([run])
    assert not run.faults
    return [(one.certain, one.line, one.text) for one in found]


def step(weight, line=22, optimizer=0):
    """Of a model of DDP."""
    calls = [["F", "t.py:20"], ["B", "t.py:21"]]
    facts = {"weights": {"0.w": weight}, "order": {"0": calls}, "optimizer": optimizer}
    return [event("forward", 20), event("backward", 21), event("step", line, **facts)]


def batches(number, items, line=18, data=0, **facts):
    """Those of a pass, 8 items each."""
    named = [[f"{data}:{i}", str(i % 2), str(i)] for i in items]
    parts = [named[at : at + 8] for at in range(0, len(named), 8)]
    return [event("batch", line, number=number, items=part, **facts) for part in parts]


def trains(rank, epoch, seed=None, **facts):
    """An epoch of two steps, in an order that is that of the epoch."""
    order = [(2 * i + rank + 10 * (epoch if seed is None else seed)) % 32 for i in range(16)]
    found = [event("pass", 18, number=2 * epoch, rank=rank, epoch=epoch, **facts)]
    for i, batch in enumerate(batches(2 * epoch, order)):
        found += [batch, *step(str(2 * epoch + i))]
    return [*found, event("over", 18, number=2 * epoch)]


def validates(rank, epoch, weight):
    """Each its part, whose numbers are added up."""
    number = 2 * epoch + 1
    first, *others = batches(number, range(rank, 32, 2), 30, data=1, grad=False)
    facts = {"rank": rank, "shuffle": False, "made": "t.py:6", "loader": 1}
    return [
        event("pass", 30, number=number, **facts),
        *(first, event("validates", 31, weights={"w": weight})),
        *(*others, event("over", 30, number=number), event("collective", 33)),
    ]


@pytest.mark.parametrize("line", [12, 31])
def test_rank_0_looks_once_more(line):
    """At a line of its own, or at another model in the function that validates."""

    def events(rank, weight="2"):
        more = [event("validates", line, weights={"w": "ema"})] if rank == 0 else []
        found = [*more, *trains(rank, 0), *validates(rank, 0, "2"), *more, *trains(rank, 1)]
        return [*found, *validates(rank, 1, weight if rank else "4"), event("end")]

    assert not found_in(run_of(lambda rank: events(rank, "4")))
    ((certain, at, text),) = found_in(run_of(events))
    assert certain and at == "t.py:31" and text.startswith("w of the model that is validated")


def test_looks_after_join_are_those_of_its_end():
    """In it a process may make more steps."""

    def events(rank):
        ends = [event("join"), *[event("step")] * (5 - 2 * rank), event("joined")]
        return [*ends, event("validates", 31, weights={"w": str(rank)})]

    ((one, other),) = run_of(events).looks()
    assert (one["weights"], other["weights"]) == ({"w": "0"}, {"w": "1"})


@pytest.mark.parametrize("averaged", [[0, 1], [0], [1], []])
@pytest.mark.parametrize("drifts", [0, 1])
def test_each_optimizer_is_looked_at(averaged, drifts):
    """Without DDP, two step by turns, and the weights of one of them differ from step 2 on."""
    certain = drifts in averaged

    def events(rank, own=drifts):
        sums = [event("collective", 24, gradients="own", optimizers=[one]) for one in averaged]
        found = []
        for i in range(3):
            found += [event("backward", 21), *sums]
            for n in (0, 1):
                weight = f"{i}.{rank if n == own and i else 0}"
                found.append(event("step", 25 + n, optimizer=n, own={"0 [9]": weight}, ours=1))
        return [*found, event("end")]

    assert not found_in(run_of(lambda rank: events(rank, None)))
    ((is_certain, line, text),) = found_in(run_of(events))
    assert (is_certain, line) == (certain, f"t.py:{25 + drifts}")
    assert text.startswith("the weights differ between the processes from here on")
    assert ("no gradient is averaged" in text) == (not averaged)
    assert ("of this optimizer" in text) == (bool(averaged) and not certain)


GROUPS = {  # what each process uses, and whether some may differ by it
    "none": ([None, None], False),
    "rank 0 alone in one": ([1, None], False),
    "each in its own": ([1, 1], True),
    "some of them": ([2, None], True),
    "one model": (["together", "together"], True),
}


@pytest.mark.parametrize("name", GROUPS)
def test_where_processes_may_differ_on_purpose_the_report_says_so(name):
    """Samplers of one rank are no mistake then; the same order in each epoch is one."""
    own, differ = GROUPS[name]

    def events(rank, seed):
        found = [event("part", 8, size=own[rank])] if own[rank] else []
        if own[rank] == "together":
            found = [event("together", 8, of="layer", ranks=[0, 1])]
        return [*found, *trains(0, 0), *trains(0, 1, seed), event("end")]

    run = run_of(lambda rank: events(rank, 1))
    assert [text[:22] for _, _, text in found_in(run)] == ["the processes' sampler"] * (not differ)
    assert report.not_asked([run]).startswith("t.py:8  " if differ else "")
    assert bool(report.not_asked([run])) == differ
    texts = [text for _, _, text in found_in(run_of(lambda rank: events(rank, 0)))]
    assert "call set_epoch(epoch) of its sampler" in "".join(texts)


def test_of_other_machines_it_is_said_where_only_their_processes_have_groups_of_their_own():
    """As those of one machine, where each has one process."""
    args = argparse.Namespace(quick=True)
    whole, parts = (run_of(lambda rank, of=of: of) for of in ([], [event("part", 8, size=1)]))
    for run, said in ((whole, [report.not_asked([parts])]), (parts, [])):
        others = command.OtherRuns(args, None, [run], 1)
        others.findings([parts])
        assert others.said == said


@pytest.mark.parametrize(
    ("shape", "names", "size"),
    [
        ((2, 1), None, None),
        ((1, 2), ("replicate", "dp_shard_cp"), None),
        ((4,), None, None),
        ((2, 3), None, 2),
        ((1, 2), ("dp", "tp"), 2),
        ((2,), ("model_parallel",), 2),
    ],
)
def test_a_mesh_divides_by_axes_that_are_longer_than_one(shape, names, size):
    assert groups.parts_of(shape, names) == size


def zipped(rank, seeds, anew=False):
    """Two loaders of one data set, made at one line; seeds: of each epoch the orders of both."""
    found = []
    for epoch, pair in enumerate(seeds):
        passes = []
        for which, seed in enumerate(pair):
            n = 2 * epoch + which
            order = [(2 * i + rank + 8 * which + 10 * seed) % 32 for i in range(16)]
            facts = {"loader": n if anew else which, "rank": rank, "epoch": seed}
            found.append(event("pass", 18, number=n, **facts))
            passes.append(batches(n, order))
        for i, of_both in enumerate(zip(*passes, strict=True)):
            found += [*of_both, *step(str(2 * epoch + i))]
        found.append(event("over", 18, number=2 * epoch))
    return [*found, event("end")]


@pytest.mark.parametrize("seeds", [[(0, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 0), (1, 0)]])
@pytest.mark.parametrize("anew", [False, True])
def test_each_of_two_zipped_loaders_is_looked_at(seeds, anew):
    """Perhaps they are made anew for each epoch."""
    run = run_of(lambda rank: zipped(rank, seeds, anew))
    trained = [[one["number"] for one in epochs] for epochs in run[0].epochs()]
    assert trained == [[0, 2], [1, 3]]
    texts = [text for _, _, text in found_in(run)]
    assert len(texts) == (0 in seeds[1])
    assert all(text.startswith("the order is that of the epoch before") for text in texts)


def test_an_epoch_of_two_zipped_loaders_is_one_epoch():
    """Also where a resumed run begins with it again."""
    one, two, again, goes_on = (
        run_of(lambda rank, seeds=seeds: zipped(rank, seeds))
        for seeds in ([(0, 0)], [(0, 0), (1, 1)], [(1, 1)], [(2, 2)])
    )
    assert "one epoch was seen" in "".join(report.looked_at(one, 1))
    assert "one epoch was seen" not in "".join(report.looked_at(two, 1))
    assert comparing.epoch_repeated(two, again).certain
    assert comparing.epoch_repeated(two, goes_on) is None


def test_what_is_read_between_two_backwards_is_not_trained_with():
    """With gradients: a sum over all items, a look at the first ones, and a validation by steps."""

    def events(rank):
        part = range(rank, 32, 2)
        found = [event("pass", 11, number=10), *batches(10, part, 11)]
        found += [event("over", 11, number=10), event("pass", 14, number=13, rank=rank)]
        other = batches(13, [*part] * 2, 14, data=1)
        for epoch in range(2):
            found += [event("pass", 12, number=11 + epoch), batches(11 + epoch, part, 12)[0]]
            for one in trains(rank, epoch):
                found.append(one)
                if one["kind"] == "step":
                    found += [other.pop(), event("forward", 31, trains=False, training=False)]
        return [*found, event("end")]

    run = run_of(events)
    assert [one["number"] for one in run[0].passes if one["trained"]] == [0, 2]
    assert not [text for _, _, text in found_in(run) if "order" in text]


@pytest.mark.parametrize(
    ("first", "second", "differs", "certain"),
    [
        ([0, 0, 2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11, 13, 0], "seed", None),  # drawn again
        ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 0], "rank", False),
        ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 0], "seed", True),
        ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15], "rank", None),
    ],
)
def test_an_item_that_two_samplers_give(first, second, differs, certain):
    def events(rank):
        facts = {"rank": rank, "length": 8, "batches": 1, differs: rank}
        (batch,) = batches(0, (first, second)[rank])
        return [event("pass", 18, number=0, **facts), batch, *step("0"), event("end")]

    found = found_in(run_of(events))
    assert [one for one, _, _ in found] == [certain] * (certain is not None)
    assert not found or found[0][2].startswith("1 items are read by several processes")


@pytest.mark.parametrize(
    ("ours", "theirs", "certain"),
    [
        (["images"], ["cat", "dog"], None),  # trained without labels
        (["cat", "dog"], ["cat", "dog"], None),
        (["ant", "cat", "dog"], ["cat", "dog"], True),
        (["cat", "dog"], [".ipynb_checkpoints", "cat", "dog"], True),
        (["bird", "car", "truck"], ["automobile", "bird", "truck"], False),  # another data set
    ],
)
def test_classes_of_other_names(ours, theirs, certain):
    def events(rank):
        found = []
        for epoch in range(2):
            found += trains(rank, epoch, classes=ours)
            valid = validates(rank, epoch, str(2 * epoch + 2))
            found += [one | ({"classes": theirs} if one["kind"] == "pass" else {}) for one in valid]
        return [*found, event("end")]

    found = found_in(run_of(events))
    assert [one for one, _, _ in found] == [certain] * (certain is not None)
    assert all(text.startswith("class ") for _, _, text in found)


def of_a_probe(rank, line, count):
    """What rank 1 trains alone, without DDP, as a probe on features."""
    facts = {"optimizer": 1, "own": {"0 [9]": "w"}, "ours": 1, "lr": [0.5]}
    mean = event("mean", line - 1, counted=240 + line)
    return [mean, event("step", line, **facts)] * count if rank == 1 else []


@pytest.mark.parametrize("missing", [0, 1])
def test_an_optimizer_that_one_process_has_alone(missing):
    """It is no step of the model that all train: of that one a process makes a step less."""

    def events(rank):
        found, means = trains(rank, 0), [event("mean", 20, counted=8)]
        last = step("9") if not (missing and rank) else []
        return [*of_a_probe(rank, 41, 3), *found, *means, *last, *of_a_probe(rank, 51, 2), ENDED]

    texts = [text for _, _, text in found_in(run_of(events))]
    steps, batches = "make 3 and 2 steps of the optimizer", "train with 3 and 2"
    said = {f"the processes {steps}", f"of 2 batches the processes {batches}"}
    assert {*texts} == (said if missing else set())


ENDED = event("end")


@pytest.mark.parametrize(
    ("weights", "after", "certain"),
    [
        ("aabb", None, None),
        ("aabb", "b", None),
        ("aabb", "c", False),  # after the last step
        ("aaxc", None, True),
        ("axbc", None, False),  # averaged now and then: at the third look they are the same
        ("axbx", None, False),
        ("axb", None, None),
        ("axcx", None, True),
    ],
)
def test_weights_that_part(weights, after, certain):
    """x, c: rank 1 has another one there."""

    def of(letter, rank):
        return f"{letter}{rank if letter in 'xc' else ''}"

    def events(rank):
        found = [one for letter in weights for one in step(of(letter, rank))]
        found += [event("last", 60, weights={"0.w": of(after, rank)}, order={})] if after else []
        return [*found, ENDED]

    found = found_in(run_of(events))
    assert [one for one, _, _ in found] == [certain] * (certain is not None)
    assert all("0.w"[2:] + " differs" in text for _, _, text in found)


def test_weights_that_a_file_makes_the_same_again_have_parted():
    def events(rank):
        loads = [event("load", 50, path="/t", waits=True)]
        weights = [step("a"), step(f"x{rank}"), loads, step("b"), step(f"y{rank}")]
        return [*(one for some in weights for one in some), ENDED]

    ((certain, _, _),) = found_in(run_of(events))
    assert certain


@pytest.mark.parametrize(
    ("told", "again", "certain"),
    [(True, False, True), (True, True, None), (False, True, True), (None, True, False)]
    + [(None, False, False)],
)
@pytest.mark.parametrize("shuffle", [True, None])
def test_the_first_order_comes_again(told, again, certain, shuffle):
    """again: of another loader, as for a second training; shuffle None: a sampler of one's own."""
    if told is None:
        certain = shuffle or False
    elif not shuffle:
        certain = None

    def events(rank):
        facts = {"told": told, "shuffle": shuffle}
        return [
            *trains(rank, 0, 1, **facts),
            *trains(rank, 1, 1, loader=int(again), **facts),
            ENDED,
        ]

    def of_one_epoch(rank):
        return [one | {"epoch": 0} if one["kind"] == "pass" else one for one in events(rank)]

    found = found_in(run_of(of_one_epoch))
    assert {one for one, _, _ in found} == ({certain} - {None})


def test_backwards_of_an_attack_are_no_steps_of_ddp():
    def events(rank, skips=0):
        (one, *rest) = [event("pass", 18, number=0, rank=rank), *batches(0, range(rank, 32, 2))]
        found = [one]
        for i, batch in enumerate(rest):
            attack = [event("forward", 19, synced=None), event("backward", 20)] * (1 + rank)
            attack = [] if skips else attack
            mine = step(str(i))
            if skips and rank and not i:
                mine = [event("forward", 20), event("step", 22, weights={"0.w": str(i)})]
            found += [batch, *attack, *mine]
        return [*found, event("over", 18, number=0), ENDED]

    assert not found_in(run_of(events))
    texts = [text for _, _, text in found_in(run_of(lambda rank: events(rank, 1)))]
    assert "of 2 batches the processes train with 2 and 1" in texts


@pytest.mark.parametrize("certain", [True, False])
def test_what_is_repeated_where_nothing_is_added_up(certain):
    """Each process may write its results by their numbers, and rank 0 puts them together."""

    def events(rank):
        number, part = 5, [*range(rank, 31, 2), *([0] if rank else [])]
        facts = {"rank": rank, "shuffle": False, "made": "t.py:6", "size": 31, "padding": 1}
        sums = [event("collective", 33)] if certain else [event("writes", 33, path=f"/{rank}")]
        found = [event("pass", 30, number=number, **facts)]
        found += [*batches(number, part, 30, data=1, grad=False), event("over", 30, number=number)]
        return [*found, *sums, ENDED]

    ((is_certain, _, text),) = found_in(run_of(events))
    assert is_certain == certain and text.startswith("the sampler repeats 1 of 31 items")


@pytest.mark.parametrize("same", [True, False])
def test_what_is_read_without_a_loader(same):
    def events(rank):
        found = []
        for i in range(3):
            given = [i if same else f"{i} {rank}"]
            found += [event("forward", 20, given=given), event("backward", 21), *step(str(i))[2:]]
        return [*found, ENDED]

    run = run_of(events)
    assert [text[:43] for _, _, text in found_in(run)] == (
        ["all processes give the model the same items"[:43]] * same
    )
    assert "no DataLoader was seen" in "".join(report.looked_at(run, 1))


@pytest.mark.parametrize(
    ("path", "certain"), [("/dev/shm/cache.pt", False), ("/home/you/here/cache.pt", True)]
)
def test_a_file_that_each_machine_needs_once(path, certain):
    def events(rank):
        return [event("save", 12, path=path, of_wrapped=False, parts=False), ENDED]

    run = Run(Process([event("group", rank=rank, local="0"), *events(rank)]) for rank in range(2))
    ((is_certain, _, text),) = found_in(run)
    assert is_certain == certain and text.endswith("as local rank 0")
