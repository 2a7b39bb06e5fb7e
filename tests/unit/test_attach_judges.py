"""What doctor --attach makes of a job that was looked at: made-up processes, stacks and ranks."""

import time
import types

import pytest

from doctor.attach import command, look, places, ranks, sight, source, spawned
from doctor.attach.judges import findings


def around(monkeypatch, text):
    """What is known of the line that holds HERE."""
    lines = text.split("\n")
    monkeypatch.setattr(source, "lines_of", lambda pid, file: lines)
    line = 1 + next(number for number, one in enumerate(lines) if "HERE" in one)
    return source.Around(1, "train.py", line)


# Which all ranks enter, or which speak of another rank.
ALL = """RANK != -1
not RANK == -1
-1 != rank
rank > -1
local_rank is not None
rank >= 0
0 <= rank
lora_rank > 0
low_rank
torch.linalg.matrix_rank(x) > 2
use_ranking_loss
reranker is None"""
SOME = """rank == 0
not rank
0 == rank
rank > 0
RANK in (-1, 0)
rank is None or rank == 0
args.distributed and dist.get_rank() == 0
local_rank < 1
is_main_process()"""


@pytest.mark.parametrize("test", ALL.split("\n") + SOME.split("\n"))
def test_a_condition_that_some_ranks_enter(test, monkeypatch):
    found = around(monkeypatch, f"if {test}:\n    pass\n    HERE()\n")
    assert bool(found.under) == (test in SOME.split("\n")), found.under
    other = around(monkeypatch, f"if {test}:\n    pass\nelse:\n    HERE()\n")
    assert bool(other.under) == bool(found.under)


def test_a_guard_that_raises_is_no_condition(monkeypatch):
    text = "def main():\n    if local_rank >= count:\n        {}\n    HERE()\n"
    assert around(monkeypatch, text.format("raise ValueError")).under == ""
    assert around(monkeypatch, text.format("return")).under.startswith("if not local_rank >= count")


# ---- The processes of a job


def process(pid, parent=1, command="python train.py", torch=True, **env):
    return ranks.Process(pid, parent, env, command, True, torch, False)


def machine(*processes):
    return {one.pid: one for one in processes}


LIGHTNING = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
LIGHTNING |= {"NODE_RANK": "0"}


def test_a_launcher_that_gives_local_ranks():
    """Rank 0 starts the others; its own variables are set after its start, in itself."""
    spawned = "python -c from multiprocessing.spawn import spawn_main"
    found = machine(
        process(10),
        process(11, 10, LOCAL_RANK="1", **LIGHTNING),
        process(12, 10, LOCAL_RANK="2", **LIGHTNING),
        process(13, 12, LOCAL_RANK="2", **LIGHTNING),  # loaders' workers
        process(14, 10, spawned, LOCAL_RANK="0", **LIGHTNING),
    )
    (job,) = ranks.jobs_of(found)
    assert [(one.pid, one.rank, one.size, one.here) for one in job.ranks] == [
        (10, 0, 3, 3),
        (11, 1, 3, 3),
        (12, 2, 3, 3),
    ]
    assert command.job_of(13, found, [job]) == job
    # One that started them all, and is none of them.
    own = {name: text for name, text in LIGHTNING.items() if name != "NODE_RANK"}
    numbers = [process(11 + n, 10, LOCAL_RANK=str(n), **own) for n in range(3)]
    (job,) = ranks.jobs_of(machine(process(10), *numbers))
    assert [one.pid for one in job.ranks] == [11, 12, 13]
    # Its rank 0 is gone.
    (job,) = ranks.jobs_of(machine(process(10), *numbers[1:]))
    assert [one.pid for one in job.ranks] == [12, 13]
    # The numbers on another machine are not known.
    far = LIGHTNING | {"NODE_RANK": "1"}
    assert ranks.jobs_of(machine(process(10, LOCAL_RANK="1", **far))) == []


def test_of_how_many_an_unknown_process_is():
    (rank,) = command.job_of(10, machine(process(10)), []).ranks
    assert (rank.size, rank.here) == (None, None)
    (rank,) = command.job_of(10, machine(process(10, WORLD_SIZE="4")), []).ranks
    assert rank.size is None
    (rank,) = command.job_of(10, machine(process(10, WORLD_SIZE="1")), []).ranks
    assert rank.size == 1


