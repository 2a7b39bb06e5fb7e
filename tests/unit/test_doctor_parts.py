"""The doctor's own parts, without a run."""

import argparse
import json
import os
import time
import weakref

import pytest
import torch
from conftest import PYTHON, ROOT
from conftest import run as start

from doctor import command, events, judges, launch, report, wrappers
from doctor.events import checksum, checksums
from doctor.files import programs
from doctor.judges import comparing, ending, missing, recorded, saving, steps, training
from doctor.run import Process, Run, read
from doctor.wrappers import optimizers, processes, sets
from doctor.wrappers import saving as saves

judges.findings([])  # fills JUDGES, before a test has a list of its own in its place


def noted(monkeypatch, call):
    """The events that a call notes."""
    found = []
    monkeypatch.setattr(
        wrappers, "note", lambda kind, **facts: found.append({"kind": kind, **facts})
    )
    call()
    return found


@pytest.mark.parametrize("text", ["x" * 300 + " 1.5 end", "epoch #3: loss 1.5", "1.5", "1.5" * 900])
def test_any_line_with_numbers_can_be_compared(text, monkeypatch):
    found = noted(monkeypatch, lambda: wrappers.printed(text))
    process = Process([event | {"line": "t.py:1"} for event in found])
    numbers = [number for of_one in comparing.printed(process).values() for number in of_one]
    assert numbers == ([] if len(text) > 900 else [1.5])


def step(line, order, **weights):
    number = next(iter(order))
    return {"kind": "step", "line": line, "order": order, "weights": weights, "optimizer": number}


def test_optimizers_that_step_in_another_order():
    """Two models, of which each process steps another one first."""
    ends = {"0.a": "1"}, {"1.a": "2"}
    events_of = [
        [step("t.py:1", {"0": []}, **ends[rank]), step("t.py:2", {"1": []}, **ends[1 - rank])]
        for rank in (0, 1)
    ]
    run = Run([Process(of_one) for of_one in events_of])
    run.apart()  # no KeyError


def test_a_judge_that_fails_is_told_and_the_others_are_heard(monkeypatch):
    def fails(run):
        raise KeyError("lr")

    def says(run):
        return judges.Finding("t.py:1", "something")

    known = [judges.Judge(ask, "run", "here", True, [], None) for ask in (fails, says)]
    monkeypatch.setattr(judges, "JUDGES", known)
    group = {"kind": "group", "line": "?", "rank": 0, "world_size": 2}
    run = Run([Process([group]), Process([group])])
    assert [one.text for one in judges.findings([run])] == ["something"]
    assert run.faults == ["KeyError: 'lr' (fails)"]


def test_a_mistake_comes_before_a_hint_of_the_same_place(monkeypatch):
    def hint(run):
        return judges.Finding("t.py:1", "perhaps", certain=False)

    def certain(run):
        return judges.Finding("t.py:1", "surely")

    known = [judges.Judge(ask, "run", "here", True, [], None) for ask in (hint, certain)]
    monkeypatch.setattr(judges, "JUDGES", known)
    group = {"kind": "group", "line": "?", "rank": 0, "world_size": 2}
    run = Run([Process([group]), Process([group])])
    assert [one.text for one in judges.findings([run])] == ["surely"]


def test_what_lies_beside_the_doctor_is_the_users():
    assert events.is_users(f"{events.HERE}_demo.py")
    assert not events.is_users(f"{events.HERE}/run.py")


@pytest.mark.parametrize(
    "text, own",
    [
        ("mp.spawn(main, nprocs=2)", True),
        ("torch.multiprocessing.spawn(main)", True),
        ("from torch.multiprocessing import spawn\nspawn(main)", True),
        ("seeds = np.random.SeedSequence(0).spawn(4)", False),
        ("respawn(worker)", False),
    ],
)
def test_a_script_that_starts_its_own_processes(text, own, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    args = argparse.Namespace(script=script, module=False, starts_its_own=False, by=None)
    assert launch.Launcher(args, 2).is_torchrun != own


@pytest.mark.parametrize("flags", [["-n", "2", "--nodes", "3"], ["-n", "0"], ["--nodes", "0"]])
def test_machines_without_a_process(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["doctor", *flags, __file__])
    with pytest.raises(SystemExit) as ended:
        command.parse_args()
    assert ended.value.code == 2 and "as many processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, refused",
    [
        ("import torch.nn", True),
        ("import torch\nfrom options import args", False),
        ("from .options import args", False),
        ("from transformers import HfArgumentParser", False),
        ("import subprocess, sys\nsubprocess.run(sys.argv[1:])", False),
        ("import argparse\nparser.add_argument('--steps-per-epoch')", False),  # may be shortened
        ("", False),
    ],
)
def test_a_flag_behind_the_script_is_refused_where_it_is_surely_none_of_its_own(
    text, refused, tmp_path, monkeypatch, capsys
):
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr("sys.argv", ["doctor", f"{tmp_path}/train.py", "--steps", "100"])
    if refused:
        with pytest.raises(SystemExit):
            command.parse_args()
        assert "put --steps before" in capsys.readouterr().err
    else:
        assert command.parse_args().flags == ["--steps", "100"]


