"""What a mutant does alone and on two processes, and what the doctor says of it.

$ python tests/docs/mutant_runs.py FOLDER [SCRIPT ...]

writes a JSON file for each script into the folder. All processes are forks of one that has
imported torch (see ranks.py): a mutant takes some seconds, not half a minute.
"""

import argparse
import ast
import contextlib
import gc
import io
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 1)]

import multiprocessing  # noqa: E402

from tests.docs.mutants import assigned_by, heads, mutants, variables_of  # noqa: E402
from tests.ports import free_port  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo", "torch.optim.swa_utils"]
    + ["sklearn.datasets.data", "sklearn.datasets.descr", "torch.distributed.checkpoint"]
    + ["torch.distributed.checkpoint.state_dict", "tests.docs.mutant_runs", "tests.docs.ranks"]
)

IDLE = 5  # seconds without any work in all processes: a hang
LIMIT = 120  # seconds in which a run must end, whatever it does

# ---- What a run shows. This runs in each process before the script.

PROBE = """
import json, multiprocessing.util, os
import torch, torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

seen = {"rank": None, "passes": [], "saves": [], "weights": []}
optimizers = []

def around(owner, name, after):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        after(result, *args, **kwargs)
        return result
    setattr(owner, name, call)

def total(tensor):
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return repr(tensor.detach().double().sum().item())

def saved(_, obj, f, *args, **kwargs):
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", "?")
    tensors = [total(x) for x in tree_leaves(obj) if torch.is_tensor(x)]
    seen["saves"].append([os.path.basename(name), tensors])

def began(_, self, *args, **kwargs):
    seen["passes"].append([])
    self.probed = seen["passes"][-1]

def joined(*args, **kwargs):
    seen["rank"] = dist.get_rank()

def asked(index, self):
    self.probed += index if type(index) is list else [index]

def write(*_):
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    seen["weights"] = [total(weight) for group in groups for weight in group["params"]]
    if seen["rank"] is not None:
        with open(f".probe.{os.getpid()}", "w") as file:  # it may be killed just now
            json.dump(seen, file)
        os.replace(f".probe.{os.getpid()}", f"probe.{os.getpid()}")

def at_the_end(*_):
    multiprocessing.util.Finalize(None, write, exitpriority=100)

around(torch, "save", saved)
around(torch.optim.Optimizer, "__init__", lambda _, self, *args, **kw: optimizers.append(self))
around(dataloader._BaseDataLoaderIter, "__init__", began)
around(dataloader._BaseDataLoaderIter, "_next_index", asked)
around(dist, "init_process_group", joined)
at_the_end()
multiprocessing.util.register_after_fork(at_the_end, at_the_end)  # of what mp.spawn starts
torch.cuda.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])  # for mp.spawn
torch.cuda.is_available = lambda: False  # it may ask for their number
"""


def be_a_process(words, env, folder, output, before=""):
    """words: a script, or the doctor's folder and a script; as if this was started alone."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # A line at once, also under PYTHONUNBUFFERED: those of two processes must not be mixed.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ |= env
    os.chdir(folder)
    sys.argv = list(words)
    sys.path[:0] = [os.path.dirname(words[0])]
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # what the parent has imported: gc.collect() need not walk through it
    seed_anew()
    fork_what_is_spawned()
    try:
        exec(before, {})
        runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def seed_anew():
    """These are seeded by chance where a process starts anew; a fork would have its parent's."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.set_num_threads(1)  # as under torchrun


def fork_what_is_spawned():
    """mp.spawn's processes would each import torch."""
    import torch.multiprocessing  # noqa: F401

    module = sys.modules["torch.multiprocessing.spawn"]
    real = module.start_processes

    def start_processes(fn, args=(), nprocs=1, join=True, daemon=False, start_method="fork"):
        return real(fn, args, nprocs, join, daemon, "fork")

    module.start_processes = start_processes


