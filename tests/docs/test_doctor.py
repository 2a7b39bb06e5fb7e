"""The doctor names the mistakes of bugs/, at their lines, and nothing in scripts that are right."""

import json
import re
import shutil
import time

import pytest
import torch
from conftest import PYTHON, ROOT, each, full, run

import compose
from doctor.judges import JUDGES, findings
from doctor.judges.comparing import BATCH, NUMBERS, REPEATED, SUM
from doctor.judges.steps import WRONG_ORDERS
from tests.docs.copies import USER, edited, equal, patched
from tests.docs.doctors import looked_at
from tests.docs.mutant_runs import diagnosed
from tests.docs.ranks import good
from tests.docs.test_docs import anchors

PAGE = (ROOT / "docs/doctor.md").read_text()
DOCTOR = [PYTHON, ROOT / "doctor", "--quick"]
FINDING = re.compile(r"^ (\S+):(\d+)  (.*)  → docs/bugs\.md#(\S+)$", re.M)
# What the line says that is named. "all runs": the other runs of plain use find it.
LOOP, MODEL = "for images, target in train_loader:", "model = Dist"
NAMED = {
    "all_reduce_on_rank_0": ["dist.all_reduce(correct)"],
    "batch_per_process": ["train_loader = ", "all runs"],
    "branch_on_data": ["output = model("],
    "classes_differ": ["val_loader = "],
    "clip_before_unscale": ["clip_grad_norm_"],
    "early_stop_on_rank_0": ["output = model("],
    "freeze_after_wrap": [MODEL],
    "local_rank_0": ["torch.save", "all runs"],
    "local_rank_in_sampler": ["sampler = Dist", "all runs"],
    "loss_all_reduced": ["dist.all_reduce(loss)"],
    "masked_mean": ["loss = "],
    "model_on_rank_0": ["output = model("],
    "module_keys": ["torch.save"],
    "net_in_training": ["output = net("],
    "no_all_reduce": ["for images, target in val_loader:"],
    "no_barrier_after_save": ["torch.load"],
    "no_sampler": ["train_loader = "],
    "no_set_epoch": [LOOP],
    "no_sync_around_backward": ["output = model("],
    "no_sync_off_by_one": ["output = model("],
    "own_batchnorm": ["output = net("],
    "padded_validation": ["val_sampler = "],
    "plateau_per_process": ["scheduler.step"],
    "rank_0_prepares": ["dist.barrier()"],
    "resume_on_rank_0": ["torch.load"],
    "resume_repeats_epoch": [LOOP, "all runs"],
    "same_seed": ["torch.manual_seed"],
    "sampler_without_seed": ["sampler = Dist"],
    "save_on_every_rank": ["torch.save"],
    "schedule_of_one_gpu": ["scheduler = "],
    "split_per_process": ["val_loader = "],
    "stream_not_shared": ["train_loader = "],
    "ratio_all_reduced": ["dist.all_reduce(sums)"],
    "two_forwards": ["flipped, target"],
    "unfreeze_after_wrap": [MODEL],
    "uneven_parts": ["train_loader = ", "all runs"],
    "validation_not_shared": ["val_loader = "],
    "workers_per_process": ["train_loader = "],
}
NOT_NAMED = {
    "async_save_not_awaited",
    "f1_per_process",
    "longer_schedule",
    "mean_of_means",
    "ratio_per_process",
    "stream_join",
    "stream_starts_again",
    "tensor_qkv_cut",
}
# Named too, in other scripts: see test_doctor_together.py.
TOGETHER = {
    "pipeline_clip_per_stage",
    "pipeline_sampler_by_rank",
    "tensor_clip_own_part",
    "tensor_sampler_by_rank",
}


def examined(folder, *words, code=0, env=None, timeout=250):
    """What the doctor says of a script: [(line number, text, place)], and its whole output."""
    output = run([*DOCTOR, *words], folder, env=USER | (env or {}), code=code, timeout=timeout)
    assert re.search(r"^ mistakes: \d+, hints: \d+$", output, re.M), output
    return [
        (int(number), text, place) for _, number, text, place in FINDING.findall(output)
    ], output