@pytest.mark.parametrize("theirs", ["/mine", b"/mine", "", None])
def test_an_environment_of_its_own_gets_the_hook(theirs, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/site:/others")
    key = b"PYTHONPATH" if isinstance(theirs, bytes) else "PYTHONPATH"
    env = {} if theirs is None else {key: theirs}
    programs.hand_on(env)
    folders = env[key] if isinstance(env[key], str) else env[key].decode()
    assert folders.split(":")[0] == "/site"
    assert not theirs or folders.endswith(":/mine")


def process(*kinds, **more):
    """With these events: a kind, or (kind, facts)."""
    pairs = [(kind, {}) if isinstance(kind, str) else kind for kind in kinds]
    facts = {"line": "t.py:1", "made": "t.py:1", "stream": False, "batches": 1, "grad": True}
    facts |= {"trains": True, "training": True, "items": [["0:0", "1", "1"]], "number": 0}
    facts |= {"world_size": 2, "synced": None, "order": {}, "optimizer": 0, "weights": {}} | more
    return Process([facts | {"kind": kind} | own for kind, own in pairs])


def test_what_comes_after_a_validation_is_no_part_of_it():
    """A process whose batches another one sends it reads no loader when it trains."""
    evaluates = ("forward", {"trains": False, "training": False})
    (one,) = process("pass", ("batch", {"grad": False}), "over", evaluates, "backward").passes
    assert one["validated"] and not one["trained"]
    (one,) = process("pass", "batch", "over", "forward", "backward", "step").passes  # read ahead
    assert one["trained"] and one["steps"] == 1


def test_a_step_may_take_several_batches():
    """16 items in each step: two batches of 4 on two processes, four on one."""

    def run(ranks, batches):
        four = ("batch", {"items": [[f"0:{i}", "1", "1"] for i in range(4)]})
        events_of_step = [four, "backward"] * batches + ["step"]
        return Run(process("pass", *events_of_step * 2) for _ in range(ranks))

    assert comparing.batch_per_process(run(2, 2), run(1, 4)) is None
    found = comparing.batch_per_process(run(2, 1), run(1, 1))
    assert found.text == "a step takes 8 items; with one process 4"


def test_whose_a_gradient_is(monkeypatch):
    """An optimizer may call another one, which has the same weights."""
    nets = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)]
    made = [torch.optim.SGD(nets[at].parameters()) for at in (0, 0, 1)]
    monkeypatch.setattr(optimizers, "OPTIMIZERS", [weakref.ref(one) for one in made])
    monkeypatch.setattr(optimizers, "NAMES", {id(nets[1].bias): (0, "bias")})
    monkeypatch.setattr(optimizers, "gradients", {})
    assert optimizers.gradient_of(nets[0].bias) == (None, [])
    for net in nets:
        net(torch.ones(2)).sum().backward()
    optimizers.gradients.clear()
    assert optimizers.gradient_of(nets[0].bias.grad) == ("own", [0, 1])
    assert optimizers.gradient_of(nets[1].bias.grad) == ("wrapped", [2])
    assert optimizers.gradient_of(torch.ones(15)) == ("own", [0, 1, 2])
    assert optimizers.gradient_of(torch.ones(2)) == (None, [])


def test_counts_of_weights_are_the_same_but_for_rounding():
    rows = [[{"counted": 5.000000476837158, "line": "t.py:1"}, {"counted": 5.0}]] * 3
    assert training.own_count(rows, None) is None
    rows = [[{"counted": 5.0, "line": "t.py:1"}, {"counted": 3.5}]] * 3
    assert training.own_count(rows, None).text == "the means of the loss are over 5 and 3.5 items"