def test_whom_it_looks_at(monkeypatch):
    """A look stops a process: those of others are left alone, and --nonblocking holds for all."""
    seen = []

    class Look:
        error, thread, stack = "it was stopped", None, [("torch/multiprocessing/spawn.py", "f", 1)]

        def __init__(self, pid, nonblocking):
            seen.append((pid, nonblocking))

    monkeypatch.setattr(spawned, "Look", Look)
    monkeypatch.setattr(spawned, "number_spawned", lambda *_: 2)
    found = machine(
        process(10, torch=False),  # mp.spawn's parent and ranks
        *(process(pid, 10) for pid in (11, 12)),
        process(20, torch=False),  # another's
        *(process(pid, 20) for pid in (21, 22)),
        process(30, RANK="0", WORLD_SIZE="1"),
    )
    for what, looked in {"30": [], "11": [11, 12], "10": [11, 12], "21": [21, 22]}.items():
        seen.clear()
        args = command.parse_args([what, "--nonblocking"])
        command.chosen(args, found)
        assert seen == [(pid, True) for pid in looked]
    seen.clear()
    with pytest.raises(ValueError, match="several jobs"):
        monkeypatch.setattr(command.tell, "jobs", lambda jobs: "several jobs")
        command.chosen(command.parse_args([]), found)
    assert [pid for pid, _ in seen] == [11, 12, 21, 22]


# ---- What is said of ranks


def seen(number, kind=None, state="stands", line=5, **more):
    known = {"rank": number, "size": 2, "here": 2, "local": number, "pid": 100 + number}
    known |= {"state": state, "kind": kind, "words": kind or "", "file": "train.py", "line": line}
    known |= {"function": "main", "text": "", "under": "", "when": "", "without": False}
    known |= {"leaves": [], "loops": [], "times": 4, "sure": True, "gpu": False, "busy": False}
    return known | {"workers": [], "children": 0, "host": "here", "error": ""} | more


def said(*ranks):
    (answer,) = findings(sight.joined("python train.py", ranks))
    return answer


def test_one_of_how_many():
    for kind in ("backward", "message", "group", "join"):
        answer = said(seen(0, kind, size=None, here=None))
        assert answer.text == f"it waits in {kind} at train.py:5; its other ranks were not found"
        assert answer.hangs and not answer.mistake
    assert said(seen(0, "backward", size=1, here=1)).text.startswith("all ranks wait in backward")


def test_on_a_gpu_not_all_that_stays_is_a_hang():
    """rank 0 reads the loss in a script without functions, the other is in backward."""
    parts = seen(0, "gpu", gpu=True, sure=False), seen(1, "backward", gpu=True, sure=False, line=4)
    answer = said(*parts)
    assert not answer.hangs and not answer.mistake and "they compute, or stand" in answer.text
    answer = said(*(one | {"sure": True} for one in parts))
    assert answer.mistake and "for gradients that do not come" in answer.text


@pytest.mark.parametrize(
    ("function", "file", "variables", "sure"),
    [
        ("backward", "torch/autograd/__init__.py", [], False),
        ("backward", "torch/autograd/__init__.py", ["loss"], True),
        ("init_process_group", "torch/distributed/distributed_c10d.py", [], True),
    ],
)
def test_what_is_sure_on_a_gpu(function, file, variables, sure):
    """Not that a loop without variables stands; but nobody joins a job in a loop."""
    stack = [(f"/lib/python3.11/site-packages/{file}", function, 1), ("/me/train.py", "f", 5)]
    frames = [{"filename": "/me/train.py", "locals": variables}]
    one = types.SimpleNamespace(stack=stack, thread={"frames": frames}, error="", sum="")
    looks = [types.SimpleNamespace(**vars(one), at=n, cpu=n) for n in (0, 1)]
    found = machine(process(10)._replace(gpu=True))
    known = look.seen(ranks.Rank(10, 0, 2, 0, 2), looks, found)
    assert (known["state"], known["busy"], known["sure"]) == ("stands", True, sure)