def forked(folder, text, *words, code=0):
    """As examined(), but for the launcher: the processes are forks."""
    (folder / "run").mkdir(exist_ok=True)
    report = diagnosed(folder / "run", ["--quick", *words], text)
    assert report["code"] == code, report["said"]
    found = FINDING.findall(report["said"])
    return [(int(number), text, place) for _, number, text, place in found], report["said"]


SAVING = """
import os
import torch
torch.distributed.init_process_group("gloo")
old = torch.load("old.pth")
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    torch.save({"of": "the doctor"}, "new.pth")
    with open("old.pth.tmp", "wb") as file:
        torch.save({"of": "the doctor"}, file)
    os.replace("old.pth", "before.pth")
    os.replace("old.pth.tmp", "old.pth")
    os.remove("removed.pth")
torch.distributed.barrier()
print(f"{old} {torch.load('old.pth')}\\n", end="")  # one write: two processes share the pipe
torch.distributed.destroy_process_group()
"""


def test_puts_back_the_checkpoints_and_says_that_it_saw_no_training(tmp_path):
    """As of a run that was resumed where nothing is left to do."""
    (tmp_path / "script.py").write_text(SAVING)
    for name in ("old.pth", "removed.pth"):
        torch.save({"of": "a long run"}, tmp_path / name)
    found, output = examined(tmp_path, "script.py", code=2)
    assert not found and "no step of an optimizer was seen" in output, output
    assert "{'of': 'a long run'} {'of': 'the doctor'}" in output
    assert "\n put back as before this run: old.pth, removed.pth\n" in output
    removed = "removed, for it was new (--keep leaves it): before.pth, new.pth"
    assert f"\n {removed}\n" in output
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "old.pth", "removed.pth"}
    for name in ("old.pth", "removed.pth"):
        assert torch.load(tmp_path / name) == {"of": "a long run"}


# The script ends by itself where there is no step.
UNCHECKED = ("    if len(train_set) < BATCH_SIZE:\n", "    if False:\n")


@pytest.mark.full
def test_a_loader_without_a_batch_is_no_training(tmp_path):
    """The script validates, so something was seen; but it trains nothing, without an error."""
    edits = [("BATCH_SIZE = 64", "BATCH_SIZE = 4096"), UNCHECKED]
    text = edited(copied(tmp_path).read_text(), edits)
    output = forked(tmp_path, text, code=2)[1]
    line = text.splitlines().index(
        "    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, "
        "drop_last=True)"
    )
    said = (
        f"\n script.py:{line + 1}  this loader gives no batch: has it fewer items than a batch?\n"
    )
    assert said + " mistakes: 0, hints: 0\n" in output, output


def test_what_ended_the_script_is_said_first(tmp_path):
    """The number of mistakes is that of a run that was not seen to its end."""
    output = forked(tmp_path, "import no_such_package\n", code=3)[1]
    error = r"script\.py:1  rank \d failed: ModuleNotFoundError: No module named 'no_such_package'"
    found = re.search(error, output)
    assert found and found.start() < output.index("it ended with exit code 1"), output
    assert output.index("it ended with exit code 1") < output.index(" mistakes: 0, hints: 0")


def test_a_count_of_all_in_each_process_is_a_hint_up_to_100_percent(tmp_path):
    """For a script may divide by the number of processes. Above, it is a mistake: see below."""
    text = copied(tmp_path, "validation_not_shared").read_text()
    text = edited(text, [("correct.item() / len(val_set)", "correct.item() / 718")])
    output = forked(tmp_path, text)[1]
    assert " mistakes: 0, hints: 1\n" in output and "hint: each process validates all" in output


def test_its_own_flags_come_first(tmp_path):
    (tmp_path / "script.py").write_text("import torch\n")
    said = run([*DOCTOR, "script.py", "--twice"], tmp_path, env=USER, code=2)
    assert said.endswith("error: put --twice before script.py: it is a flag of the doctor\n")