def test_a_local_rank_with_which_a_process_joins():
    wrong, right = ("joins", {"rank": 0, "number": 1}), ("joins", {"rank": 1, "number": 1})
    assert comparing.joins_as_local_rank(Run([process(right)])) is None
    found = comparing.joins_as_local_rank(Run([process(wrong)]))
    assert found.text == "it joins as rank 0, and its RANK is 1: is it LOCAL_RANK?"


def test_files_that_two_processes_write():
    """But for those of which a mistake is told: torch.save() of all."""
    log, own = ("writes", {"path": "/x/log.csv"}), ("writes", {"path": "/x/log0.csv"})
    saves = ("save", {"path": "/x/log.csv"})
    found = saving.all_write(Run([process(log, own), process(log)]))
    assert found.text == "2 processes write log.csv"
    assert saving.all_write(Run([process(log, saves), process(log)])) is None
    assert saving.all_write(Run([process(log), process(own)])) is None


def test_of_a_helper_of_a_rank_nothing_is_noted(monkeypatch):
    """It is a fork: the workers of its loader would write into the events of the rank."""
    monkeypatch.setattr(events.RECORD, "pid", os.getpid())
    assert processes.Inside(lambda: events.RECORD.pid, helps=True)() is None
    assert not processes.started


class Kept:
    pass


