"""Each pair of choices of compose.py is in a script that runs: what it prints, saves and writes."""

import csv
import itertools
import math
import random

import pytest
from conftest import full, needs_horovod
from sklearn.metrics import f1_score

from tests.docs.composed import guessed, lines_of, load, trained, write
from tests.docs.test_compose import DATA, FEATURES, SOAK, STARTS, allowed


def covering(strength):
    """Combinations such that all choices of each two axes, or three, meet in one at least."""
    axes, draw = [STARTS, DATA, *([name, ""] for name in FEATURES)], random.Random(0)

    def meetings(row):
        return set(itertools.combinations(enumerate(row), strength))

    def possible(row):
        return allowed(row[0], row[1], filter(None, row[2:]))

    def drawn(meeting):
        row = [draw.choice(axis) for axis in axes]
        for place, name in meeting:
            row[place] = name
        return row

    left, rows = set(), []
    for places in itertools.combinations(range(len(axes)), strength):
        for names in itertools.product(*(axes[place] for place in places)):
            left.add(tuple(zip(places, names, strict=True)))
    for meeting in sorted(left):
        if meeting not in left:
            continue
        tries = [row for row in (drawn(meeting) for _ in range(40)) if possible(row)]
        if tries:  # else it is refused
            rows.append(max(tries, key=lambda row: len(left & meetings(row))))
            left -= meetings(rows[-1])
    return [(row[0], row[1], [*filter(None, row[2:])]) for row in rows]


ROWS = covering(2)


@pytest.mark.parametrize(
    "start, data, features",
    # A sixth of them by CI, with --all, and what Ray must send: the data set, which the script has
    # defined. All of them take a quarter of an hour.
    [pytest.param(*r, marks=SOAK if i % 6 else pytest.mark.full) for i, r in enumerate(ROWS)]
    + [full("ray", "images", ["predictions"])],
    ids=["-".join([r[0], r[1], *r[2]]) for r in ROWS] + ["ray-images-predictions"],
)
def test_each_pair_of_choices(start, data, features, tmp_path):
    runs_as_it_should(start, data, features, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_each_three_choices(tmp_path):
    """Some hundred scripts: hours."""
    for number, row in enumerate(covering(3)):
        runs_as_it_should(*row, tmp_path / str(number))


def runs_as_it_should(start, data, features, folder):
    """In two epochs: what it prints, saves and writes is true of the weights that it has saved."""
    if start == "horovod":
        needs_horovod()
    path = write(folder, start, data, features)
    lines = lines_of(trained(path, start))
    assert len(lines) == 2
    losses, f1s, said = zip(*lines, strict=True)
    assert (None in losses) != ("loss" in features) and (None in f1s) != ("f1" in features)
    assert "loss" not in features or all(map(math.isfinite, losses))
    assert "loss" not in features or data != "digits" or losses[1] < losses[0]  # they can be learnt

    scores, kept = f1s if "f1" in features else said, 1
    if {"best", "early_stopping"} & {*features}:
        kept = scores.index(max(scores))
    target, guess = guessed(path, data)
    # Accelerate validates in mixed precision too: an image or two may differ.
    near = 200 / len(target) if start == "accelerate" and "amp" in features else 0.051
    right = 100 * (guess == target).sum().item() / len(target)
    assert said[kept] == pytest.approx(right, abs=near)
    if "f1" in features:
        f1 = f1_score(target, guess, average="macro", labels=range(3 if data == "images" else 10))
        assert f1s[kept] == pytest.approx(f1, abs=near / 50 if near > 0.06 else 0.00006)
    if "predictions" in features:
        with open(folder / "predictions.csv", newline="") as file:
            head, *rows = csv.reader(file)
        assert head == ["image", "prediction"] and len(rows) == len(target)
        different = sum(int(row[1]) != number for row, number in zip(rows, guess, strict=True))
        assert different <= (2 if near > 0.06 else 0)
        if data == "images":
            label = {"a": 0, "b": 1, "c": 2}
            assert [label[row[0].split("/")[-2]] for row in rows] == target.tolist()
        else:
            assert [int(row[0]) for row in rows] == [*range(len(target))]
    if "resume" in features:
        assert load(path, "checkpoint.pth")["epoch"] == 2
        assert not lines_of(trained(path, start))  # again: there is nothing left to do