@pytest.mark.full
def test_says_that_the_launcher_started_nothing(tmp_path):
    """Not that the script has no process group."""
    (tmp_path / "script.py").touch()
    output = examined(tmp_path, "--by=false", "script.py", code=3)[1]
    assert "no process of the script began" in output and "process group" not in output, output


def test_says_that_this_python_has_no_torch(tmp_path):
    """-S: without what is installed."""
    (tmp_path / "script.py").write_text("import torch\n")
    said = run([PYTHON, "-S", ROOT / "doctor", "script.py"], tmp_path, env=USER, code=2)
    assert re.fullmatch(r"doctor: \S+ has no torch: .*\n", said), said


def copied(folder, name=None, epochs=2, diffs="bugs"):
    """minimal/distributed.py with a mistake, or with another diff."""
    script = shutil.copy(ROOT / "minimal/distributed.py", folder / "script.py")
    assert not name or patched(script, f"{diffs}/{name}.diff")
    text = (folder / "script.py").read_text()
    (folder / "script.py").write_text(edited(text, [("EPOCHS = 5", f"EPOCHS = {epochs}")]))
    return folder / "script.py"


def heading_of(name):
    """The place in docs/bugs.md that shows a mistake's diff."""
    before = (ROOT / "docs/bugs.md").read_text().partition(f"generated: bug {name} -->")[0]
    title = re.findall(r"^### (.*)$", before, re.M)[-1]
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# Of these the end of the run, or what the other runs of plain use add, is a part.
ENDED = {"all_reduce_on_rank_0", "model_on_rank_0", "branch_on_data", "rank_0_prepares"}
ENDED |= {"early_stop_on_rank_0", "freeze_after_wrap"}
HANGS = "all_reduce_on_rank_0"  # see test_a_hang_ends_with_both_lines
ALL_RUNS = {name for name, (_, *all_runs) in NAMED.items() if all_runs}
# Those that the command itself names with --all: one of each kind. The others are a soak.
BY_COMMAND = {"early_stop_on_rank_0": "--quick", "uneven_parts": "-n=3 --quick"}
BY_COMMAND["resume_repeats_epoch"] = "--quick --twice"
# Those named by one run, with its symptom, in test_bugs.py.
IN_ONE_RUN = sorted(NAMED.keys() - ENDED - ALL_RUNS)


def with_mistake(name, folder):
    script = copied(folder, name, 5 if name == "early_stop_on_rank_0" else 2)
    if name == "uneven_parts":  # 64 images cannot be shared by three
        script.write_text(edited(script.read_text(), [("BATCH_SIZE = 64", "BATCH_SIZE = 96")]))
    return script


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in BY_COMMAND else pytest.mark.soak)
        for name in sorted(ENDED | ALL_RUNS)
    ],
)
def test_names_the_mistake_and_nothing_else(name, tmp_path):
    """By the command."""
    said, script = NAMED[name][0], with_mistake(name, tmp_path)
    flags = BY_COMMAND.get(name, "--budget=1000" if name in ALL_RUNS else "--quick").split()
    output = run([*DOCTOR[:2], *flags, script], tmp_path, env=USER, code=None, timeout=400)
    found = FINDING.findall(output)
    assert [place for *_, place in found] == [heading_of(name)], output
    assert said in script.read_text().splitlines()[int(found[0][1]) - 1], output
    assert "Traceback" not in output.partition(" mistakes:")[2], output
    assert ("started again: it loaded a file" in output) == (name == "resume_repeats_epoch")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted((ENDED | ALL_RUNS | {"validation_not_shared"}) - BY_COMMAND.keys() - {HANGS})
)
def test_finds_the_mistake_in_all_runs_and_nothing_else(name, tmp_path):
    """As the command does, but for the launcher: the processes are forks, as in ranks.py."""
    text = with_mistake(name, tmp_path).read_text()
    (tmp_path / "run").mkdir()
    flags = ["--quick"] if name in ENDED else []
    flags += ["--patience=2"] if name == "rank_0_prepares" else []  # eight times that it waits
    report = diagnosed(tmp_path / "run", flags, text)
    places = [f"docs/bugs.md#{heading_of(name)}"]
    if name == "validation_not_shared":  # it prints twice what one process prints
        places.append("docs/doctor.md#a-number-is-that-of-a-part")
        assert report["found"][0]["certain"], report["said"]
    assert [one["place"] for one in report["found"]] == places, report["said"]
    line = int(report["found"][0]["line"].rpartition(":")[2])
    assert NAMED[name][0] in text.splitlines()[line - 1], report["said"]