def test_a_long_call_on_the_processor_of_a_gpus_machine():
    waits = seen(1, "collective", gpu=True, line=6)
    answer = said(seen(0, gpu=True, busy=True), waits)
    assert not answer.hangs and answer.text.startswith("rank 0 computes at train.py:5, or a GPU")
    answer = said(seen(0, gpu=True), waits)
    assert answer.hangs and "where nothing is computed" in answer.text


def test_a_wait_for_an_asynchronous_call():
    for line in ("dist.all_reduce(x, async_op=True).wait()", "request.wait()"):
        assert places.meaning([("/home/me/train.py", "main", 5)], text=line)[0] == "work"
    assert places.meaning([("/home/me/train.py", "main", 5)], text="os.wait()")[0] is None
    for file, function, kind in (
        ("torch/distributed/pipelining/schedules.py", "_wait_batch_p2p", "work"),
        ("torch/distributed/_functional_collectives.py", "wait_tensor", "collective"),
    ):
        stack = [(f"/lib/python3.11/site-packages/{file}", function, 1), ("/me/train.py", "f", 5)]
        assert places.meaning(stack)[0] == kind
    for lines in ((5, 5), (5, 7)):  # of a send and its recv, too, the lines differ
        answer = said(*(seen(n, "work", line=line) for n, line in enumerate(lines)))
        assert answer.hangs and not answer.mistake and answer.text.startswith("no rank answers: ")
        far = (seen(n, "work", line=line, size=3, here=2) for n, line in enumerate(lines))
        assert said(*far).text.startswith("all that are here wait")


def test_ranks_that_stand_elsewhere():
    answer = said(seen(0), seen(1))
    assert answer.text == (
        "ranks 0 and 1 are (train.py:5): in no call that is known to wait for another rank"
    )


WORKER = {"pid": 7, "file": "train.py", "line": 9, "text": "", "disk": False, "starts": False}


@pytest.mark.parametrize(
    ("busy", "children", "text"),
    [
        (True, 1, "its worker 7 is at train.py:9; rank 1 waits for it: its workers compute, a"),
        (False, 1, "its worker 7 stands at train.py:9; rank 1 waits for it"),
        (None, 1, "no worker was found among its processes (1); rank 1 waits for it"),
        (None, 0, "it has no worker that lives; rank 1 waits for it"),
    ],
)
def test_a_loader(busy, children, text):
    workers = [] if busy is None else [WORKER | {"busy": busy}]
    answer = said(seen(0, "loader", workers=workers, children=children), seen(1, "backward"))
    assert text in answer.text and answer.hangs is not busy


class Looked:
    """Of a worker: at each look it has used more of its processor, or is in another item."""

    count = 0

    def __init__(self, pid, nonblocking):
        assert nonblocking
        Looked.count += 1
        self.cpu, self.at = Looked.count * (Looked.does == "computes"), time.monotonic()
        self.sum = Looked.count * (Looked.does == "moves")
        inside = [f"/torch/utils/data/_utils/{name}.py" for name in ("fetch", "worker")]
        inside = ["/multiprocessing/spawn.py"] if Looked.starts else inside
        self.stack = [(file, "f", 9) for file in ("/me/train.py", *inside)]


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("does", ["stands", "computes", "moves"])
def test_a_worker_that_computes(does, starts, monkeypatch):
    """Or that still imports, where it is not a fork."""
    monkeypatch.setattr(look, "Look", Looked)
    monkeypatch.setattr(look, "BETWEEN", 0.05)
    monkeypatch.setattr(Looked, "does", does, raising=False)
    monkeypatch.setattr(Looked, "starts", starts, raising=False)
    helper = process(12, 10, f"python -c from {ranks.HELPER}")
    monkeypatch.setattr(ranks, "processes", lambda: machine(process(10), process(11, 10), helper))
    count, (worker,) = look.workers(10, nonblocking=True)
    assert (count, worker["pid"], worker["line"], worker["busy"]) == (1, 11, 9, does != "stands")
    assert worker["starts"] is starts
    answer = said(seen(0, "loader", workers=[worker], children=1), seen(1, "backward"))
    assert answer.hangs is (does == "stands")
    assert ("its workers still start" in answer.text) is (starts and does != "stands")
