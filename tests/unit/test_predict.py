"""predict.py: its formulas at their limits, what it says, and the commands of the pages."""

import json
import math
import os
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import PYTHON, ROOT
from torchvision.models import get_model, resnet18

import predict
from benchmarks import published
from tests.docs.copies import joined

# 25 MB of gradients on 8 nodes, 100 ms a pass; a network of 10 Gbit/s that costs nothing else.
USUAL = predict.Setting(
    nodes=8,
    gpus=1,
    images=32,
    forward=0.03,
    backward=0.06,
    rest=0.01,
    weights=6.25e6,
    between_rate=1.25e9,
    between_latency=0.0,
    within_rate=math.inf,
    within_latency=0.0,
)
FREE = replace(USUAL, between_rate=math.inf)
SLOW = replace(USUAL, between_rate=1.25e7)
COMPUTING = 0.1
STRATEGIES = ["ddp", "fsdp", "hsdp"]


# ---- The model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_what_costs_nothing_takes_no_time(strategy, backend):
    for nodes, gpus in ((1, 1), (1, 8), (16, 4)):
        s = replace(FREE, strategy=strategy, backend=backend, nodes=nodes, gpus=gpus)
        assert predict.step_seconds(s) == pytest.approx(COMPUTING)
        assert predict.speed(s) == pytest.approx(nodes * gpus * 320)
        assert predict.linear(s) == pytest.approx(1) and predict.limited_by(s) == "computing"


def test_a_ring_sends_what_the_page_says():
    """102 MB on 8 processes at 10 Gbit/s: 179 MB, 143 ms (docs/scaling.md rounds)."""
    seconds = predict.all_reduce(USUAL, 4 * 25557032, 8, 1)
    assert seconds == pytest.approx(2 * 7 / 8 * 102.2e6 / 1.25e9, rel=1e-3)
    assert predict.all_reduce(USUAL, 1e6, 1, 1) == 0
    fast = replace(USUAL, within_rate=1e11)  # a ring crosses each node's link once
    assert predict.all_reduce(fast, 1e8, 4, 8) == pytest.approx(2 * 31 / 32 * 1e8 / 1.25e9)


def test_between_two_nodes_a_tree_sends_each_byte_once():
    """Not with gloo, and not faster than what is inside the nodes."""
    fast = replace(USUAL, within_rate=1e11)
    assert predict.all_reduce(fast, 1e8, 2, 8) == pytest.approx(1e8 / 1.25e9, rel=0.01)
    assert predict.all_reduce(fast, 1e8, 2, 1) == pytest.approx(1e8 / 1.25e9, rel=0.01)
    same = replace(fast, within_rate=1.25e9)
    assert predict.all_reduce(same, 1e8, 2, 8) == pytest.approx(2 * 15 / 16 * 1e8 / 1.25e9)
    gloo = replace(fast, backend="gloo")
    assert predict.all_reduce(gloo, 1e8, 2, 8) == pytest.approx(2 * 15 / 16 * 1e8 / 1.25e9)


def test_small_messages_take_a_tree_with_nccl_alone():
    far = replace(USUAL, between_latency=1e-3, nodes=64)
    assert predict.all_reduce(far, 4, 64, 1) == pytest.approx(2 * 6 * 1e-3, rel=1e-3)
    gloo = replace(far, backend="gloo")
    assert predict.all_reduce(gloo, 4, 64, 1) == pytest.approx(2 * 63 * 1e-3, rel=1e-3)


def test_ddp_hides_what_it_can():
    """The network's time and that of the backward pass lie over each other, but for the ends."""
    network = predict.all_reduce(SLOW, 25e6, 8, 1)
    step = predict.step_seconds(SLOW)
    first = predict.buckets(SLOW)[0][1] * SLOW.backward
    assert step == pytest.approx(0.03 + first + network + 0.01)
    fast = replace(USUAL, bucket_size=1e6)
    (last, _), hidden = predict.buckets(fast)[-1], predict.step_seconds(fast) - COMPUTING
    assert hidden == pytest.approx(predict.all_reduce(fast, last, 8, 1))


def test_each_bucket_costs_a_call():
    free = replace(SLOW, bucket_size=1e6)
    more = predict.step_seconds(replace(free, call=0.001)) - predict.step_seconds(free)
    calls = len(predict.buckets(free))
    assert calls >= 15 and more == pytest.approx(calls / 1000, abs=0.001)


