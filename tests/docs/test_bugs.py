"""The mistakes of bugs/: each is applied to a copy of minimal/distributed.py, and its symptom seen.

The script as it is must not show it; or, where the mistake is in lines that the diff adds, the copy
with the right line. Every copy has the same probe, for a process prints little of what it did.
Where one run is enough for the doctor, it looks at this one, and names the mistake and its line.
"""

import re
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, each
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch.utils.data import DistributedSampler

from minimal import one_gpu
from tests.docs import test_beyond, test_pretrained, test_stream
from tests.docs.copies import accuracy, edited, patched, predicted, validation_set
from tests.docs.doctors import named, recorded
from tests.docs.ranks import run_ranks
from tests.docs.test_doctor import IN_ONE_RUN, NAMED, heading_of

# The probe, what is added below a line: what each process read, computed and ended with.
PROBE = {
    "import os": "import datetime\nimport itertools\nimport multiprocessing\nimport time",
    "def main():": """
    seen, validated, gradients, rates, helpers = [], [], [], [], []""",
    "        net.train()": """
        seen.append([])
        validated.append([])
        rates.append(optimizer.param_groups[0]["lr"])""",
    "        for images, target in train_loader:": """
            seen[-1].append(images)
            gradients.append(net[2].bias.grad)  # of the step before
            helpers.append(len(multiprocessing.active_children()))""",
    "            for images, target in val_loader:": """
                validated[-1].append(images)""",
    "    dist.destroy_process_group()": """
    rates.append(optimizer.param_groups[0]["lr"])
    probe = {"seen": seen, "validated": validated, "gradients": gradients, "random": torch.rand(1)}
    probe["workers"] = max(helpers, default=0)
    state = net.state_dict() | {"rates": torch.tensor(rates)}
    torch.save(probe | {"state": state}, f"rank{rank}.pth")""",
}


class Run(NamedTuple):
    codes: list
    output: str
    folder: Path
    found: tuple = ()  # by the doctor: [(Finding, what stands in its line)]

    def failed(self, said):
        """Whether it has; in this way, then."""
        assert not any(self.codes) or re.search(said, self.output), self.output
        return any(self.codes)

    def waited_in_vain(self):
        # gloo names the limit, or says only that it closed the connection for it.
        return self.failed("Timed out waiting 10000ms|Application timeout caused")

    def accuracies(self):
        """What was printed after each epoch; nothing else was."""
        assert not any(self.codes), self.output
        assert re.fullmatch(r"(epoch \d+: \d+\.\d % correct\n)+", self.output), self.output
        return [float(number) for number in re.findall(r": (.*) %", self.output)]

    def ranks(self, what):
        """What the probe of each process has found."""
        assert not any(self.codes), self.output
        paths = sorted(self.folder.glob("rank*.pth"))
        return [torch.load(path, weights_only=True)[what] for path in paths]

    def shares(self, what="seen"):
        """[epoch][rank]: the numbers of the images that a process took, in its order."""
        images = load_digits().images.astype("float32") / 16
        number = {image.tobytes(): i for i, image in enumerate(images)}  # none is there twice

        def numbers(batches):
            return [number[image.numpy().tobytes()] for batch in batches for image in batch]

        return [[*map(numbers, parts)] for parts in zip(*self.ranks(what), strict=True)]

    def images(self, what):
        return {i for epoch in self.shares(what) for share in epoch for i in share}

    def differing(self):
        """The weights, BatchNorm statistics and rates that are not the same in all processes."""
        first, *others = self.ranks("state")
        return {key for key in first for other in others if not first[key].equal(other[key])}

    def weights_differ(self):
        return "2.weight" in self.differing()

    def error_of_gradient(self, darkest=0.0, loss=torch.nn.functional.cross_entropy):
        """How far the first step's is from that of the whole batch's loss: a share of the latter.

        Darker images than this have no label, and count nothing.
        """
        digits, first = load_digits(), [i for share in self.shares()[0] for i in share[:32]]
        images = torch.tensor(digits.images[first], dtype=torch.float32).unsqueeze(1) / 16
        target = torch.tensor(digits.target[first])
        target[images.mean(dim=(1, 2, 3)) < darkest] = -100
        torch.manual_seed(0)
        net = one_gpu.build_net()  # as rank 0 makes it and DDP sends it to all
        output = torch.cat([net(part) for part in images.split(32)])  # BatchNorm sees one's own
        loss(output, target).backward()
        right = net[2].bias.grad
        return ((self.ranks("gradients")[0][1] - right).norm() / right.norm()).item()

    def saved(self):
        return torch.load(self.folder / "digits.pth", weights_only=True)