@pytest.mark.parametrize("over", ["{'a', 'b'}", "names", "sorted(names)"])
def test_a_loop_over_a_set_is_seen_and_no_variable_is_kept(over, tmp_path, monkeypatch):
    """The line is in a function of a script, which frees what it has by `del`."""
    script = tmp_path / "train.py"
    script.write_text(
        "def main(box, look, weak):\n"
        "    kept = box.pop()\n"
        "    names, found = {'a', 'b'}, []\n"
        f"    for name in {over}:\n"
        "        found.append(look(1))\n"
        "    del kept\n"
        "    return found, weak()\n"
    )
    monkeypatch.setattr(events.RECORD, "script", str(script), raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    here = {}
    exec(compile(script.read_text(), str(script), "exec"), here)
    monkeypatch.setattr(sets, "is_users", lambda file: file == str(script))
    kept = [Kept()]
    weak = weakref.ref(kept[0])
    found, left = here["main"](kept, sets.loop_over_a_set, weak)
    line = None if "sorted" in over else "train.py:4"
    assert found == [line] * 2 and left is None


def test_who_failed_before_a_validation_is_not_said_to_miss_it():
    """Rank 1 fails in its training; or it has gone on to train, while rank 0 validates alone."""
    trains = ("forward", {"sends": True, "trains": True})
    validates = ("forward", {"sends": True, "trains": False, "line": "t.py:9"})
    ended = ("end", {"error": "ValueError: its own"})
    assert ending.wrapped_alone(Run([process(trains, validates), process(trains, ended)])) is None
    found = ending.wrapped_alone(Run([process(trains, validates), process(trains, trains, ended)]))
    assert found.line == "t.py:9"


def test_who_did_not_come_to_a_validation_is_not_said_to_leave_out_its_part():
    """Rank 1 waits in its training, or has failed in it, while rank 0 has read its part."""
    facts = {"size": 4, "base": 4, "length": 2, "num_replicas": 2, "drops": False, "grad": False}
    half = ("batch", facts | {"items": [["0:0", "1", "1"], ["0:2", "1", "1"]]})
    reads = [("pass", facts), half, ("over", facts)]
    trains = ("forward", {"trains": True})
    well, failed = (("end", {"error": error}) for error in ("", "RuntimeError: closed by peer"))
    for ends in ([], [failed]):
        hangs = Run([process(*reads, *ends, **facts), process(trains, *ends)])
        assert missing.never_validated(hangs) is None
    found = missing.never_validated(Run([process(*reads, well, **facts), process(well)]))
    assert found.text == "2 of 4 items are never validated" and found.certain


def test_a_word_that_is_passed_on_orders_a_save_and_a_load():
    """From rank 0 by a message to rank 1, and from there through a store to rank 2."""
    file = {"path": "/x/first.pth", "waits": False}
    sends, receives = ("sends", {"peer": 1}), ("receives", {"peer": 0})
    tells = ("store", {"keys": ["of/saved"], "tells": True, "hears": False})
    hears = ("store", {"keys": ["saved"], "tells": False, "hears": True})
    passes_on, loads = process(receives, tells), process(hears, ("load", file))
    saves = process(("save", file), sends)
    assert saving.read_too_early(Run([saves, passes_on, loads])) is None
    for wrong in (
        [saves, process(tells, receives), loads],
        [process(sends, ("save", file)), passes_on, loads],
    ):
        found = saving.read_too_early(Run(wrong))
        assert found.text.startswith("it may be read before another process has saved it")
        assert found.certain


@pytest.mark.parametrize(
    "code, waits",
    [
        ("while not os.path.exists('saved'):\n    time.sleep(1)\n", True),
        ("with FileLock('data.lock'):\n", True),
        ("ready = multiprocessing.Event()\n", True),
        ("start = torch.cuda.Event(enable_timing=True)\n", False),
        ("# load it while the file exists\ntime.sleep(1)\n", False),
    ],
)
def test_a_script_with_a_wait_of_its_own(code, waits, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(code)
    assert saves.may_wait(str(path)) is waits


def test_the_first_of_several_lines_is_told():
    """Not another one in each run of the doctor, as a set of strings would have it."""
    places = [f"t.py:{number}" for number in range(1, 30)]
    whole, half = (
        process(
            *[
                ("prints", {"line": place, "words": ["loss ", ""], "numbers": [number]})
                for place in places
                for number in numbers
            ]
        )
        for numbers in (["1.5", "2.5"], ["0.75", "1.25"])
    )
    assert [one.line for one in comparing.other_numbers(Run([half, half]), Run([whole]))] == [
        "t.py:1"
    ]
    rates = [("rate", {"line": place}) for place in places]
    assert steps.scheduled(Run([process(*rates), process()])) == "t.py:1"
    run = Run([process(*[("rate", {"line": f"{name}/t.py:1"}) for name in "edcba"])])
    assert recorded.as_noted(run, "t.py:1") == "e/t.py:1"


def test_who_failed_before_it_joined_a_group_is_told_where_no_rank_failed():
    """As where mp.spawn starts two processes, each of which is told that it is the only one."""
    raised = "RuntimeError: rank < size. 1 vs 1"
    run = Run([process("group", ("end", {"error": None}))])
    parent = process(("end", {"error": "ProcessRaisedException: \n\n-- Process 1"}))
    run.outside = [process(("end", {"error": raised, "line": "t.py:9"})), parent]
    assert report.failed([run]) == [f"t.py:9  a process that joined no group failed: {raised}"]
    run[0].events[-1]["error"] = "ValueError: its own"
    assert report.failed([run]) == ["t.py:1  rank 0 failed: ValueError: its own"]


@pytest.mark.parametrize("aborted, code", [(False, 3), (True, 0)])
def test_a_command_that_fails_after_its_processes_have_ended(aborted, code, capsys):
    """Such as `bash train.sh`, whose next line fails; gloo may abort while Python ends."""
    step = ("step", {"weights": {}, "parts": {}, "ours": 1})
    run = Run([process("group", step, ("end", {"error": ""})) for _ in range(2)])
    run.code, run.aborted = 137, aborted
    assert report.tell([run], [], 1.0, [], argparse.Namespace(forms=[], script="t.py")) == code
    assert ("it ended with exit code 137" in capsys.readouterr().out) == (code == 3)


def test_groups_of_one_process_each_are_not_compared():
    alone = [Run([process("group", "step", world_size=1)]) for _ in range(2)]
    (said,) = report.not_seen(alone, failed=False)
    assert said == "each process joins a group of its own: there is nothing to compare"
    assert not report.not_seen([Run([process("group", "step")] * 2)], failed=False)


def test_a_group_of_one_process_is_not_called_right(capsys):
    """As of --nproc-per-node=$(nvidia-smi -L | wc -l) on one GPU."""
    facts = {"weights": {}, "parts": [], "ours": 1, "error": "", "world_size": 1}
    run = Run([process("group", "step", "end", **facts)])
    assert report.tell([run], [], 1.0, [], argparse.Namespace(forms=[], script="t.py")) == 2
    assert " the group has one process: there is nothing to compare. " in capsys.readouterr().out


def test_what_some_of_a_group_do_is_no_certain_mistake(monkeypatch):
    """Those on a machine whose events are not here may read the items that are missed."""
    known = [judges.Judge(lambda run: judges.Finding("t.py:1", "x"), "run", "here", True, [], None)]
    monkeypatch.setattr(judges, "JUDGES", known)
    part, whole = ([Run([process("group", "step", world_size=n)] * 2)] for n in (4, 2))
    assert [one.certain for runs in (part, whole) for one in judges.findings(runs)] == [False, True]
    assert report.not_seen(part, failed=False)[0].startswith("of the 4 processes of a group 2 were")
    assert not report.not_seen(whole, failed=False)


def test_groups_of_other_sizes_are_not_mixed(tmp_path):
    """mp.spawn with two processes, then with four."""
    for pid, (rank, size) in enumerate([(0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]):
        event = {"kind": "group", "line": "?", "rank": rank, "world_size": size}
        (tmp_path / f"{pid}.jsonl").write_text(json.dumps(event) + "\n")
        os.utime(tmp_path / f"{pid}.jsonl", (pid, pid))
    assert [(len(run), run.size) for run in read(tmp_path, {})] == [(2, 2), (4, 4)]


def test_a_script_that_failed_is_not_asked_whether_it_has_nothing_to_train():
    run = Run([process("group", "load")] * 2)
    assert "leave nothing to train?" in report.not_seen([run], failed=False)[0]
    assert report.not_seen([run], failed=True) == ["no step of an optimizer was seen"]


@pytest.mark.full
def test_python_s_random_numbers_have_one_name_in_all_processes(tmp_path):
    """hash(None) differs from process to process, before Python 3.12."""
    code = "import random, torch; random.seed(0); from doctor.wrappers.optimizers import *\n"
    code += 'torch.manual_seed(0); print(random_states(torch)["random"])'
    env = {"PYTHONPATH": str(ROOT)}
    states = {start([PYTHON, "-c", code], tmp_path, env=env) for _ in range(2)}
    assert len(states) == 1, states


def test_bits_are_the_same_in_any_memory_format_and_for_no_other_tensor():
    images = torch.randn(4, 3, 5, 5)
    assert checksum(images) == checksum(images.to(memory_format=torch.channels_last))
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        one, other = torch.ones(2, 4).to(kind), torch.ones(2, 4).to(kind)
        other[1, 2] = 2
        assert checksum(one[:, ::2]) == checksum(one[:, 1::2]) != checksum(other[:, ::2])
    assert checksum(torch.ones(2, dtype=torch.bool)) != checksum(torch.zeros(2, dtype=torch.bool))


def test_bits_of_each_item():
    """The same in another place of a batch, and in any memory format."""
    images = torch.randn(4, 3, 5, 5)
    images[3] = images[1]
    found = checksums(images)
    assert found == checksums(images.to(memory_format=torch.channels_last))
    assert found == checksums(images[[1, 0, 2, 3]][[1, 0, 2, 3]])
    assert found[1] == found[3] and len({*found}) == 3
    assert len({*checksums(torch.eye(3).to_sparse())}) == 1  # each has a single 1
    for empty in (torch.ones(0, 3), torch.ones(2, 0)):
        assert len(checksums(empty)) == len(empty)


@pytest.mark.parametrize("signal, word", [(9, "SIGKILL"), (None, "without an exception")])
def test_who_died_first_is_said_first(signal, word):
    """Of the other, which the launcher has ended then, the signal is not known."""
    group = {"kind": "group", "line": "t.py:3", "rank": 0, "world_size": 2}
    ended = Process([group], {"signal": None, "order": 1})
    first = Process([group | {"rank": 1}], {"signal": signal, "order": 0})
    said = report.failed([Run([ended, first])])
    assert "rank 1 " in said[0] and word in said[0] and len(said) == 2


def test_a_record_of_another_kind_is_said():
    """And the report goes on."""
    call = {"profiling_name": "gloo:all_reduce", "frames": 5}
    group = {"kind": "end", "line": "t.py:3", "rank": 0}
    ranks = [Process([group], calls={"entries": [call]}) for _ in range(2)]
    (said,) = report.recorded(Run(ranks))
    assert said.startswith("torch's flight recorder could not be read: TypeError: ")


def test_a_step_without_a_rate_and_whose_gradients_were_zeroed(monkeypatch):
    """Adafactor's rate is None. zero_grad() of a model counts for its own optimizer, any time."""
    from doctor.wrappers import optimizers

    seen = []
    monkeypatch.setattr(optimizers, "note", lambda kind, **facts: seen.append(facts))
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    optimizer.param_groups[1]["lr"] = None
    optimizers.made(None, optimizer)
    for zeroes in (None, model, other):
        if zeroes:
            optimizers.zero_of_model(zeroes)
        optimizers.step(torch, optimizer)
        optimizers.leave_step(optimizer)
    assert [event["zeroed"] for event in seen] == [0, 1, 0]
    assert seen[0]["lr"] == [0.5, None]


# The script chooses its GPU, and forks; CUDA itself must not have been asked before.
CHOOSES = """import os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
print("sees", torch.cuda.device_count(), asked)
"""
MADE_UP = """import sys, torch
torch.backends.cuda.is_built = torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = lambda: 2
torch._C._cuda_getDeviceCount = torch._C._accelerator_getAccelerator = lambda: asked.append(1) or 2
import builtins
builtins.asked = asked = []
from doctor import process
sys.argv = ["doctor", "train.py"]
process.be_examined()
"""


@pytest.mark.full
@pytest.mark.parametrize("visible, gpus", [("0,1", 2), ("MIG-1", 1)])
def test_cuda_is_not_asked_before_the_script(visible, gpus, tmp_path):
    (tmp_path / "train.py").write_text(CHOOSES)
    (tmp_path / "events").mkdir()
    settings = {
        "folder": str(tmp_path / "events"),
        "script": str(tmp_path / "train.py"),
        "nodes": 1,
    }
    settings |= {"patience": 60, "steps": None, "launched": False}
    env = {"DOCTOR": json.dumps(settings), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": visible}
    output = start([PYTHON, "-c", MADE_UP], tmp_path, env=env)
    assert "sees 1 []" in output, output
    (events,) = (tmp_path / "events").glob("*.jsonl")
    assert json.loads(events.read_text().splitlines()[0])["gpus"] == gpus


def test_weights_are_looked_at_more_rarely_with_time():
    from doctor.wrappers.optimizers import is_looked_at

    looked = [step for step in range(1, 151) if is_looked_at(step)]
    assert looked == [*range(1, 21), 25, 30, 35, 40, 45, 50, 100, 150]


def standing(where, times, **more):
    facts = {"kind": "stands", "line": "a.py:1", "where": where, "busy": False, "computes": False}
    return facts | {"times": times, "outside": False} | more


BEHIND = {"kind": "batch", "line": "a.py:9"}
END = {"kind": "end", "line": "?"}


@pytest.mark.parametrize(
    "events, ages, said",
    [
        # All wait for a file; one of them computes.
        ([standing(None, 40)] * 2, [0, 0], "it had stood still for 40 s at a.py:1"),
        ([standing(None, 39), standing(None, 40)], [0, 0], ""),
        ([standing(None, 99), standing(None, 99, computes=True, busy=True)], [0, 0], ""),
        # One stands in a call that lets no other thread of its process run.
        ([standing("barrier", 50), BEHIND], [0, 50], "it had stood still for 40 s"),
        ([standing("barrier", 50), BEHIND], [0, 39], ""),
        # The script has ended, its process has not.
        ([END] * 2, [9, 20], "the script has ended, and something keeps its process"),
        ([END] * 2, [7, 20], ""),
        # mp.spawn's parent waits for those that it has started.
        ([standing(None, 99, outside=True), BEHIND], [0, 0], ""),
    ],
)
def test_every_hang_ends(events, ages, said, tmp_path):
    for pid, (event, age) in enumerate(zip(events, ages, strict=True)):
        path = tmp_path / f"{pid}.jsonl"
        path.write_text(json.dumps(event) + "\n")
        os.utime(path, (time.time() - age,) * 2)
    answer = launch.stands_still(tmp_path, 1, gone=set())
    assert answer.startswith(said) and bool(answer) == bool(said)


def test_one_that_has_just_ended_may_have_let_the_others_go_on(tmp_path):
    """It came through a barrier; the other has had no time yet to say that it did, too."""
    ended = {"kind": "end", "line": "?", "outside": False}
    waits = standing("barrier", 1)
    for pid, event in ((1, ended), (2, waits | {"outside": False})):
        (tmp_path / f"{pid}.jsonl").write_text(json.dumps(event) + "\n")
    assert not launch.stands_still(tmp_path, 8, gone=set())
    os.utime(tmp_path / "1.jsonl", (0, 0))
    assert launch.stands_still(tmp_path, 8, gone=set()).startswith("it had stood still for 8 s")