@pytest.mark.full
def test_a_second_start_is_judged_and_its_error_is_told(tmp_path):
    """Only then there is a checkpoint, which rank 0 alone loads, or which has no such key."""
    text = copied(tmp_path, "resume_on_rank_0").read_text()
    output = forked(tmp_path, text, "--twice", code=1)[1]
    assert "  rank 1 does not load it  " in output and "mistakes: 1" in output, output
    text = edited(text, [("weights_only=True))", "weights_only=True)['net'])")])
    output = forked(tmp_path, text, "--twice", code=3)[1]
    assert re.search("again: it loaded a file; script.py:.* failed: KeyError: 'net'", output), (
        output
    )


@pytest.mark.full
def test_a_second_start_without_a_folder_is_not_tried(tmp_path):
    """The folder is back afterwards, but the doctor's processes stand in the one that is gone."""
    text = copied(tmp_path, epochs=1).read_text()
    text += "    if os.environ['RANK'] == '0':\n        __import__('shutil').rmtree(os.getcwd())\n"
    (tmp_path / "train.py").write_text(text)
    found, output = examined(tmp_path, "--twice", "train.py")
    assert not found and " not started again: the script has removed its working folder\n" in output


@pytest.mark.full
def test_the_example_of_the_page(tmp_path):
    """docs/doctor.md: the command says what is shown, but for its time."""
    sample, command = re.search(r"```sh\n(.*)\n```\n\n```text\n((?s:.*?))```", PAGE).group(2, 1)
    (tmp_path / "minimal").mkdir()
    script = shutil.copy(ROOT / "minimal/distributed.py", tmp_path / "minimal")
    assert patched(script, "bugs/padded_validation.diff")
    shutil.copytree(ROOT / "doctor", tmp_path / "doctor")
    output = run(["env", *command.split()], tmp_path, env=USER, code=1)
    assert re.sub(r"\d+ s\n", "", sample) in re.sub(r"\d+ s\n", "", output)


def test_every_mistake_is_named_or_is_known_not_to_be():
    """docs/doctor.md says which are not."""
    there = {path.stem for path in (ROOT / "bugs").glob("*.diff")}
    assert NAMED.keys() | TOGETHER | NOT_NAMED == there
    assert len(NAMED) + len(TOGETHER) + len(NOT_NAMED) == len(there)
    assert all(f"bugs.md#{heading_of(name)}" in PAGE for name in NOT_NAMED)


def words_on_the_page(name):
    """What docs/bugs.md and its Chinese twin say of a mistake: whether the doctor sees it."""
    if name in NOT_NAMED:
        return "**Doctor**: no. ", "查不出。"
    return "**Doctor**: yes. ", "能指出。"


@pytest.mark.parametrize("name", sorted(NAMED.keys() | TOGETHER | NOT_NAMED))
def test_the_page_says_whether_the_doctor_sees_it(name):
    for page, words in zip(["bugs.md", "bugs.zh-CN.md"], words_on_the_page(name), strict=True):
        text = (ROOT / "docs" / page).read_text().partition(f"generated: bug {name} -->")[2]
        said = text.partition("<!-- end -->\n\n")[2].removeprefix("**医生**\uff1a")
        assert said.startswith(words), (page, words)


RIGHT = ["distributed", "fsdp_distributed", "by_hand", "libraries/with_accelerate"]
STARTS = [
    full("multiprocessing_distributed"),
    pytest.param("libraries/with_fabric", marks=pytest.mark.soak),
]
SAME_BITS = {"distributed", "by_hand"}


def two_epochs(name, folder):
    text = (ROOT / f"minimal/{name}.py").read_text()
    dropout = ("nn.Flatten(),", "nn.Flatten(), nn.Dropout(),")  # a number drawn would show
    edits = [("EPOCHS = 5", "EPOCHS = 2"), *([dropout] if name in SAME_BITS else [])]
    (folder / "script.py").write_text(edited(text, edits))
    return folder / "script.py"