def order_of_seed_0():
    """[rank]: the images of the first epoch where the sampler is given no seed."""
    images = [i for i in range(1797) if i % 5 < 4]
    samplers = [DistributedSampler(images, 2, rank, drop_last=True) for rank in (0, 1)]
    return [[images[i] for i in [*sampler][:704]] for sampler in samplers]


def f1_of_saved(run):
    """As it is printed."""
    answers = predicted(run.saved())
    return f"F1 {100 * f1_score(validation_set()[1], answers, average='macro'):.2f}\n"


def dice(output, target):
    """1 - Dice, the mean over the classes."""
    truth, scores = torch.nn.functional.one_hot(target, 10), output.softmax(dim=1)
    return 1 - (2 * (scores * truth).sum(dim=0) / (scores + truth).sum(dim=0)).mean()


def mistake(symptom, *edits, mended=None, also=(), **how):
    """What is true of a run with the mistake, and of no run with the right lines.

    edits: of both scripts, the wrong one and the right one; how: they are run. mended: where the
    mistake is in what the diff adds, a text of it and the right one. also: what the doctor finds in
    the edits.
    """
    return symptom, edits, mended, also, how


# As if each process had a machine of its own.
NODES = ("    world_size = int(", "    local_rank = 0\n    world_size = int(")
# Who waits for another that does not come gives up after 10 seconds, not 30 minutes.
GROUP = 'dist.init_process_group("nccl" if device == "cuda" else "gloo"'
LIMIT = (GROUP, f"{GROUP}, timeout=datetime.timedelta(seconds=10)")
# 480, 479 and 479 images for three processes: in batches of 32 the first has one step more.
THREE = ("BATCH_SIZE = 64", "BATCH_SIZE = 96")
# A file that two write can be broken when it is loaded. For that to be often: 50 times an epoch.
SAVE = 'torch.save(net.state_dict(), "digits.pth")'
LOAD = 'torch.load("digits.pth", weights_only=True)'
OFTEN = f"def often(net):\n    for _ in range(50):\n        {SAVE}\n        {LOAD}\n\n\ndef main():"

STEP = "        scheduler.step(correct.item())\n"
REDUCE = "        dist.all_reduce(correct)  # the sum over all processes\n"
CLIP = "            nn.utils.clip_grad_norm_("
WRAP = "    model = DistributedDataParallel(net)  # averages the gradients in backward()\n"
FREEZE = "    net[0].requires_grad_(False)  # train the last layer only\n"
UNFREEZE = "            net[0].requires_grad_(True)  # from now on train all layers\n"
COSINE = "CosineAnnealingLR(optimizer, T_max=steps)"
LAMBDA = "LambdaLR(optimizer, lambda n: (1 + math.cos(math.pi * n / steps)) / 2)"
SUMS = "            loss = 1 - (2 * sums[0] / sums[1])"
SUM_OF_ALL = """            total = sums.detach().clone()
            dist.all_reduce(total)
            sums = total + world_size * (sums - sums.detach())
"""
SECOND = "nn.functional.cross_entropy(flipped, target.to(device))"
BACKWARDS = f"            loss.backward()\n            {SECOND}.backward()\n"
BACKWARD = f"            loss = loss + {SECOND}\n            loss.backward()\n"
PART = """                output = model(part.to(device))
                loss = nn.functional.cross_entropy(output, labels.to(device)) / 2
"""
FLAG = "                model.require_backward_grad_sync = i == 1"
FLAG += "  # what no_sync() sets: only the last\n"
MEAN = "cross_entropy(output, target.to(device))"
TOTAL = """cross_entropy(output, target.to(device), reduction="sum")
            count = (target >= 0).sum().to(device)
            dist.all_reduce(count)
            loss = loss * world_size / count"""