class Job:
    """Processes as a launcher starts them: subprocess.Popen for doctor/launch.py."""

    def __init__(self, words, ranks, folder, env=None, nodes=1, before=""):
        self.output = Path(folder, "output.txt")
        self.output.write_text("")
        port = free_port()
        known = dict(env or os.environ)
        known |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        local = (ranks or 1) // nodes
        self.processes = []
        for rank in range(ranks or 1):
            own = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": ranks}
            own |= {"LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = known | {k: str(v) for k, v in own.items()} if ranks else known
            given = ([str(word) for word in words], own, str(folder), str(self.output), before)
            process = forks.Process(target=be_a_process, args=given)
            process.start()
            self.processes.append(process)

    def poll(self):
        """As torchrun: where one fails, the others are ended."""
        codes = [process.exitcode for process in self.processes]
        if any(codes):
            for process in self.processes:
                process.terminate()
            deadline = time.monotonic() + 5
            for process in self.processes:
                process.join(max(0.1, deadline - time.monotonic()))
            self.kill()
            return 1
        return None if None in codes else 0

    def wait(self, timeout=None):
        deadline = time.monotonic() + (timeout or 600)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("job", timeout)
            time.sleep(0.05)
        return self.poll()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def worked(self):
        """The time of all processes and their children, in ticks; of one that ended, its number."""
        ticks = []
        for process in self.processes:
            for pid in (process.pid, *children(process.pid)):
                with contextlib.suppress(OSError, IndexError):
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    ticks.append(int(stat[11]) + int(stat[12]))
        return tuple(ticks)


def children(pid):
    with contextlib.suppress(OSError):
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ended_well_or_how(job):
    """ "" , "hangs" or "fails"."""
    began = since = time.monotonic()
    worked, codes, failed = None, [None], None
    while None in codes:
        time.sleep(0.05)
        codes = [process.exitcode for process in job.processes]
        now = time.monotonic()
        if (new := job.worked()) != worked:
            worked, since = new, now
        failed = failed or (now if any(codes) else None)
        if failed and now - failed > 3:  # a launcher ends the others
            job.kill()
        elif now - since > IDLE or now - began > LIMIT:
            for process in job.processes:
                for pid in children(process.pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, 9)
            job.kill()
            return "hangs"
    if not any(codes):
        return ""
    errors = re.findall(
        r"^(?:\[rank\d+\]: )?(?:[\w.]+\.)?(\w*(?:Error|Exception|Exit)\b.*)$",
        job.output.read_text(),
        re.M,
    )
    lost = "closed by peer|reset by peer|Connection refused|Broken pipe|timed out|Timed out"
    lost += "|SocketException|ProcessExited|ProcessRaised|terminated with the following"
    own = [error for error in errors if not re.search(lost, error)]
    aborted = -6 in codes  # as gloo does where sizes differ
    return "fails" if own and not aborted else "hangs"


def behaviour(text, ranks, folder, nodes=1, files=(), own=False):
    """What a run shows: how it ended, what it printed, its weights, items and files.

    own: the script starts its processes itself.
    """
    for path in Path(folder).iterdir():
        path.unlink()
    for path in files:
        shutil.copy(path, folder)
    script = Path(folder, "script.py")
    script.write_text(text)
    job = Job(
        [script],
        0 if own else ranks,
        folder,
        os.environ | {"LOCAL_WORLD_SIZE": str(ranks)},
        nodes,
        PROBE,
    )
    how = ended_well_or_how(job)
    probes = [json.loads(path.read_text()) for path in Path(folder).glob("probe.*")]
    probes.sort(key=lambda probe: probe["rank"])
    if not how and len(probes) != ranks:
        how = "hangs"  # it ended before it joined the others
    rows = zip(*(probe["passes"] for probe in probes), strict=False)
    passes = [sorted(item for part in row for item in part) for row in rows]
    numbers = [len(probe["passes"]) for probe in probes]
    printed = job.output.read_text()
    lines = {line for line in printed.splitlines() if re.search(r"\d", line)}
    return {
        "how": how,
        "printed": sorted(
            line for line in lines if not re.search("[Ww]arn|gloo|W1|script.py:", line)
        ),
        "weights": [probe["weights"] for probe in probes],
        "items": [passes, numbers],
        "saves": [save for probe in probes for save in probe["saves"]],
        "output": printed[-3000:],
    }


FACTS = ["how", "weights", "printed", "items", "saves"]


def other(mutant, right):
    """The first fact in which a mutant differs from the script, or ""."""
    for fact in FACTS:
        if mutant[fact] != right[fact]:
            if fact == "how":
                return mutant["how"] or "ends well"
            apart = fact == "weights" and len({*map(str, mutant[fact])}) > len(
                {*map(str, right[fact])}
            )
            return "weights apart" if apart else f"other {fact}"
    return ""


# ---- What the doctor says


def doctor():
    """The package, whose launcher is played by Job."""
    if "doctor" not in sys.modules:
        runpy.run_path(str(ROOT / "doctor"))["load"]()
    from doctor import command, launch

    def popen(words, env=None, **_):
        ranks = [int(w.partition("=")[2]) for w in words if w.startswith("--nproc-per-node=")]
        words = words[words.index(launch.HERE) :]
        return Job(words, ranks[0] if ranks else 0, os.getcwd(), env)

    launch.subprocess = types.SimpleNamespace(
        Popen=popen, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired
    )
    command.run_guarded = lambda work, keep: work(Files())
    return command


class Files:
    """As doctor.files.GuardedRun, for a folder that only these scripts use: a copy, put back.

    The real one starts a guard and a hook in each process, which is not what is measured here.
    """

    def __init__(self):
        self.before = {path: path.read_bytes() for path in Path().glob("*.*")}
        self.events = tempfile.TemporaryDirectory()
        self.journal = types.SimpleNamespace(folder=os.fsencode(self.events.name))

    def env(self):
        return dict(os.environ)

    def begin(self):
        pass

    def put_back(self, keep=False):
        for path in {*Path().glob("*.*")} - self.before.keys():
            path.unlink()
        for path, content in self.before.items():
            path.write_bytes(content)
        return []


def diagnosed(folder, flags=(), text=None, files=()):
    """What `python doctor FLAGS script.py` finds in the folder, and says."""
    command = doctor()
    for path in Path(folder).iterdir():
        path.unlink()
    for path in files:
        shutil.copy(path, folder)
    Path(folder, "script.py").write_text(text)
    report = Path(folder, "report.json")
    argv, before = sys.argv, os.getcwd()
    sys.argv = ["doctor", "--patience=4", f"--json={report}", *flags, "script.py"]
    os.chdir(folder)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            command.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        os.chdir(before)
    result = json.loads(report.read_text())
    return result | {"said": said.getvalue(), "code": code}


def named(mutant, report, known=()):
    """ "mistake", "hint", "error" (the line of an exception is told), or "".

    A mistake counts at any line: it is certain, and not in the script. A hint counts at the changed
    lines, and at a statement that shares a variable with them which one of the two sets.
    known: (place, text) of what is found in the script itself.
    """
    found = [one for one in report["found"] if (one["place"], one["text"]) not in known]
    if any(one["certain"] for one in found):
        return "mistake"
    for one in found:
        line = int(one["line"].rpartition(":")[2]) if ":" in one["line"] else 0
        if mutant.line <= line <= mutant.last or related(mutant, line):
            return "hint"
    return "error" if report["failed"] or report["stopped"] else ""


def related(mutant, line):
    tree = ast.parse(mutant.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno == line:
            parts = heads(node)
            uses = frozenset().union(*map(variables_of, parts))
            sets = frozenset().union(*(assigned_by(part, tree) for part in parts))
            if uses & mutant.assigned or sets & mutant.variables:
                return True
    return False


# ---- All of a script


class Script:
    """A right script, shortened, and what it does."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.text = shortened(source_of(name))
        self.own = "mp.spawn(" in self.text
        self.files = {1: [], 2: []}
        if "os.path.exists(" in self.text:  # a run before has left a checkpoint
            for ranks in self.files:
                first = re.sub(r"^EPOCHS = \d+", "EPOCHS = 1", self.text, flags=re.M)
                self.run(first, ranks)
                kept = Path(tempfile.mkdtemp(dir=Path(folder).parent))
                for path in Path(folder).glob("*.pth"):
                    self.files[ranks].append(shutil.copy(path, kept))
            self.text = re.sub(r"^EPOCHS = \d+", "EPOCHS = 3", self.text, flags=re.M)
        self.right = {ranks: self.run(self.text, ranks) for ranks in (1, 2)}
        for run in self.right.values():
            assert not run["how"], run["output"]
        assert not other(self.run(self.text, 2), self.right[2])  # it can be repeated
        report = diagnosed(folder, [], self.text, self.files[2])
        self.known = {(one["place"], one["text"]) for one in report["found"]}

    def run(self, text, ranks, nodes=1):
        return behaviour(text, ranks, self.folder, nodes, self.files[ranks], self.own)

    def kind(self, mutant):
        """("alone", "right" or "counts" or "fails", how it differs)"""
        if self.right[1] and (how := other(self.run(mutant.text, 1), self.right[1])):
            return "alone", how
        how = other(self.run(mutant.text, 2), self.right[2])
        if not how and "local_rank" in mutant.name and not self.own:
            how = other(self.run(mutant.text, 2, nodes=2), self.right[2])
        if not how:
            return "right", ""
        return ("fails" if how == "fails" else "counts"), how


COMPOSED = {
    "amp_clip_schedule": "torchrun --with amp,clip,schedule",
    "accumulate_loss": "torchrun --with accumulate,loss",
    "resume_best_early_stopping": "torchrun --with resume,best,early_stopping",
    "f1_predictions_ema": "torchrun --with f1,predictions,ema",
    "fsdp_resume": "fsdp --with resume",
}
SCRIPTS = ["distributed", "fsdp_distributed", "multiprocessing_distributed", "segmentation", "gan"]
SCRIPTS += ["by_hand", *COMPOSED]


def source_of(name):
    if name not in COMPOSED:
        return (ROOT / f"minimal/{name}.py").read_text()
    command = [sys.executable, ROOT / "compose.py", *COMPOSED[name].split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shortened(text):
    """Two epochs of half of the images, and a small net: a run takes a second, not ten."""
    text = re.sub(r"^EPOCHS = \d+", "EPOCHS = 2", text, flags=re.M)
    text = re.sub(r"range\((4, )?1797", r"range(\g<1>897", text)
    text = text.replace("nn.Conv2d(1, 64,", "nn.Conv2d(1, 8,").replace(
        "BatchNorm2d(64)", "BatchNorm2d(8)"
    )
    text = text.replace("64 * 6 * 6", "8 * 6 * 6")
    if "class UNet" in text:
        text = text.replace("in interpolate(digits,", "in interpolate(digits[:299],")
        text = text.replace("torch.arange(897)", "torch.arange(299)")
        text = re.sub(r"\b16\b(?=[,)]| \+)", "4", text).replace("32, 32)", "8, 8)")
        text = text.replace("convs(4, 32), convs(8, 8)", "convs(4, 8), convs(8, 8)").replace(
            "4 + 32", "4 + 8"
        )
    return text


def measure(name, out, limit=None, again=None, quick=False):
    """All mutants of a script, or a sample; the file is written after each."""
    path = Path(out, f"{name}.json")
    rows = json.loads(path.read_text()) if path.exists() else []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        folder.mkdir()
        script = Script(name, folder)
        found = mutants(script.text)
        chosen = sorted(random.Random(0).sample(range(len(found)), min(limit or 10**6, len(found))))
        known = {row["number"]: row for row in rows}
        for number in chosen:
            mutant, row = found[number], known.get(number, {"number": number})
            if row.get("name") != mutant.name:
                known[number] = row = {"number": number, "name": mutant.name}
                row["kind"], row["how"] = script.kind(mutant)
            if row["kind"] != "alone" and (not row.get("named") or again or "report" not in row):
                if again and not re.search(again, row["kind"] + " " + str(row.get("named"))):
                    continue
                report = diagnosed(folder, ["--quick"], mutant.text, script.files[2])
                more = {
                    "counts": named(mutant, report, script.known) in ("", "error"),
                    "right": number % 4 == 0,
                    "fails": "local_rank" in mutant.name,  # on two machines
                }
                if not quick and more.get(row["kind"]):  # its other runs only add
                    report = diagnosed(folder, [], mutant.text, script.files[2])
                row |= {"report": report, "named": named(mutant, report, script.known)}
                row |= {"line": mutant.line, "last": mutant.last}
                print(
                    f"{row['kind']:7}{row['how']:15}{row['named'] or '-':9}{mutant.name}",
                    flush=True,
                )
            path.write_text(json.dumps([*known.values()], indent=1))
    return [*known.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("scripts", nargs="*", default=SCRIPTS)
    parser.add_argument("--limit", type=int, help="a sample of so many mutants of each script")
    parser.add_argument(
        "--again", help="ask the doctor again where this pattern fits a row's kind and name"
    )
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    for name in args.scripts or SCRIPTS:
        began = time.monotonic()
        measure(name, args.folder, args.limit, args.again, args.quick)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