@pytest.mark.parametrize("name", RIGHT)
def test_finds_nothing_in_a_right_script_and_changes_no_bit(name, tmp_path):
    script = two_epochs(name, tmp_path)
    runs, found, _ = looked_at(script)
    assert not found and len(runs[0].rows("step")) == 44, found
    if name in SAME_BITS:
        assert equal(*looked_at_and_alone(script))


@pytest.mark.parametrize("name", STARTS)
def test_finds_nothing_in_a_right_script_that_starts_its_processes(name, tmp_path):
    found, output = examined(tmp_path, two_epochs(name, tmp_path))
    assert not found and "looked at 2 processes, each: 44 steps, 4 passes" in output


@pytest.mark.full
def test_finds_nothing_in_the_full_script(work, tmp_path):
    words = "--data data/digits --epochs 2 --arch tests.nets:plain --image-size 24 -b 48".split()
    env = {"PYTHONPATH": str(ROOT)}
    flags = ["--checkpoint-dir", tmp_path / "c"]
    found, output = examined(work, ROOT / "distributed.py", *words, *flags, env=env)
    assert not found and "looked at 2 processes" in output


RECIPES = sorted(path.stem for path in (ROOT / "minimal/recipes").glob("*.diff"))


# Compiled ones by hand: a minute, and the doctor sees the same of them.
@pytest.mark.parametrize("name", each(RECIPES, by_hand=["compile"]))
def test_finds_no_mistake_in_a_recipe(name, tmp_path):
    script = copied(tmp_path, name, diffs="minimal/recipes")
    _, found, _ = looked_at(script)
    assert not [one for one, _ in found if one.certain], found
    if name == "compile":  # the calls that are looked at are no part of what it compiles
        seen, alone = looked_at_and_alone(script)
        assert all(torch.allclose(alone[key], seen[key], atol=1e-3) for key in alone)


@pytest.mark.full
def test_changes_no_bit_of_a_script_with_all_recipes(tmp_path):
    text = compose.script("torchrun", features=[name for name in RECIPES if name != "compile"])
    text = edited(
        text, [("EPOCHS = 5", "EPOCHS = 2"), ("nn.Flatten(),", "nn.Flatten(), nn.Dropout(),")]
    )
    (tmp_path / "script.py").write_text(text)
    looked_at(tmp_path / "script.py")
    assert equal(*looked_at_and_alone(tmp_path / "script.py"))