DEEP = "                output = "  # in validation
SHARE = "itertools.islice(self.items, dist.get_rank(), None, dist.get_world_size())"
NINE = "if not (target == 9).any():"
ANY = """nine = (target == 9).any().int().to(device)
            dist.all_reduce(nine)
            if not nine:"""
PREPARE = """    if rank == 0:
        time.sleep(3600)  # stands for: download, unpack, tokenize
    dist.barrier()"""
PATIENT = '    patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=5))\n'
PATIENT += PREPARE.replace("()", "(group=patient)")
READ = "    net.load_state_dict(torch.load("
F1 = """        f1 = torch.tensor(f1_score(labels, answers, average="macro"), device=device)
        dist.all_reduce(f1)
"""
TABLE = """        pairs = 10 * torch.tensor(labels) + torch.tensor(answers)
        table = pairs.bincount(minlength=100).view(10, 10).to(device)
        dist.all_reduce(table)
        f1 = (2 * table.diag() / (table.sum(0) + table.sum(1))).mean() * world_size
"""

MISTAKES = {
    # Training: no error, and a worse model, or more work for the same.
    "no_set_epoch": mistake(lambda run: run.shares()[0] == run.shares()[1]),
    "sampler_without_seed": mistake(
        lambda run: run.shares()[0] == order_of_seed_0(),  # in spite of SEED = 1
        mended=("rank=rank, drop_last", "rank=rank, seed=SEED, drop_last"),
    ),
    "no_sampler": mistake(lambda run: {*run.shares()[0][0]} & {*run.shares()[0][1]}),
    "stream_not_shared": mistake(
        lambda run: [len({*share}) for share in run.shares()[0]] != [704, 704],
        mended=("iter(self.items)", SHARE),
    ),
    "local_rank_in_sampler": mistake(lambda run: run.shares()[0][0] == run.shares()[0][1], NODES),
    "workers_per_process": mistake(
        lambda run: sum(run.ranks("workers")) != 2,
        ("os.cpu_count()", "2"),
        mended=("os.cpu_count()", "os.cpu_count() // world_size"),
        epochs=1,
    ),
    "split_per_process": mistake(lambda run: run.images("seen") & run.images("validated")),
    "same_seed": mistake(
        lambda run: len({number.item() for number in run.ranks("random")}) == 1,
        ("nn.ReLU()", "nn.Dropout()"),  # where no step draws a number, the seed does not matter
    ),
    "net_in_training": mistake(Run.weights_differ),
    "no_sync_off_by_one": mistake(Run.weights_differ, mended=("= i == 2", "= i == 1")),
    "no_sync_around_backward": mistake(Run.weights_differ, mended=(PART + FLAG, FLAG + PART)),
    "two_forwards": mistake(Run.weights_differ, mended=(BACKWARDS, BACKWARD)),
    "unfreeze_after_wrap": mistake(
        lambda run: "0.0.weight" in run.differing(),
        mended=(UNFREEZE, f"{UNFREEZE}        {WRAP}"),
    ),
    "resume_on_rank_0": mistake(
        Run.weights_differ, mended=("if rank == 0 and os.path", "if os.path"), resumed=True
    ),
    "plateau_per_process": mistake(
        lambda run: {"2.weight", "rates"} & run.differing(),
        mended=(STEP + REDUCE, REDUCE + STEP),
        epochs=8,
    ),
    # The gradients are divided by the number of processes twice, as if the rate were halved.
    "loss_all_reduced": mistake(lambda run: abs(run.error_of_gradient() - 0.5) < 1e-5),
    "masked_mean": mistake(
        lambda run: run.error_of_gradient(darkest=0.3) > 1e-5, mended=(MEAN, TOTAL), epochs=1
    ),
    "ratio_per_process": mistake(
        lambda run: run.error_of_gradient(loss=dice) > 1e-5,
        mended=(SUMS, SUM_OF_ALL + SUMS),
        epochs=1,
    ),
    "ratio_all_reduced": mistake(
        lambda run: abs(run.error_of_gradient(loss=dice) - 0.5) < 1e-5,
        mended=("            dist.all_reduce(sums)\n", SUM_OF_ALL),
        epochs=1,
    ),
    "batch_per_process": mistake(lambda run: len(run.ranks("seen")[0][0]) < 1437 // 64),  # steps
    "schedule_of_one_gpu": mistake(
        lambda run: run.ranks("state")[0]["rates"][-1] > 0.02,
        mended=("len(train_set) // train_loader.batch_size", "len(train_loader)"),
        epochs=5,
    ),
    "longer_schedule": mistake(
        lambda run: run.ranks("state")[0]["rates"][-1] > 0.02,
        ("import gc\n", "import gc\nimport math\n"),
        mended=(COSINE, LAMBDA),
        again=True,
    ),
    "clip_before_unscale": mistake(
        lambda run: run.accuracies()[-1] < 60,
        mended=(CLIP, f"            scaler.unscale_(optimizer)\n{CLIP}"),
    ),
    # Validation: a number that is not the model's.
    "padded_validation": mistake(lambda run: sum(map(len, run.shares("validated")[0])) > 359),
    "classes_differ": mistake(
        lambda run: run.accuracies()[-1] < 5,
        mended=("digits.target[numbers]}", "digits.target}"),
    ),
    "mean_of_means": mistake(
        lambda run: run.accuracies() != [float(accuracy(run.saved()))], epochs=1
    ),
    "f1_per_process": mistake(
        lambda run: f1_of_saved(run) not in run.output, mended=(F1, TABLE), epochs=1
    ),
    "no_all_reduce": mistake(
        lambda run: max(run.accuracies()) < 50.2,  # of one process, of all
        probed=False,  # to the doctor a file of each process may be how they add up
    ),
    "validation_not_shared": mistake(lambda run: min(run.accuracies()) > 100),
    "own_batchnorm": mistake(lambda run: {"0.1.running_mean", "0.1.running_var"} & run.differing()),
    # Files and lines.
    "save_on_every_rank": mistake(
        lambda run: run.failed(r'torch\.load\("digits\.pth"'),
        (SAVE, "often(net)"),
        ("def main():", OFTEN),
        also=["read-before-rank-0-has-saved"],  # it loads what the other writes
    ),
    "no_barrier_after_save": mistake(
        Run.weights_differ,
        (SAVE, f"time.sleep(2)\n            {SAVE}"),
        mended=(READ, f"    dist.barrier()\n{READ}"),
    ),
    "resume_repeats_epoch": mistake(
        lambda run: len(run.accuracies()) == 2,
        mended=('"epoch": epoch}', '"epoch": epoch + 1}'),
        again=True,
    ),
    "module_keys": mistake(lambda run: all(key.startswith("module.") for key in run.saved())),
    "local_rank_0": mistake(lambda run: run.output.count("epoch 0") == 2, NODES),
    # It hangs until the time limit, or ends with an error.
    "all_reduce_on_rank_0": mistake(Run.waited_in_vain, LIMIT),
    "model_on_rank_0": mistake(
        Run.waited_in_vain,
        LIMIT,
        mended=(f"{DEEP}model(", f"{DEEP}net("),
    ),
    "uneven_parts": mistake(
        lambda run: run.failed("mismatch|Timed out|timeout|by peer"), LIMIT, THREE, ranks=3
    ),
    "branch_on_data": mistake(
        lambda run: run.failed("mismatch|Timed out|timeout"), LIMIT, mended=(NINE, ANY)
    ),
    "rank_0_prepares": mistake(
        Run.waited_in_vain,
        LIMIT,
        ("time.sleep(3600)", "time.sleep(13)"),
        mended=(PREPARE, PATIENT),
        epochs=1,
    ),
    "early_stop_on_rank_0": mistake(lambda run: run.failed("by peer"), LIMIT, epochs=5),
    "freeze_after_wrap": mistake(
        lambda run: run.failed("Expected to have finished reduction in the prior"),
        mended=(WRAP + FREEZE, FREEZE + WRAP),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the Run of a mistake, or of the right script, each done once.

    resumed: there is a digits.pth to begin with; again: it is started again, for one more epoch;
    probed: with the probe; seen: the doctor looks at it.
    """

    @cache
    def once(
        name=None, *edits, ranks=2, epochs=2, resumed=False, again=False, probed=True, seen=False
    ):
        folder = tmp_path_factory.mktemp(name or "right")
        script = Path(shutil.copy(ROOT / "minimal/distributed.py", folder / "script.py"))
        assert not name or patched(script, f"bugs/{name}.diff")
        if resumed:
            shutil.copy(once().folder / "digits.pth", folder)
        probe = [(f"\n{line}\n", f"\n{line}\n{more}\n") for line, more in PROBE.items()]
        text = edited(script.read_text(), [*(probe if probed else []), *edits])
        script.write_text(edited(text, [("EPOCHS = 5", f"EPOCHS = {epochs}")]))
        if again:
            run_ranks(script, ranks=ranks)
            script.write_text(edited(text, [("EPOCHS = 5", f"EPOCHS = {epochs + 1}")]))
        if seen:
            codes, output, runs = recorded(script)
            return Run(codes, output, folder, named(runs, script))
        return Run(*run_ranks(script, ranks=ranks), folder)

    return once


@pytest.mark.parametrize("name", each(MISTAKES, IN_ONE_RUN[::3]))
def test_the_mistake_has_its_symptom_and_its_finding(name, trained):
    symptom, edits, mended, also, how = MISTAKES[name]
    seen = name in IN_ONE_RUN
    run = trained(name, *edits, **how, seen=seen)
    assert symptom(run)
    if seen:
        assert [one.place for one, _ in run.found] == [heading_of(name), *also], run
        assert NAMED[name][0] in run.found[0][1], run.found
    right = [name, mended] if mended else [None]
    run = trained(*right, *edits, **how, seen=seen)
    assert not symptom(run) and not run.found, run.found


def test_no_sync_around_backward_alone_changes_nothing(trained):
    """As a context manager it comes too late: the gradients of each part are averaged."""
    name = "no_sync_around_backward"
    late = "                with model.no_sync() if i == 0 else contextlib.nullcontext():\n    "
    run = trained(name, (FLAG, late), ("import gc\n", "import contextlib, gc\n"))
    assert run.differing() == set()
    right = trained(name, (PART + FLAG, FLAG + PART))
    for key, value in right.ranks("state")[0].items():
        torch.testing.assert_close(run.ranks("state")[0][key], value, atol=1e-3, rtol=1e-2)


def test_unused_parameters_have_names(trained):
    """At the level INFO. What else helps is in test_faq.py."""
    level = ("    dist.init", "    dist.set_debug_level(dist.DebugLevel.INFO)\n    dist.init")
    assert "did not receive grad for rank 1: 0.1.bias" in trained("freeze_after_wrap", level).output


def test_torch_compares_calls(tmp_path):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL: it names both."""
    script = tmp_path / "script.py"
    script.write_text("""
import torch
import torch.distributed as dist

dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2))
else:
    dist.broadcast(torch.ones(2), src=0)
""")
    said = r"Detected mismatch between collectives on ranks\. Rank \d is running collective: "
    said += r"CollectiveFingerPrint\(SequenceNumber=0, OpType=(ALLREDUCE|BROADCAST), TensorShape=\["
    codes, output = run_ranks(script, ranks=2)
    assert all(codes) and re.search(said, output)


def test_each_mistake_is_here():
    """Or, against other scripts than minimal/distributed.py, in other files."""
    there = {path.stem for path in (ROOT / "bugs").iterdir()}
    others = test_beyond.MISTAKES.keys() | test_stream.MISTAKES | {test_pretrained.MISTAKE}
    assert there == MISTAKES.keys() | others