def test_buckets_are_those_of_ddp():
    """The first is smaller where no size was given. In bf16 they are the same, half as large."""
    sizes = [4 * weight.numel() for weight in resnet18().parameters()][::-1]
    weights = [torch.empty(size // 4) for size in sizes]
    ready = tuple((size, (i + 1) / len(sizes)) for i, size in enumerate(sizes))
    usual = replace(USUAL, weights=sum(sizes) / 4, ready=ready)
    small = 5 * predict.MEBI
    for s, limits in (
        (usual, [predict.FIRST_BUCKET, predict.BUCKET]),
        (replace(usual, bucket_size=small), [small]),
    ):
        theirs, _ = dist._compute_bucket_assignment_by_size(weights, limits)
        ours, halves = predict.buckets(s), predict.buckets(replace(s, gradient_bytes=2))
        assert [size for size, _ in ours] == [sum(sizes[i] for i in bucket) for bucket in theirs]
        assert halves == [(size / 2, share) for size, share in ours]


def test_accumulation_sends_once():
    step = predict.step_seconds(replace(SLOW, accumulate=4))
    assert step == pytest.approx(predict.step_seconds(SLOW) + 3 * 0.09)


def test_fsdp_sends_half_as_much_again():
    slow = replace(SLOW, weights=1e8, units=100)
    ddp, fsdp = (predict.step_seconds(replace(slow, strategy=s)) for s in ("ddp", "fsdp"))
    assert fsdp / ddp == pytest.approx(1.5, rel=0.02)
    half = replace(slow, strategy="fsdp", weight_bytes=2)
    assert predict.step_seconds(half) / ddp == pytest.approx(1, rel=0.02)


def test_gloo_waits_for_each_part_of_fsdp():
    s = replace(USUAL, strategy="fsdp", backend="gloo")
    half = predict.all_reduce(s, 25e6, 8, 1) / 2
    assert predict.step_seconds(s) == pytest.approx(COMPUTING + 3 * half)
    assert predict.step_seconds(replace(s, backend="nccl")) < COMPUTING + 2 * half
    assert predict.step_seconds(replace(s, scatter=2.0)) == pytest.approx(COMPUTING + 4 * half)


def test_hsdp_sends_only_gradients_between_nodes():
    s = replace(SLOW, gpus=4, within_rate=1e11, strategy="hsdp", weights=1e8, units=100)
    between = predict.all_reduce(s, 4e8, 8, 1)
    assert predict.step_seconds(s) == pytest.approx(between, rel=0.02)
    assert predict.speed(s) > 1.3 * predict.speed(replace(s, strategy="fsdp"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_is_never_better_than_linear_and_faster_is_never_slower(strategy):
    for nodes in (1, 2, 3, 8, 100):
        for gpus in (1, 4):
            s = replace(SLOW, strategy=strategy, nodes=nodes, gpus=gpus, within_rate=1e10)
            assert predict.linear(s) <= 1 + 1e-9
            for better in ({"between_rate": 1e9}, {"gradient_bytes": 2}, {"loader": math.inf}):
                worse = replace(s, call=1e-4, loader=1e4)
                assert predict.speed(replace(worse, **better)) >= predict.speed(worse) - 1e-9


LIMITS = {
    "computing": replace(USUAL, bucket_size=1e6),
    "network": SLOW,
    "latency": replace(FREE, between_latency=0.01, backend="gloo"),
    "loader": replace(FREE, loader=100),
    "slow node": replace(FREE, slow_node=1.5),
    "uneven steps": replace(FREE, uneven=0.1),
    "failures": replace(FREE, uneven=0.1, failures=1 / 86400, lost=3600.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_it_names_what_limits(name):
    s = LIMITS[name]
    assert predict.limited_by(s) == name
    if name == "loader":
        assert predict.speed(s) == pytest.approx(8 * 100)
    if name == "slow node":
        assert predict.step_seconds(s) == pytest.approx(1.5 * COMPUTING)
    if name == "uneven steps":  # of eight draws the largest lies 1.42 deviations above the mean
        assert predict.step_seconds(s) == pytest.approx(1.142 * COMPUTING, rel=0.01)


REMEDIES = {
    "twice the loader workers": replace(FREE, loader=100),
    "another node for the slow one": replace(FREE, slow_node=3),
    "HSDP": replace(SLOW, strategy="fsdp", gpus=8, within_rate=1e12, weight_bytes=4),
    "4 passes a step (accumulation)": replace(SLOW, between_rate=1e6),
    "half as much lost by a failure (checkpoints, restart)": replace(
        FREE, failures=1 / 86400, lost=86400.0
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_it_tries_each_remedy_and_names_the_best(name):
    s = REMEDIES[name]
    found = dict(predict.gains(s))
    best = next(iter(found))
    tried = predict.remedies(s).items()
    gains = {key: predict.speed(one) / predict.speed(s) - 1 for key, one in tried}
    assert found == {key: gain for key, gain in gains.items() if gain >= 0.02}
    assert best == max(gains, key=gains.get) and found[name] > 0.3
    if name != "HSDP":
        assert best == name


def test_nothing_helps_where_nothing_is_lost():
    assert predict.gains(replace(FREE, rest=0.0)) == []


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_network_that_is_enough(share):
    rate = predict.network_for(SLOW, share)
    assert predict.linear(replace(SLOW, between_rate=rate)) == pytest.approx(share, rel=1e-6)
    assert predict.network_for(replace(SLOW, loader=1.0), share) is None  # no network helps


def test_failures_cost_what_they_lose():
    day = replace(FREE, failures=1 / 86400, lost=1800.0)
    assert predict.speed(day) == pytest.approx(predict.speed(FREE) / (1 + 8 * 1800 / 86400))


def test_latency_is_of_the_smallest_and_rate_of_the_largest():
    points = [(4096, 0.001), (65536, 0.005), (10**6, 0.01), (10**7, 0.1)]
    assert predict.fit(points) == pytest.approx((0.001, 0.09 / 9e6))
    assert predict.fit([*points, (2 * 10**7, 0.1)]) == pytest.approx((0.001, 0.1 / 2e7))


def test_gloo_hides_latency_behind_what_it_sends():
    """A message of 8 MB on 8 nodes: 1 MB a step, in segments of which two are under way."""
    far = replace(USUAL, backend="gloo", between_latency=0.0003)
    sending = 1e6 / 1.25e9
    assert predict.all_reduce(far, 8e6, 8, 1) == pytest.approx(14 * sending)
    far = replace(far, between_latency=0.001)
    assert predict.all_reduce(far, 8e6, 8, 1) == pytest.approx(14 * (sending / 2 + 0.001))


@pytest.mark.parametrize("arch", predict.WEIGHTS)
def test_weights_are_those_of_torchvision(arch):
    with torch.device("meta"):
        net = get_model(arch, weights=None)
    assert predict.WEIGHTS[arch] == sum(weight.numel() for weight in net.parameters())


def test_published_speeds_are_predicted_from_their_own_smallest():
    rows = published.rows()
    assert len({row["name"] for row in rows}) >= 6
    assert max(row["nodes"] * row["gpus"] for row in rows) == 1024
    for row in rows:
        assert row["source"].startswith("https://") and abs(row["error"]) < 0.5
    one = published.PUBLISHED[0]
    nodes, gpus, speed = one["base"]
    same = published.calibrated(published.known(one["values"], nodes, gpus), speed)
    assert predict.speed(same) == pytest.approx(speed)


# ---- The command


def said(capsys, *words, code=0):
    assert predict.main(list(map(str, words))) == code
    out, err = capsys.readouterr()
    if code:
        assert not out and err.startswith("error: ") and err.count("\n") == 1
    return err if code else out


KNOWN = "--weights 1e8 --images 32 --step-ms 100 --between-gbit 10".split()
# A file of --measure, of two nodes with four GPUs.
FILE = {
    "measured": {
        "backend": "gloo",
        "gpus_per_node": 4,
        "images": 32,
        "between_gbit": 10.0,
        "between_us": 20.0,
        "within_gbit": 90.0,
        "within_us": 3.0,
        "call_us": 50.0,
        "weights": 6250000,
        "forward_s": 0.03,
        "backward_s": 0.06,
        "rest_s": 0.01,
        "uneven_percent": 1.0,
        "ready": [[20000000, 0.1], [5000000, 1.0]],
    }
}


def test_it_says_speed_share_epoch_limit_and_remedy(capsys):
    text = said(capsys, *KNOWN, "--nodes", 1, 16, "--epoch-images", 1281167)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert " 320 " in rows["1 GPU"] and "100%" in rows["1 GPU"] and "4,004" in rows["1 GPU"]
    assert (
        "network" in rows["16 x 8 GPUs"]
        and "4 passes a step (accumulation) (+" in rows["16 x 8 GPUs"]
    )
    assert "Assumed, for nothing said it: --gpus-per-node 8, --between-us 30" in text
    assert "Not modelled: " in text


def test_layouts_beside_each_other(capsys):
    """Torchrun's names do as well, and numbers as people write them."""
    words = "--step-ms 110 --images 128 --between-gbit 10".split()
    text = said(capsys, "--weights", "25,000,000", *words, "--nodes", "16x1", "2x8", "1x1")
    rows = [line.split("  ")[0] for line in text.splitlines()[1:4]]
    assert rows == ["1 GPU", "2 x 8 GPUs", "16 x 1 GPUs"] and "--gpus-per-node" not in text
    for name in rows[1:]:
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name}: for"))
        assert line.startswith(f"{name}: for 90% of linear ")
        assert line.endswith(" Gbit/s; you have 10.0.")
    assert "now 2,048. Mind the learning rate" in text
    same = said(capsys, "--weights", "25M", *words, "--nnodes", 2, "--nproc-per-node", 8)
    assert text.splitlines()[2].split() == same.splitlines()[2].split()
    alone = said(capsys, "--weights", "25M", *words, "--nodes", "1x1")
    assert "How wrong" not in alone and "settings" not in alone


def test_a_file_is_read_and_flags_replace_what_it_holds(tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(FILE))
    text = said(capsys, path, "--nodes", 2)
    assert "2 x 4 GPUs" in text and "Assumed" not in text
    values, _ = predict.gather_values(predict.parse_args([str(path)]))
    assert predict.buckets(predict.setting(values, 2, 4)) == [(2e7, 0.1), (5e6, 1.0)]
    changed = predict.parse_args([str(path), "--step-ms", "200", "--gradient-mb", "8"])
    s = predict.setting(predict.gather_values(changed)[0], 2, 4)
    assert s.forward + s.backward == pytest.approx(0.2) and s.weights == 2e6 and s.ready is None


def test_it_says_how_wrong_it_is_or_that_nobody_knows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(predict, "TABLE", tmp_path / "predict.json")
    words = [*KNOWN, "--nodes", 16]
    assert "How wrong this may be is not measured: results/predict.json" in said(capsys, *words)
    row = {"strategy": "ddp", "limit": "network", "fitted": False, "world": 4}
    runs = [row | {"error": e} for e in (0.01, -0.03, 0.2)] + [row | {"error": 9, "fitted": True}]
    predict.TABLE.write_text(json.dumps({"runs": runs}))
    text = said(capsys, *words)
    assert "On 3 measured settings of these kinds the error of images/s was 3.0% (median), " in text
    assert "from -3.0% to +20.0% (+: too fast): gloo, 4 processes" in text
    assert "Nothing above 4 was measured." in text
    runs += [row | {"error": 0.5, "world": 16}, row | {"error": -0.4, "world": 8}]
    predict.TABLE.write_text(json.dumps({"runs": runs}))
    assert "On 1 measured settings" in said(capsys, *words)  # the 16 processes
    text = said(capsys, *words[:-1], "8x1")
    assert "On 4 measured" in text and "from -40.0% to +20.0%" in text and "4 and 8 pro" in text
    text = said(capsys, *words, "--strategy", "hsdp", "--slow-node", 9)
    assert "of the 6 settings of the table none is HSDP limited by slow node" in text


WRONG = {
    "": "how long is a step? give --step-ms",
    "--step-ms 5 --nodes 1": "how large is the model? give --arch",
    "--arch resnet50 --step-ms 5": "give --images",
    "--arch resnet50 --step-ms 5 --images 1": "how fast is the network? give --between-gbit",
    "--arch resnet50 --weights 3000 --step-ms 5 --nodes 1": "give one of --arch, --weights",
    "--arch resnet5 --step-ms 5 --nodes 1": "resnet5",
    "--weights 1K --step-ms 5 --forward-ms 5 --images 1 --nodes 1": "is not less than --step-ms",
    "--weights 1e8 --step-ms 0": "must be 1e-09 or more, not 0",
    "--weights nan --step-ms 5": "must be 1000 or more, not nan",
    "--weights inf --step-ms 5": "must be 1000 or more, not inf",
    "--weights 25": "must be 1000 or more, not 25",
    "--weights 1,2": "invalid float value: '1,2'",
    "--nodes 1.5": "1.5 is neither a number of nodes nor like 2x8",
    "--nodes 0": "0 is neither a number",
    "--nodes 2x": "2x is neither a number",
    "--nodes 2x0": "2x0 is neither a number",
    "--nodes 2 --gpus-per-node 8 1": "1: several layouts are written as --nodes 2x8 16x1",
    "--step-ms 5 --weights 1M --images 1 --lost-minutes 3": "--lost-minutes needs --fails-days",
    "two.json --forward-ms 5": "--forward-ms needs --step-ms",
    "two.json --images 64": "two.json was measured with 32 images: of 64 give --step-ms too",
    "none.json": "how many images does one GPU take in a step? give --images",
    "--slow-node 0.5": "must be 1 or more, not 0.5",
    "--strategy zero": "invalid choice: 'zero'",
    "--what": "unrecognized arguments: --what",
    "missing.json": "No such file or directory: 'missing.json'",
    "wrong.json": "wrong.json is no file of --measure",
    "text.json": "text.json is no file of --measure",
    "list.json": "list.json is no file of --measure",
    "one.json --nodes 2": "one.json was measured on one node: give --between-gbit as well",
    "--measure out.json": "--measure runs below torchrun: RANK is not set",
}


@pytest.mark.parametrize("words", WRONG)
def test_an_error_is_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "wrong.json").write_text("{")
    (tmp_path / "list.json").write_text('{"measured": []}')
    text = {"measured": FILE["measured"] | {"forward_s": "long"}}
    (tmp_path / "text.json").write_text(json.dumps(text))
    one = {key: value for key, value in FILE["measured"].items() if "between" not in key}
    (tmp_path / "one.json").write_text(json.dumps({"measured": one}))
    (tmp_path / "two.json").write_text(json.dumps(FILE))
    none = {key: value for key, value in FILE["measured"].items() if key != "images"}
    (tmp_path / "none.json").write_text(json.dumps({"measured": none}))
    assert WRONG[words] in said(capsys, *words.split(), code=2)


def test_a_picture(tmp_path, capsys):
    assert "drawn: " in said(capsys, *KNOWN, "--plot", tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_text().count("<path") > 10
    assert "speed.what" in said(capsys, *KNOWN, "--plot", tmp_path / "speed.what", code=2)


def test_without_matplotlib_there_are_bars(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = said(capsys, *KNOWN, "--plot", tmp_path / "speed.svg", "--nodes", 1)
    assert "a picture needs matplotlib" in text and f"1 GPU |{'#' * 40}| 100%" in text
    assert not (tmp_path / "speed.svg").exists()


PAGES = [joined((ROOT / "docs/scaling.md").read_text()), predict.__doc__]
COMMANDS = [line.removeprefix("$ ") for text in PAGES for line in text.splitlines()]
COMMANDS = [line for line in COMMANDS if line.startswith("python predict.py --")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page(command, tmp_path):
    """The script alone, in a folder of its own, where nothing but Python is installed."""
    (tmp_path / "predict.py").write_text((ROOT / "predict.py").read_text())
    words = [PYTHON, "-S", *command.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and not done.stderr
    assert "limited by" in done.stdout and "is not measured: results/predict.json" in done.stdout
    if "--plot" in command:
        assert "a picture needs matplotlib" in done.stdout


def test_it_imports_no_torch_to_predict(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["predict.py", *KNOWN])
    with pytest.raises(SystemExit) as ends:
        runpy.run_path(str(ROOT / "predict.py"), run_name="__main__")
    assert ends.value.code == 0 and "images/s" in capsys.readouterr().out


@pytest.mark.parametrize("local_rank, waits", [("0", []), ("1", [30])])
def test_of_a_node_the_first_process_says_an_error(local_rank, waits, monkeypatch, capsys):
    """The others wait to be ended: torchrun would end the first if they went before it."""
    found = []
    monkeypatch.setattr(predict.time, "sleep", found.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert predict.main(["--nodes", "0"]) == 2 and found == waits
    assert capsys.readouterr().err.startswith("error: ")


def test_a_network_is_measured_by_a_ring(monkeypatch):
    """Of which the formulas are: by a tree NCCL sends less between two nodes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setattr(predict, "net_and_loss", lambda *_: (None, None))
    monkeypatch.setattr(predict.time, "sleep", lambda _: None)  # as the second process of a node
    seen = []

    def init_process_group(backend):
        seen.append((backend, os.environ["NCCL_ALGO"]))
        raise ValueError("seen")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    assert predict.main(["--measure", "net.json", "--backend", "nccl"]) == 2
    assert seen == [("nccl", "Ring")]