def looked_at_and_alone(script):
    """The weights that a script has saved, and those that it saves without the doctor."""
    seen = torch.load(script.parent / "digits.pth", weights_only=True)
    for file in script.parent.glob("*.pth"):
        file.unlink()
    good(script, ranks=2)
    return seen, torch.load(script.parent / "digits.pth", weights_only=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dataparallel", "one_gpu"])
def test_a_script_without_a_group_is_not_compared(name, tmp_path):
    text = (ROOT / f"minimal/{name}.py").read_text()
    text = edited(text, [("EPOCHS = 5", "EPOCHS = 1")])
    assert "joins no process group" in forked(tmp_path, text, code=2)[1]


@pytest.mark.full
def test_a_group_of_one_process_is_not_called_right(tmp_path):
    text = edited(copied(tmp_path).read_text(), [("EPOCHS = 2", "EPOCHS = 1")])
    output = forked(tmp_path, text, "-n=1", code=2)[1]
    assert "\n the group has one process: there is nothing to compare. Start two" in output, output


OWN_DATA = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

class Zeros(IterableDataset):  # to measure speed
    def __iter__(self):
        return iter(torch.zeros(200, 1))

class Sum(torch.autograd.Function):  # as those who divide a layer write it
    @staticmethod
    def forward(context, part):
        dist.all_reduce(part)
        return part

    @staticmethod
    def backward(context, gradient):
        return gradient

dist.init_process_group("nccl")
rank, seeded = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
device = torch.device("cuda", rank)
data = TensorDataset(torch.randn(200, 8, generator=seeded), torch.arange(200) // 50)
train_set, val_set = random_split(data, [0.8, 0.2], seeded)
model = DistributedDataParallel(torch.nn.Linear(8, 4).cuda(), device_ids=[rank])
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    train_loader = DataLoader(train_set, 40, shuffle=True, generator=seeded)
    for (images, _), noise in zip(train_loader, DataLoader(Zeros(), 40)):
        mine = model(images.to(device, non_blocking=True))
        scores = [torch.zeros_like(mine) for _ in range(2)]
        dist.all_gather(scores, mine)
        scores[rank] = mine  # with its graph: that is how contrastive losses are written
        optimizer.zero_grad()
        (Sum.apply(torch.cat(scores).square()).mean() + noise.sum()).backward()
        optimizer.step()
    count = torch.zeros(1)
    with torch.no_grad():
        for _, target in DataLoader(val_set, 40):
            count += len(target)
    dist.all_reduce(count)
"""


def test_finds_nothing_where_each_process_has_its_own_part(tmp_path):
    """Items have the same numbers and labels in both, and are others. It names GPUs, too."""
    (tmp_path / "script.py").write_text(OWN_DATA)
    _, found, output = looked_at(tmp_path / "script.py")
    assert "Error" not in output and not [one for one, _ in found if one.certain], (found, output)


SPAWNED = """
import tempfile, time
import torch
import torch.multiprocessing as mp
from torch.distributed import all_reduce, barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

class Slow(torch.nn.Linear):  # like a step of minutes on a busy machine
    def forward(self, images):
        time.sleep(4 if self.training else 0)
        return super().forward(images)

def work(rank, world_size, path, load):
    init_process_group("nccl", f"file://{path}.{load}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    net = torch.nn.Sequential(Slow(4, 8), torch.nn.BatchNorm1d(8)).to(rank)
    model = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0 and not load:
        torch.save(obj=net, f=path)  # the whole model, not its weights
    barrier()
    if load:
        torch.load(f=path, map_location={"cuda:0": f"cuda:{rank}"}, weights_only=False)
    loss = model(torch.randn(6, 4, device=f"cuda:{rank}")).square().mean()
    with torch.no_grad():
        all_reduce(loss)  # to print it: the gradient is that of before
        loss /= world_size
    loss.backward()
    optimizer.step()
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(metrics=loss)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 4, device=torch.device("cuda", rank)))
    destroy_process_group()

if __name__ == "__main__":
    path = tempfile.mktemp()
    for load in (False, True):  # two groups, one after the other
        mp.spawn(work, (torch.cuda.device_count(), path, load), torch.cuda.device_count())
"""


@pytest.mark.full
def test_finds_nothing_in_groups_that_the_script_starts_itself(tmp_path):
    """It names GPUs, imports functions by name, loads in one group what the other saved."""
    found, output = forked(tmp_path, SPAWNED, "--patience=2")
    assert not found and "looked at 2 processes, each: 1 steps" in output, output
    assert "the doctor failed" not in output


SCALED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Again(torch.optim.SGD):  # Horovod makes such a class of an optimizer that is there
    def step(self, *args):
        return super().step(*args)

dist.init_process_group()
torch.manual_seed(dist.get_rank())
data = TensorDataset(torch.arange(45.0).view(45, 1))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-4), torch.amp.GradScaler("cuda")
optimizer = Again(optimizer.param_groups)
for (images,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    kept = model(images)[: 4 - dist.get_rank()]  # as a mask leaves other numbers
    scaler.scale(kept.mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
model.eval()
seen = []
with torch.no_grad():
    for (images,) in DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)):
        parts = [torch.zeros_like(images) for _ in range(2)]
        dist.all_gather(parts, model(images))
        seen += parts
dist.destroy_process_group()
"""


@pytest.mark.full
def test_what_a_gpu_alone_would_show_and_a_short_pass(tmp_path):
    """torch turns a scaler off where there is no GPU. --steps ends passes, --json writes all."""
    (tmp_path / "script.py").write_text(SCALED)
    words = ["--steps=2", "--json=report.json", "script.py"]
    found, output = examined(tmp_path, *words, code=1)
    places = {place: text for _, text, place in found}
    hints = {"padded-validation", "a-mean-over-what-each-process-counts"}
    assert places.keys() == {"clipped-before-unscale_", *hints}, output
    assert places["padded-validation"].startswith("hint: the sampler repeats 1 of 45 items")
    assert "each: 2 steps, 2 passes" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["certain"] for one in report["found"]] == [True, False, False] and not report[
        "failed"
    ]


def test_every_place_is_a_heading_of_the_page():
    assert findings([]) == []  # it reads the judges
    places = {judge.place for judge in JUDGES} | {BATCH, NUMBERS, REPEATED, SUM}
    places |= {place for place, _ in WRONG_ORDERS.values()}
    for page in ("bugs.md", "doctor.md"):
        known = anchors((ROOT / "docs" / page).read_text())
        assert {
            p.removeprefix("doctor.md#") for p in places if ("#" in p) == (page == "doctor.md")
        } <= known


@pytest.mark.full
def test_ray_is_asked_for_no_gpus_that_are_not_there(tmp_path):
    """It would wait for them. A double: the script does not use it."""
    (tmp_path / "ray.py").touch()
    script = "import ray\nimport torch\n\nassert not torch.cuda.device_count()\n"
    (tmp_path / "script.py").write_text(script)
    assert "failed" not in examined(tmp_path, "script.py", code=2)[1]


@pytest.mark.full
def test_a_module_counts_no_gpus_where_another_was_told_that_there_are_none(tmp_path):
    (tmp_path / "flags.py").write_text("import torch\n\nGPU = torch.cuda.is_available()\n")
    (tmp_path / "devices.py").write_text("import torch\n\nGPUS = torch.cuda.device_count()\n")
    script = "import flags\nfrom devices import GPUS\n\nassert not GPUS and not flags.GPU\n"
    (tmp_path / "script.py").write_text(script)
    assert "failed" not in examined(tmp_path, "script.py", code=2)[1]
    (tmp_path / "script.py").write_text("from devices import GPUS\n\nassert GPUS == 2\n")
    assert "failed" not in examined(tmp_path, "script.py", code=2)[1]


@pytest.mark.full
def test_a_hang_ends_with_both_lines(tmp_path):
    """30 seconds after it stands still; three times as much for a machine that is busy."""
    script, line = copied(tmp_path, HANGS), "            dist.all_reduce(correct)"
    edits = [(line, f'            open("stood", "w").close()\n{line}')]
    script.write_text(edited(script.read_text(), edits))
    found, output = examined(tmp_path, "--keep", script, code=1)
    ((_, said, place),) = found
    assert place == heading_of(HANGS)
    assert "torch.distributed" not in output, output  # no traceback of the launcher's
    lines = script.read_text().splitlines()
    places = [int(number) for number in re.findall(r"at script\.py:(\d+)", said)]
    assert "all_reduce(correct)" in lines[places[0] - 1] and "model(" in lines[places[1] - 1]
    assert time.time() - (tmp_path / "stood").stat().st_mtime < 90


SLOW = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")

class Slow(torch.nn.Linear):
    def forward(self, images):
        time.sleep(0 if dist.get_rank() else 90)
        return super().forward(images)

DistributedDataParallel(Slow(1, 1))(torch.ones(1, 1)).sum().backward()
"""


@pytest.mark.full
def test_a_slow_model_is_no_hang(tmp_path):
    """Its code is called by DDP, where processes wait as well."""
    ((_, text, place),) = forked(tmp_path, SLOW, "--patience=2", code=3)[0]
    assert place == "rank-0-prepares-for-longer-than-the-timeout", text
    assert text.startswith("hint: rank 0 is at script.py:11, rank 1 waits in backward"), text


def test_what_it_says_of_a_crash(tmp_path):
    """The reason, and not that nothing was found."""
    output = forked(tmp_path, "import torch\n\ntorch.ones(2) @ torch.ones(3)\n", code=3)[1]
    assert "script.py:3  rank" in output and "inconsistent tensor size" in output
