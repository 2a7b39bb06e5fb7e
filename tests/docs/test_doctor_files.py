"""When the doctor has ended, however it ended, each file that was there before is there, unchanged.

A small script plays the doctor: it starts a script of the user's under doctor/files. Each test
compares names, bytes, modes and times with what was there before.
"""

import collections
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path

import pytest
from conftest import HEAR_SIGNALS, ROOT, full

from doctor.files import doctors, hosts, journal, record, restore

PLAYER = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from doctor import files
if sys.argv[1] == "--restore":
    print(*files.restore_dead(), sep="\\n")
    sys.exit()
keep = sys.argv[1] == "--keep"
def work(run):
    print("began", flush=True)
    codes = [subprocess.Popen(command, env=run.env()) for command in commands]
    return max(one.wait() for one in codes)
commands = [[sys.executable, *sys.argv[1 + keep:]]] * {{processes}}
sys.exit(files.run_guarded(work, keep=keep, show=lambda line: print(line, flush=True)))
"""
OLD = "old " * 50


class Place:
    """A folder with files that were there before, and doctors that are started in it."""

    def __init__(self, path, state=None):
        self.path, self.state = path, state or path.parent / "state"
        self.path.mkdir(parents=True)
        self.jobs = []
        fill(path)
        self.before = snapshot(path)

    def start(self, script, *flags, processes=1, env=None, **more):
        number = len(self.jobs)
        player = self.path.parent / f"player{number}.py"
        player.write_text(PLAYER.replace("{processes}", str(processes)))
        file = self.path.parent / f"script{number}.py"
        file.write_text(script)
        self.jobs.append(
            subprocess.Popen(
                [*HEAR_SIGNALS, sys.executable, player, *flags, file],
                env=os.environ | {"DOCTOR_STATE": str(self.state)} | (env or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="surrogateescape",
                **{"cwd": self.path, **more},
            )
        )
        return self.jobs[-1]

    def run(self, script, *flags, **more):
        """(exit code, all that was said)"""
        job = self.start(script, *flags, **more)
        said, _ = job.communicate(timeout=300)
        return job.returncode, said

    def restore(self):
        return self.run("", "--restore")[1]

    def assert_unchanged(self, said=""):
        now = snapshot(self.path)
        paths = sorted(now.keys() | self.before.keys())
        differs = [(p, self.before.get(p), now.get(p)) for p in paths]
        differs = [(p, before, after) for p, before, after in differs if before != after]
        assert not differs, (differs, said)


def fill(path):
    for name in "a b c hard lone text.json log".split():
        (path / name).write_text(OLD + name)
    os.link(path / "hard", path / "hard2")
    os.symlink("lone", path / "link")
    os.symlink("nowhere", path / "dangling")
    (path / "empty").mkdir()
    for name in "ckpt/one ckpt/deep/two runs/best.pth".split():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(OLD + name)
    (path / "c").chmod(0o640)
    (path / "ckpt/deep").chmod(0o750)
    for number, one in enumerate([*path.rglob("*"), path]):
        os.utime(one, (1_600_000_000 + number,) * 2, follow_symlinks=False)


def snapshot(path):
    """{name: all that a user may see of it}"""
    found = {}
    for folder, folders, names in os.walk(os.fsencode(path)):
        for name in [b".", *folders, *names]:
            one = os.path.join(folder, name)
            info = os.lstat(one)
            text = None
            if stat.S_ISLNK(info.st_mode):
                text = os.readlink(one)
            elif stat.S_ISREG(info.st_mode):
                with open(one, "rb") as file:
                    text = file.read()
            found[one] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, text)
    return found


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path / "work")
    yield place
    for job in place.jobs:
        if job.poll() is None:
            job.kill()
        job.stdout.close()


def wait_for(what, seconds=90):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


# ---- 1. Whatever the run does

WAYS = {
    "w": 'open("a", "w").write("new")',
    "append": 'open("a", "a").write("new")',
    "r+": 'f = open("a", "r+b"); f.seek(3); f.write(b"new"); f.close()',
    "w+": 'open("a", "w+").write("new")',
    "x": """
        try:
            open("a", "x")
        except FileExistsError:
            open("fresh", "x").write("new")
        else:
            raise SystemExit(7)""",
    "os.open": 'f = os.open("a", os.O_WRONLY); os.write(f, b"new"); os.close(f)',
    "dir_fd": """
        folder = os.open("ckpt", os.O_RDONLY)
        f = os.open("one", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
        os.write(f, b"new"); os.close(f); os.remove("two", dir_fd=os.open("ckpt/deep", 0))""",
    "json": 'json.dump({"a": 1}, open("text.json", "w"))',
    "pickle": 'pickle.dump([1], open("a", "wb")); pickle.dump([1], open("ckpt/new", "wb"))',
    "write_text": 'pathlib.Path("ckpt/one").write_text("new")',
    "bytes": 'open(b"a", "wb").write(b"new")',
    "truncate": 'os.truncate("a", 2)',
    "logging": 'logging.basicConfig(filename="log"); logging.warning("new")',
    "copyfile": 'shutil.copyfile("a", "b"); shutil.copy2("a", "ckpt/one"); shutil.copy("a", "z")',
    "replace": 'open("t", "w").write("new"); os.replace("t", "a")',
    "rename": 'os.rename("a", "b"); open("b", "a").write("new")',
    "backup": 'os.rename("a", "a.bak"); open("a", "w").write("n"); open("a.bak", "a").write("n")',
    "remove": 'os.remove("a"); os.remove("link"); os.unlink("dangling")',
    "remove and write": 'os.remove("a"); open("a", "w").write("new")',
    "rmtree": 'shutil.rmtree("ckpt"); os.rmdir("empty")',
    "rmtree and write": 'shutil.rmtree("ckpt"); os.makedirs("ckpt/deep"); open("ckpt/one", "w")',
    "folder moved": 'os.rename("ckpt", "old"); open("old/one", "a").write("new"); os.mkdir("ckpt")',
    "shutil.move": 'shutil.move("ckpt", "runs/ckpt"); shutil.move("a", "runs"); os.mkdir("ckpt")',
    "rotation": """
        for i in range(3):
            os.makedirs("tmp/deep"); open("tmp/one", "w").write(str(i)); open("tmp/n", "w")
            if os.path.isdir("last"):
                shutil.rmtree("last")
            os.rename("ckpt", "last"); os.rename("tmp", "ckpt")""",
    "a folder onto a file": 'os.remove("a"); os.makedirs("a/b/c"); open("a/b/c/d", "w")',
    "a program's folder onto a file": """
        os.remove("a"); subprocess.run(["cp", "-r", "runs", "a"]); open("a/best.pth", "w")
        os.remove("c"); subprocess.run(["mv", "ckpt/deep", "c"]); shutil.move("text.json", "c")""",
    "a folder made anew": """
        os.mkdir("tmp"); open("tmp/n", "w").write("new"); shutil.rmtree("ckpt")
        subprocess.run(["cp", "-r", "tmp", "ckpt"]); open("ckpt/n", "a").write("x")
        shutil.rmtree("runs"); os.rename("tmp", "runs"); os.mkdir("runs/deep")
        os.rmdir("empty"); os.makedirs("empty/deep"); open("empty/deep/n", "w")""",
    "names of one file": """
        f, g, h = open("n", "w"), open("b", "w"), open("log", "w")
        for old, new in (("n", "a"), ("b", "c"), ("log", "lone")):
            open(new, "w").close(); os.remove(new); os.link(old, new)
        time.sleep(1.7); f.write("new"); f.flush(); g.write("new"); g.close(); os.remove("b")
        h.write("new"); h.flush(); os.remove("log"); h.write("newer"); h.flush()""",
    "a rename that fails": """
        os.mkdir("tmp"); open("tmp/one", "w").write("new"); open("tmp/n", "w").write("new")
        try:
            os.rename("tmp", "ckpt")
        except OSError:
            shutil.rmtree("ckpt"); os.rename("tmp", "ckpt")""",
    "a file onto a folder": 'shutil.rmtree("ckpt"); open("ckpt", "w").write("new")',
    "hard link": 'open("hard", "a").write("new"); open("hard2", "w").write("newer")',
    "new hard link": 'os.link("a", "a3"); open("a3", "w").write("new")',
    "own hard link": """
        open("n", "w").write("new"); os.link("n", "n2"); time.sleep(1.7)
        f = open("n", "a"); f.write("newer"); f.flush(); open("n2", "a").write("x"); os.remove("n2")
        os.link("n", "a2"); time.sleep(1.7); f.write("newest"); f.flush()""",
    "through a link": 'open("link", "w").write("new"); open("dangling", "w").write("new")',
    "link": 'os.symlink("a", "to_a"); os.remove("link"); os.symlink("b", "link")',
    "link to a folder": 'os.symlink("ckpt", "last"); open("last/one", "w"); os.remove("last")',
    "mode and time": 'os.chmod("a", 0o777); os.utime("b", (1, 1)); os.chmod("ckpt", 0o700)',
    "no permission": 'os.chmod("ckpt", 0o500); os.chmod("a", 0); os.utime("ckpt", (1, 1))',
    "chdir": 'os.chdir("ckpt"); open("one", "w"); open("../a", "w"); os.rename("deep", "../deep")',
    "sqlite": """
        import sqlite3
        db = sqlite3.connect("new.db"); db.execute("create table t (x)"); db.commit(); db.close()
        shutil.copy("new.db", "a"); db = sqlite3.connect("a")
        db.execute("insert into t values (1)"); db.commit(); db.close()""",
    "memmap": """
        import mmap
        with open("a", "r+b") as f:
            m = mmap.mmap(f.fileno(), 0)
        m[:3] = b"new"; m.flush()
        open("b", "w"); time.sleep(1.7); m[3:6] = b"new"; m.flush()""",
    "temporary": 'import tempfile; tempfile.mkdtemp(dir="."); tempfile.mkstemp(dir="ckpt")',
    "new folder": 'os.makedirs("out/deep"); open("out/deep/x", "w"); os.rename("out", "out2")',
    "cp": 'subprocess.run(["cp", "a", "b"]); os.system("cp a ckpt/; cp -r ckpt new")',
    "mv": 'subprocess.run(["mv", "a", "b"]); subprocess.run("mv ckpt/* runs/", shell=True)',
    "rm": 'os.system("rm -rf ckpt && rm a b*")',
    "shell": 'os.system("cd ckpt; echo new > one; echo new >> ../a; touch ../b; mkdir n; ls > l")',
    "sed": 'subprocess.check_call(["sed", "-i", "s/old/new/", "a", "ckpt/one"])',
    "dd": 'os.system("dd if=/dev/zero of=a bs=10 count=1 conv=notrunc 2> errors")',
    "tar": 'os.system("tar cf new.tar ckpt"); os.system("tar cf a b")',
    "posix_spawn": 'os.waitpid(os.posix_spawn("/bin/rm", ["rm", "a"], os.environ), 0)',
    "exec": 'os.execvp("cp", ["cp", "a", "b"])',
    "the name of a program": """
        subprocess.run(["true", "b"], executable="/bin/rm")
        os.spawnv(os.P_WAIT, "/bin/rm", ["true", "a"])""",
    "flags of programs": """
        for line in ("sort -ua -o a", "sort -uob c", "uniq c lone", "sed -n 'w log' a",
                     "find runs -fprint0 text.json", "find -path '*one*' -delete", "shred -u hard",
                     "cp a n.bak; cp a n; sed -i.bak s/o/x/ n; sed -i.json s/o/x/ text 2> e"):
            os.system(line)""",
    "a line that writes what find says": """
        os.system('find . -type f | while read f; do echo new > "$f"; done')""",
    "commands from a pipe": r'os.system("echo rm a | sh"); os.system("cat <<X | bash -s\nrm b\nX")',
    "python that is alone": """
        code = "import os; os.remove('a'); os.remove('b')"
        subprocess.run([sys.executable, "-u", "-B", "-I", "-c", code], check=True)
        open("x", "w").write(f"#!{sys.executable} -Es\\nimport os; os.remove('c')")
        os.chmod("x", 0o755); subprocess.run(["./x"], check=True)""",
    "history": """
        import readline
        readline.add_history("new"); readline.write_history_file("a")""",
    "python": "subprocess.run([sys.executable, \"-c\", \"open('a', 'w'); open('n', 'w')\"])",
    "lines": r"""
        subprocess.run("echo x\nrm -rf ckpt", shell=True)
        subprocess.run("cp b \\\n  a\necho done # c", shell=True); os.system("rm -f x#1 b")""",
    "shells in shells": r"""
        open("clean.sh", "w").write("rm -rf $1\necho x > a\n"); os.system("bash clean.sh ckpt")
        subprocess.run(["bash", "-lc", "rm b"]); os.system("timeout 5 bash -c 'rm c'")
        subprocess.run(["bash", "-euo", "pipefail", "-c", "rm log"])
        os.system("nice -n 1 sh <<X\nrm lone\nX\n")""",
    "a line's folders": 'os.system("(cd ckpt && ls); rm -f a; cd missing; rm -f b; cd runs; rm *")',
    "a line's variables": """
        os.system("d=ckpt; rm -rf $d; for i in a b; do rm $i; done")
        subprocess.run("rm -rf $D ${E:-log}", shell=True, env={**os.environ, "D": "runs"})
        subprocess.run(["bash", "-c", "rm {c,lone} text.$(echo json)"])""",
    "a line's pipes": """
        os.makedirs("archive"); os.system("ls a b | xargs -I{} mv {} archive/")
        os.system("ls ckpt/one | while read f; do rm $f; done; rm $(ls -t runs/*); ls c | xargs rm")
        os.system("find . -name log | xargs -n 1 sh -c 'rm $0'")""",
    "a pipe alone": 'os.system("ls -t a b c | tail -n +2 | xargs rm -f")',
    "what cp copies": """
        os.makedirs("n/deep"); os.mkdir("m")
        for name in ("n/one", "n/deep/two", "n/new", "m/a", "m/b", "m/best.pth"):
            open(name, "w").write("new")
        os.system("cp -r n/. ckpt; cp -t runs m/best.pth; cp --target-directory=. m/a; cp -rT m .")
        subprocess.run(["mv", "-t", "runs", "c"])
        os.system("gzip log; bzip2 lone; zip -qm z text.json")""",
    "large files": """
        programs = sys.modules["doctor_files_hook.programs"]
        programs.BYTES = programs.FILES = 9
        subprocess.run(["cp", "a", "b"]); os.system("true; cp a c; echo x > log; rm -rf ckpt")""",
    "python, another PYTHONPATH": """
        import multiprocessing
        def save(name, env=None):
            code = f"open({name!r}, 'a').write('new'); open({name + '.new'!r}, 'w')"
            return [sys.executable, "-c", code]
        if __name__ == "__main__":
            os.environ["PYTHONPATH"] = "."; subprocess.check_call(save("a"))
            os.environ.pop("PYTHONPATH"); os.environ.pop("DOCTOR_FILES")
            one = multiprocessing.get_context("spawn").Process(target=open, args=["b", "w"])
            one.start(); one.join(); assert one.exitcode == 0
            os.environ.clear(); os.system(subprocess.list2cmdline(save("c")))
            os.waitpid(os.posix_spawn(sys.executable, save("lone"), {}), 0)
            os.execve(sys.executable, save("log"), {})""",
    "python, its environment": """
        code = "import os, shutil; open('a', 'w').write('n'); shutil.rmtree('ckpt')"
        subprocess.check_call([sys.executable, "-c", code], env={"PATH": "/bin"})""",
    "output of a program": 'subprocess.run(["echo", "new"], stdout=open("a", "w"))',
    "fork": """
        if os.fork() == 0:
            open("a", "w").write("new"); os.remove("b"); os._exit(0)
        os.wait()""",
    "fork with an open file": """
        f = open("a", "w"); f.write("new"); f.flush()
        if os.fork() == 0:
            time.sleep(1.7); f.write("newer"); f.flush(); os._exit(0)
        f.close(); time.sleep(1.2); os.wait()""",
    "workers": """
        import multiprocessing
        def save(name):
            open(name, "w").write("new"); open(name + ".new", "w").write("new")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(save, ["a", "b", "ckpt/one"])
        if __name__ == "__main__":
            one = multiprocessing.get_context("spawn").Process(target=save, args=["c"])
            one.start(); one.join(); assert one.exitcode == 0""",
    "threads": """
        import threading
        save = lambda n: [open(n, "w").write("new"), os.rename(n, n + "2")]
        all = [threading.Thread(target=save, args=[n]) for n in ("a", "b", "c", "lone")]
        [one.start() for one in all]; [one.join() for one in all]""",
    "left open": 'f = open("a", "w"); f.write("new"); g = open("new", "w"); g.write("x")',
    "dies": 'f = open("a", "w"); f.write("new"); f.flush(); os.kill(os.getpid(), 9)',
    "fails": 'open("a", "w").write("new"); open("n", "w").write("new"); 1 / 0',
}
HEAD = """
import json, logging, os, pathlib, pickle, shutil, subprocess, sys, time
"""


def script_of(way):
    return HEAD + textwrap.dedent(way).strip() + "\n"


# Those that people's scripts do most; the others need --all.
USUAL = """w|append|x|json|copyfile|replace|rename|rmtree|folder moved|rotation|hard link
a rename that fails|a folder made anew|names of one file|through a link|sqlite|rm|cp|python|workers
output of a program|dies"""
USUAL = USUAL.replace("\n", "|").split("|")


@pytest.mark.parametrize("way", [way if way in USUAL else full(way) for way in WAYS])
def test_each_way_of_writing(place, way):
    code, said = place.run(script_of(WAYS[way]))
    assert code in ((0,) if way not in ("dies", "fails") else (1, 247)), said
    place.assert_unchanged(said)
    assert "the doctor failed" not in said
    assert "Traceback" not in said or way == "fails", said
    assert "left:" not in said, said


LIBRARIES = """
import torch, numpy, pathlib, os, shutil, torchvision
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
import pyarrow, pyarrow.parquet, pyarrow.csv
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
state = {"weight": torch.ones(100)}
torch.save(state, "a")
torch.save(state, pathlib.Path("runs") / "best.pth")
torch.save(state, open("b", "wb"))
torch.save(state, "ckpt/new.pth")
torch.save(state, "checkpoint.pth.tar"); shutil.copyfile("checkpoint.pth.tar", "c")
numpy.save("text.json", numpy.ones(3)); numpy.savez("new.npz", a=numpy.ones(3))
mapped = numpy.lib.format.open_memmap("log", mode="w+", shape=(3,)); mapped[:] = 1; mapped.flush()
save_file(state, "hard"); save_file(state, "ckpt/model.safetensors")
dcp.save(state, checkpoint_id="ckpt"); dcp.save(state, checkpoint_id="new/ckpt")
torch.jit.script(torch.nn.Linear(2, 2)).save("lone")
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "ckpt/one")
torchvision.io.write_png(torch.zeros(3, 4, 4, dtype=torch.uint8), "ckpt/deep/two")
torchvision.io.write_file("hard2", torch.zeros(4, dtype=torch.uint8))
pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), "ckpt/deep/new")
pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), "link")
pyarrow.csv.write_csv(pyarrow.table({"x": [1]}), "empty/n")
for trace in ("text.json", "runs/new.json"):
    with torch.profiler.profile() as profiler:
        torch.ones(3).sum()
    profiler.export_chrome_trace(trace)
torch.jit.script(torch.nn.functional.relu).save("runs/best.pth")
torch.from_file("log", shared=True, size=3, dtype=torch.uint8)[:] = 7
group = {"init_method": f"file://{os.getcwd()}/empty/group", "rank": 0, "world_size": 1}
torch.distributed.init_process_group("gloo", **group)
class Images(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        torch.save(state, f"cache{i}"); open("ckpt/one", "a").write("x")
        return i
if __name__ == "__main__":
    list(torch.utils.data.DataLoader(Images(), num_workers=2))
"""


def test_what_writes_in_cpp_and_rust(place):
    code, said = place.run(LIBRARIES)
    assert code == 0, said
    place.assert_unchanged(said)
    assert not re.search("left:|cannot see|the doctor failed", said), said


ARROW = """
import os, pickle
import pandas, pyarrow as pa, pyarrow.dataset, pyarrow.csv, pyarrow.orc, pyarrow.parquet
from pyarrow import fs
from tokenizers import Tokenizer, models, trainers
table, disk = pa.table({"x": [1, 2]}), fs.LocalFileSystem()
pandas.DataFrame({"x": [1]}).to_parquet("a")
pandas.DataFrame({"x": [1]}).to_parquet("ckpt", partition_cols=["x"])
assert isinstance(disk, fs.FileSystem) and pickle.loads(pickle.dumps(disk)) == disk
system, path = fs.FileSystem.from_uri("file://" + os.getcwd())
system = fs.SubTreeFileSystem(path, system)
with system.open_output_stream("b") as file:
    file.write(b"new")
with disk.open_append_stream(path="log") as file:
    file.write(b"new")
disk.create_dir("n/deep"); system.copy_file("b", "c"); system.move("text.json", "n/text.json")
fs.copy_files("n", "runs"); system.delete_dir("n"); disk.delete_file("link")
dataset = {"format": "parquet", "basename_template": "one{i}"}
pyarrow.dataset.write_dataset(
    table, "ckpt", existing_data_behavior="overwrite_or_ignore", **dataset
)
pyarrow.dataset.write_dataset(table, "ckpt", existing_data_behavior="delete_matching", **dataset)
system.delete_dir_contents("ckpt")
with pa.OSFile("hard", "wb") as file:
    file.write(b"new")
pyarrow.parquet.write_metadata(table.schema, "runs/best.pth")
with pyarrow.csv.CSVWriter("hard2", table.schema) as writer:
    writer.write(table)
with pa.ipc.RecordBatchFileWriter("new.arrow", table.schema) as writer:
    writer.write(table)
pyarrow.orc.write_table(table, "new.orc")
pa.create_memory_map("lone", 9).write(b"new")
with pa.output_stream("c") as file:
    file.write(b"new")
tokenizer = Tokenizer(models.BPE())
tokenizer.train_from_iterator(["a b c"], trainers.BpeTrainer(vocab_size=9, show_progress=False))
tokenizer.save("log"); tokenizer.model.save(".", "old"); tokenizer.model.save("runs")
"""


def test_what_pyarrow_and_tokenizers_write(place):
    """pandas and datasets write by pyarrow."""
    for name in ("old-vocab.json", "old-merges.txt", "ckpt/one0"):
        (place.path / name).write_text(OLD)
    place.before = snapshot(place.path)
    code, said = place.run(ARROW)
    assert code == 0, said
    place.assert_unchanged(said)
    assert not re.search("left:|cannot see|the doctor failed", said), said


def test_what_is_written_beside_a_dataset(place):
    """Somebody else's file in the folder stays, once the dataset is written."""
    script = """
import pyarrow as pa, pyarrow.dataset, time
pyarrow.dataset.write_dataset(pa.table({"x": [1]}), "empty", format="parquet")
print("ready 0", flush=True)
time.sleep(99)
"""
    job, _ = started(place, script)
    (place.path / "empty/theirs").write_text("theirs")
    job.send_signal(signal.SIGINT)
    said, _ = job.communicate(timeout=150)
    assert os.listdir(place.path / "empty") == ["theirs"], said


# A Python without gdbm has _dbm, in C: this one opens files as that does, and no event tells.
NDBM = """
import ctypes, os
def open(filename, flags="r", mode=0o666):
    C = ctypes.CDLL(None)
    file = C.open(os.fsencode(filename + ".db"), os.O_RDWR | os.O_CREAT, mode)
    assert C.write(file, b"new", 3) == 3
"""


def test_a_database_of_ndbm(place):
    (place.path.parent / "_dbm.py").write_text(NDBM)
    (place.path / "db.db").write_text(OLD)
    place.before = snapshot(place.path)
    code, said = place.run("import _dbm; _dbm.open('db', 'c'); _dbm.open('new', 'n')")
    assert code == 0, said
    place.assert_unchanged(said)
    assert "put back as before this run: db.db" in said and "removed" in said, said


@pytest.mark.full
def test_processes_of_torchrun(place):
    """Both write the same files at once, as a mistaken script does."""
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
for epoch in range(3):
    torch.save({"epoch": epoch}, "a"); torch.save({}, f"ckpt/{epoch}-{os.environ['RANK']}")
    open("log", "a").write("epoch")
dist.destroy_process_group()
"""
    (place.path.parent / "ranks.py").write_text(script)
    file = str(place.path.parent / "ranks.py")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", file]
    script = f"import sys, runpy; sys.argv = {launcher!r}\n"
    script += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    code, said = place.run(script)
    assert code == 0, said
    place.assert_unchanged(said)
    assert "left:" not in said and "failed" not in said, said


def test_the_script_sees_what_it_wrote(place):
    """Names, bytes and errors are those of a run without the doctor."""
    script = """
import os, stat
open("a", "a").write("new"); assert open("a").read().endswith("anew")
assert stat.S_IMODE(os.stat("c").st_mode) == 0o640
open("c", "r+").write("new"); assert stat.S_IMODE(os.stat("c").st_mode) == 0o640
os.rename("b", "b2"); assert not os.path.exists("b") and os.path.exists("b2")
assert sorted(os.listdir("ckpt")) == ["deep", "one"]
for wrong, error in {"missing/x": FileNotFoundError, "ckpt": IsADirectoryError}.items():
    try:
        open(wrong, "w")
    except error:
        continue
    raise SystemExit(3)
assert not os.path.exists("missing")
try:
    open("a\\0b", "w")
except ValueError:
    print("as usual")
"""
    code, said = place.run(script)
    assert code == 0 and "as usual" in said, said
    place.assert_unchanged(said)


def test_the_users_sitecustomize_is_imported(place):
    folder = place.path.parent / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import builtins; builtins.of_the_user = 1")
    script = "import sys; print(of_the_user, [p for p in sys.path if 'files/site' in p])"
    code, said = place.run(script, env={"PYTHONPATH": str(folder)})
    assert code == 0 and "1 []" in said, said


def test_keep_leaves_what_is_new(place):
    code, said = place.run('import os; os.mkdir("n"); open("n/x", "w"); open("a", "w")', "--keep")
    assert code == 0 and (place.path / "n/x").exists(), said
    assert "left, for --keep was given: n\n" in said and "put back as before this run: a\n" in said
    shutil.rmtree(place.path / "n")
    os.utime(place.path, ns=(0, place.before[os.path.join(os.fsencode(place.path), b".")][3]))
    place.assert_unchanged(said)


def test_the_report_names_paths(place):
    script = 'import os; os.makedirs("out/d"); open("out/d/x", "w"); open("ckpt/one", "w")'
    script += '; os.system("true; tar cf ckpt/deep/t a")'
    said = place.run(script)[1]
    assert "put back as before this run: ckpt/one\n" in said
    assert "it was new (--keep leaves it): ckpt/deep/t, out\n" in said
    assert "programs, only the files that their commands name are kept: tar\n" in said


@pytest.mark.parametrize(
    "command",
    ["cp -r ckpt ckpt", "mkdir -p ckpt/ckpt/deep", "ln -s ckpt ckpt", "cp -r ckpt ckpt/deep"],
)
def test_programs_that_write_into_what_they_read(place, command):
    """GNU's cp copies a folder into itself, before it says that it cannot."""
    script = f"import subprocess; subprocess.run({command.split()})"
    place.assert_unchanged(place.run(script)[1])


@pytest.mark.parametrize("command", ["ln a n", "cp -l a n", "ln a ckpt", "cp -rl ckpt n"])
def test_a_second_name_that_a_program_makes(place, command):
    """By it the run writes into what was there. If it is moved, the old name is no new file."""
    script = f"import os, subprocess; subprocess.run({command.split()})\n"
    script += """for path in ["n", "ckpt/a", "n/one"]:
    if os.path.isfile(path):
        os.rename(path, path + "2")
        open(path + "2", "a").write("x")
open("a", "a").write("x"); open("ckpt/one", "a").write("x"); os.remove("a")
"""
    place.assert_unchanged(place.run(script)[1])


def test_a_run_whose_folder_is_gone_loses_no_file(place):
    """What only looks at a file that is written must not keep it from being kept."""
    script = f"""import os, sys
sys.doctor_files.told.append(lambda path: os.getcwd())
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
open({str(place.path / "a")!r}, "w").write("new")
"""
    place.assert_unchanged(place.run(script)[1])


def test_times_of_two_files_by_one_name(place):
    """The second is one that was there; so nobody is told that something wrote into it."""
    script = """import os
os.utime("b", (1, 1)); os.remove("b"); os.rename("a", "b"); os.utime("b", (2, 2))
"""
    said = place.run(script)[1]
    place.assert_unchanged(said)
    assert "left" not in said, said


def test_programs_that_read_or_write_by_their_flags(place):
    script = 'import os; os.system("find . -name one -delete; find . -name a; gcc -o a nowhere.c")'
    place.run(script)
    script = 'import os; os.system("gcc --version -o a >/dev/null; echo x > b; rm a b")'
    place.assert_unchanged(place.run(script)[1])


def test_links_that_programs_change(place):
    os.symlink("ckpt", place.path / "latest")
    os.symlink("runs", place.path / "last")
    place.before = snapshot(place.path)
    script = """import os
os.system("ln -sfn runs latest; ls -d last | xargs rm")
"""
    place.assert_unchanged(place.run(script)[1])


def test_programs_that_read_do_not_own_what_they_read(place):
    """What somebody else writes meanwhile stays."""
    (place.path / "new").mkdir()
    script = """import os, time
for line in ("zip -qr code.zip .", "tar czf x.tgz .", "diff -r ckpt runs", "sed s/a/b/ a"):
    os.system(line + " >/dev/null")
os.system("git init -q new; git -C new add . ; git -C new status -s; cat $(echo a) > /dev/null")
print("ready", os.getpid(), flush=True); time.sleep(2)
"""
    job, _ = started(place, script)
    for name in ("a", "ckpt/one"):
        (place.path / name).write_text("theirs")
    said, _ = job.communicate(timeout=150)
    for name in ("a", "ckpt/one"):
        assert (place.path / name).read_text() == "theirs", (name, said)
    assert not (place.path / "code.zip").exists() and not (place.path / "x.tgz").exists(), said


def test_a_python_without_the_hook_is_named(place):
    """The shell takes it away: what a link can keep is kept."""
    script = """import os, sys
lines = ["PYTHONPATH=. python -c", "env -u PYTHONPATH python -c", "export PYTHONPATH=.; python -c"]
for name, line in zip("abc", lines):
    code = f"import os; os.remove('{name}')"
    os.system(f'{line} "{code}"'.replace("python", sys.executable))
code = "open('log', 'w')"
os.system(f'PYTHONPATH=.:$PYTHONPATH {sys.executable} -c "{code}"')
"""
    said = place.run(script)[1]
    place.assert_unchanged(said)
    assert "only the files that their commands name are kept: python" in said, said


def test_a_large_file_that_a_program_writes_is_told(place):
    script = """import os, sys
sys.modules["doctor_files_hook.programs"].BYTES = 9
os.system("echo new >> a; cat b >> c; touch -r b b; tee n < log >/dev/null")
"""
    said = place.run(script)[1]
    assert "written by a program: what was in them is lost: a, c\n" in said, said


def test_a_program_with_an_environment_of_its_own(place):
    """A PYTHONPATH, too: the hook gets through."""
    inside = "open('a', 'w'); import sys; print([p for p in sys.path if p.endswith('mine')])"
    script = f"""import subprocess, sys
env = {{"PYTHONPATH": "/mine"}}
subprocess.run([sys.executable, "-c", {inside!r}], env=env, check=True)
subprocess.run([sys.executable, "-c", "open('ckpt/one', 'w')"], env={{b"PYTHONPATH": b"/x"}})
"""
    code, said = place.run(script)
    assert code == 0 and "['/mine']" in said, said
    place.assert_unchanged(said)


def test_new_files_in_caches_stay(place):
    home = place.path / "home"
    (home / ".cache/hub").mkdir(parents=True)
    (home / ".cache/hub/old").write_text("old")
    script = 'open("home/.cache/hub/new", "w").write("x"); open("home/.cache/hub/old", "w")'
    said = place.run(script, env={"HOME": str(home), "XDG_CACHE_HOME": ""})[1]
    assert (home / ".cache/hub/new").read_text() == "x", said
    assert (home / ".cache/hub/old").read_text() == "old", said
    assert "left in caches, so that nothing is downloaded again: home/.cache/hub/new" in said


def test_a_cache_in_a_new_folder_stays(place):
    script = 'import os; os.makedirs("out/hf"); open("out/hf/model", "w"); open("out/log", "w")'
    said = place.run(script, env={"HF_HOME": str(place.path / "out/hf")})[1]
    assert os.listdir(place.path / "out") == ["hf"], said
    assert "so that nothing is downloaded again: out/hf" in said


def test_what_nobody_sees_is_told(place):
    """Here a C library writes."""
    script = """
import ctypes
libc = ctypes.CDLL(None); libc.fopen.restype = ctypes.c_void_p
for name in (b"a", b"new"):
    file = ctypes.c_void_p(libc.fopen(name, b"w")); libc.fputs(b"new", file); libc.fclose(file)
"""
    said = place.run(script)[1]
    assert "changed or new, by something that the doctor cannot see: a, new\n" in said


def test_more_files_than_are_kept_is_told(place):
    script = """
sys.modules["doctor_files_hook.programs"].LINKS = 5
os.system("ls none | xargs rm -f")
"""
    said = place.run(HEAD + script)[1]
    place.assert_unchanged(said)
    told = "more files than are kept for a program; what it did to the others stays: "
    assert told + str(place.path) in said, said


def test_a_worktree_of_git(tmp_path):
    """Its .git is a file, and what it shares with the others lies elsewhere.

    What git adds to its own folder stays.
    """
    git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
    base = tmp_path / "main"
    base.mkdir()
    for line in ("init -q", "commit -q --allow-empty -m one", "worktree add -q ../tree/work"):
        subprocess.check_call([*git, *line.split()], cwd=base)
    place = Place(tmp_path / "tree/work/in", state=tmp_path / "state")
    subprocess.check_call([*git, "add", "."], cwd=place.path)
    before = snapshot(base) | snapshot(tmp_path / "tree")
    script = f"""
for line in ("commit -qm two", "tag v1", "rm -qf a"):
    subprocess.check_call([*{git!r}, *line.split()])
"""
    code, said = place.run(HEAD + script)
    assert code == 0 and "left:" not in said, said
    after = snapshot(base) | snapshot(tmp_path / "tree")
    for name, facts in before.items():
        assert facts[-1] is None or after[name] == facts, (name, said)  # None: a folder


def test_what_cannot_be_kept_cannot_be_overwritten(place):
    """Here the journal cannot grow, as on a full disk."""
    script = """
import os, resource, shutil
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
for lost in (lambda: open("a", "w"), lambda: os.remove("b"), lambda: shutil.rmtree("ckpt")):
    try:
        lost()
    except PermissionError as error:
        print("refused:", error, flush=True)
print(open("a").read()[:3])
"""
    code, said = place.run(script)
    assert code == 0 and said.count("refused: the doctor could not keep what is there") == 3, said
    place.assert_unchanged(said)


# ---- 2. Names, permissions, file systems

STRANGE = [b"\xd1\xb5\xc1\xb7", "训练".encode(), b"a\nb", b"a\tb ", b"q\"'\\", b"\xff\xfe"]


@pytest.mark.parametrize("locale", ["C", full("C.UTF-8"), "ascii"])
def test_names_of_any_bytes(tmp_path, locale):
    env = {"LC_ALL": "C" if locale == "ascii" else locale}
    if locale == "ascii":
        env |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    place = Place(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xd1\xb5\n\xc1\xb7")) / "work")
    here = os.fsencode(place.path)
    for name in STRANGE:
        os.mkdir(os.path.join(here, name))
        for inner in STRANGE:
            with open(os.path.join(here, name, inner), "w") as file:
                file.write("old")
    place.before = snapshot(place.path)
    script = f"""
import os, shutil
for number, name in enumerate({STRANGE!r}):
    for inner in {STRANGE!r}:
        path = os.path.join(name, inner)
        open(path if number % 2 else os.fsdecode(path), "w").write("new")
    if number % 3 == 0:
        shutil.rmtree(name)
    if number % 3 == 1:
        os.rename(os.fsdecode(name), os.fsdecode(name) + "2")
    open(name + b"3", "w").write("new")
"""
    code, said = place.run(script, env=env)
    assert code == 0, said
    place.assert_unchanged(said)
    assert "put back" in said and "left:" not in said, said


USER = 12345  # tests may run as root, who may write everywhere
# Its processes fork: another user may not be able to start root's Python.
AS_USER = f"""
import ctypes, json, os, runpy, shutil, subprocess, sys, textwrap, time, traceback, urllib.parse
sys.path.insert(0, {str(ROOT)!r})
from doctor import files
import doctor.files.hook, doctor.files.tell
os.setgroups([]); os.setgid({USER}); os.setuid({USER})
def work(run):
    if os.fork() == 0:
        os.environ.update(run.env()); files.install()
        open("closed/mine", "a").write("new"); open("closed/mine", "w").write("newer")
        for refused in (lambda: open("closed/n", "w"), lambda: os.remove("closed/mine")):
            try:
                refused()
            except PermissionError:
                print("refused", flush=True)
        os._exit(0)
    os.wait()
    print(open("closed/mine").read(), flush=True)
sys.exit(files.run_guarded(work))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_that_may_not_be_written(tmp_path):
    """Its files may be: they are copied, and put back in place."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's folders are root's alone
    try:
        base.chmod(0o755)
        place = Place(base / "work", state=base / "state")
        (place.path / "closed").mkdir()
        (place.path / "closed/mine").write_text("old")
        place.state.mkdir()
        for path in (place.path / "closed/mine", place.state):
            os.chown(path, USER, USER)
        place.before = snapshot(place.path)
        inode = (place.path / "closed/mine").stat().st_ino
        command = [sys.executable, "-c", AS_USER]
        env = os.environ | {"DOCTOR_STATE": str(place.state)}
        said = subprocess.check_output(command, cwd=place.path, env=env, text=True, timeout=150)
        assert said.count("refused") == 2 and "newer\n" in said, said
        assert "put back as before this run: closed/mine" in said, said
        place.assert_unchanged(said)
        assert (place.path / "closed/mine").stat().st_ino == inode
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("killed", [False, True])
def test_another_file_system(killed, tmp_path):
    """A link cannot cross: the kept files lie in a hidden folder there."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    place = Place(tmp_path / "work")
    place.state = memory / f"doctor-state-{os.getpid()}"
    place.state.mkdir()
    try:
        script = WAYS["rmtree and write"] + WAYS["r+"].join("\n\n") + WAYS["backup"]
        script = HEAD + script + ("\nprint('ready', flush=True); time.sleep(60)" * killed)
        job = place.start(script)
        if killed:
            while "ready" not in job.stdout.readline():
                pass
            kill_both(job)
            said = place.restore()
        else:
            said, _ = job.communicate(timeout=150)
        place.assert_unchanged(said)
        assert not any(".training-doctor" in name for name in os.listdir("/"))
    finally:
        shutil.rmtree(place.state)


def children(pid):
    names = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(name) for name in names]


def kill_both(job):
    """The two processes of the doctor at once: nobody is left who could put back."""
    (child,) = children(job.pid)
    os.kill(job.pid, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    os.kill(job.pid, signal.SIGKILL)
    job.wait(10)


# ---- 3. However the doctor ends

RUNS = (
    HEAD
    + """
subprocess.Popen(["sleep", "300"], start_new_session=True)
open("a", "w").write("new"); shutil.rmtree("ckpt"); os.mkdir("out"); os.rename("b", "b2")
f = open("c", "a"); f.write("new"); f.flush(); open("out/x", "w").write("new")
open("log", "a").write("new")
print("ready", os.getpid(), flush=True)
while True:
    open("log", "a").write("new"); open("out/x", "a").write("new")
"""
)


def started(place, script=RUNS, **more):
    job = place.start(script, **more)
    for line in job.stdout:
        if line.startswith("ready"):
            return job, int(line.split()[1])
    raise AssertionError("it has not begun")


def processes_of(place):
    """Those whose working folder is the place."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            dead = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if os.readlink(f"/proc/{name}/cwd") == str(place.path) and not dead:
                found.append(Path(f"/proc/{name}/cmdline").read_text())
    return found


@pytest.mark.parametrize("number", ["INT", "TERM", "HUP", full("QUIT")])
def test_signals(place, number):
    job, _ = started(place)
    job.send_signal(signal.Signals["SIG" + number])
    said, _ = job.communicate(timeout=150)
    assert job.returncode == 128 + signal.Signals["SIG" + number], said
    assert "put back as before this run: a, b, c, ckpt/deep/two, ckpt/one, log" in said
    place.assert_unchanged(said)
    assert not processes_of(place)


@pytest.mark.parametrize("who", ["parent", "child"])
def test_one_of_the_doctors_processes_is_killed(place, who):
    job, _ = started(place)
    (child,) = children(job.pid)
    os.kill(job.pid if who == "parent" else child, signal.SIGKILL)
    said, _ = job.communicate(timeout=150)
    assert "put back as before this run: a, b, c" in said
    place.assert_unchanged(said)
    wait_for(lambda: not processes_of(place))


@pytest.mark.parametrize("by", ["--restore", "the next start"])
def test_both_are_killed(place, by):
    job, _ = started(place)
    kill_both(job)
    wait_for(lambda: [p for p in processes_of(place) if "sleep" not in p] == [])
    said = place.restore() if by == "--restore" else place.run("pass")[1]
    assert "an earlier run of the doctor was killed" in said and "ckpt/deep/two" in said, said
    place.assert_unchanged(said)
    assert not processes_of(place)
    assert not place.restore().strip()


def test_a_killed_doctor_of_another_machine_is_left_to_it(place):
    """Whether it lives cannot be known: locks may not be seen here."""
    job, _ = started(place)
    kill_both(job)
    wait_for(lambda: [p for p in processes_of(place) if "sleep" not in p] == [])
    (alive,) = place.state.glob("*/alive-*")
    there = alive.with_name(alive.name.partition("@")[0] + "@of-its-own@node7")
    alive.rename(there)
    assert doctors.lives(os.fsencode(there)) and not doctors.lives(os.fsencode(alive))
    assert not place.restore().strip()
    code, said = place.run('open("b2", "a").write("newer"); open("new", "w")')
    assert code == 0 and "earlier run" not in said and there.exists(), said
    assert (place.path / "a").read_text() == "new" and not (place.path / "new").exists()
    beat = there.with_name("heartbeat").stat().st_mtime
    os.utime(there.with_name("heartbeat"), (0, 0))
    said = place.restore()
    assert "a doctor on node7 was killed, it seems: --restore puts its files back there; " in said
    assert str(there.parent) in said and (place.path / "a").read_text() == "new"
    os.utime(there.with_name("heartbeat"), (beat, beat))
    there.rename(alive)
    place.assert_unchanged(place.restore())


def test_the_heart_of_a_doctor_on_another_machine(tmp_path, monkeypatch):
    """A process of its run ends when the doctor has put back, or shows no more that it lives."""
    alive, heartbeat, now = tmp_path / "alive-1-ab@x@node7", tmp_path / "heartbeat", [1000.0]
    alive.touch(), heartbeat.touch()
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    folder, alive = os.fsencode(tmp_path), os.fsencode(alive)
    recorder = record.Recorder(types.SimpleNamespace(alive=alive, folder=folder))
    lived = []
    for beat in (1, 2, 2):
        os.utime(heartbeat, (beat, beat))
        lived.append(recorder.doctor_lives())
        now[0] += 301
    assert lived == [True, True, False]
    os.utime(heartbeat, (3, 3))
    assert recorder.doctor_lives()
    os.unlink(alive)
    assert not recorder.doctor_lives()


def test_whose_machine_is_this_one():
    """A container has another name; a machine that was started anew has another boot."""
    places = itertools.product((hosts.BOOT, "another"), (hosts.HOST, "node7"))
    of = {at: doctors.elsewhere("/x/alive-1-ab@{}@{}".format(*at).encode()) for at in places}
    assert [at for at, host in of.items() if host] == [("another", "node7")]
    assert not doctors.elsewhere(b"/x/alive-1-ab")  # of an older doctor


def test_a_run_whose_journal_is_gone_writes_nothing(place):
    """As where another machine's doctor has put it back: neither what it has written, nor more."""
    script = """import os, time
folder, process = os.path.dirname(os.environ["DOCTOR_FILES"]), sys.doctor_files
process.recorder = type(process.recorder)(process)
process.recorder.thread = True  # none that would end this process now
time.sleep(1)
open("a", "w").write("new")
os.rename(folder, folder + ".away")
for name in ("a", "b"):
    try:
        open(name, "w")
    except PermissionError as error:
        print("stopped:", name, error)
os.rename(folder + ".away", folder)
print(open("a").read(), open("b").read(), flush=True)
"""
    code, said = place.run(f"import sys\n{script}")
    assert code == 0 and f"new {OLD}b\n" in said, said
    assert "stopped: a the doctor's journal is gone: " in said and "stopped: b" in said, said
    place.assert_unchanged(said)


def test_a_killed_run_is_never_put_over_a_newer_file(place):
    """The user trains for real before the doctor starts again."""
    job, _ = started(place)
    kill_both(job)
    wait_for(lambda: [p for p in processes_of(place) if "sleep" not in p] == [])
    time.sleep(4)
    for name in ("a", "out/x"):
        (place.path / name).write_text("trained for real")
    (place.path / "ckpt").mkdir()
    (place.path / "ckpt/one").write_text("trained for real")
    said = place.restore()
    for name in ("a", "out/x", "ckpt/one"):
        assert (place.path / name).read_text() == "trained for real", said
        assert f"left: {name}: " in said
    older = said.split("left: a: somebody else wrote it since; the older one: ")[1].split("\n")[0]
    assert Path(older).read_text() == OLD + "a"
    for name in ("b", "c", "log", "ckpt/deep/two"):
        assert (place.path / name).read_text() == OLD + name
    assert not place.restore().strip() and Path(older).exists()


def test_killed_while_it_puts_back(place):
    """Again and again, then once to the end."""
    job, _ = started(place)
    kill_both(job)
    for wait in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3):
        one = place.start("", "--restore")
        time.sleep(wait)
        one.kill()
        one.wait()
    said = place.restore()
    place.assert_unchanged(said)


def test_another_doctor_has_put_it_back(tmp_path):
    """While this one was about to look: its folder is gone."""
    gone = journal.Journal(os.fsencode(tmp_path / "gone"))
    assert restore.put_back(gone, list) is None and not doctors.doctors_of(gone.folder)


def test_a_cut_line_of_the_journal(place):
    job, _ = started(place)
    kill_both(job)
    wait_for(lambda: [p for p in processes_of(place) if "sleep" not in p] == [])
    (journal,) = place.state.glob("*/journal")
    with journal.open("a") as file:
        file.write('{"do": "keep", "path": "/x')
    place.assert_unchanged(place.restore())


# ---- 4. Other people's files


def test_somebody_else_writes_during_the_run(place):
    script = (
        HEAD
        + """
open("a", "w").write("new"); open("b", "w").write("new"); open("out", "w").write("new")
os.mkdir("dir"); open("dir/x", "w").write("new"); time.sleep(4)
print("ready", os.getpid(), flush=True); time.sleep(4)
open("b", "w").write("newer")
"""
    )
    job, _ = started(place, script)
    for name in ("a", "b", "out", "dir/theirs"):
        (place.path / name).write_text("theirs")
    said, _ = job.communicate(timeout=150)
    for name in ("a", "b", "out", "dir/theirs"):
        assert (place.path / name).read_text() == "theirs", (name, said)
    assert not (place.path / "dir/x").exists()
    for name in ("a", "b"):
        older = said.split(f"left: {name}: ")[1].split("the older one: ")[1].split("\n")[0]
        assert Path(older).read_text() == OLD + name
    for name in ("out", "dir/theirs"):
        assert f"left: {name}: the doctor did not see the run write it" in said


def test_somebody_else_puts_a_file_in_the_place_of_an_open_one(place):
    """As an editor does: it is another inode than the one that the run writes."""
    script = (
        HEAD
        + """
files = [open("a", "w"), open("b", "r+"), open("log", "a")]
print("ready", os.getpid(), flush=True); time.sleep(2)
files[0].close(); time.sleep(2)  # another time than that of the others is noted
for file in files[1:]:
    file.write("new")
"""
    )
    job, _ = started(place, script)
    for name in "ab":
        (place.path / "theirs").write_text("theirs")
        os.replace(place.path / "theirs", place.path / name)
    said, _ = job.communicate(timeout=150)
    for name in "ab":
        assert (place.path / name).read_text() == "theirs", (name, said)
        older = said.split(f"left: {name}: ")[1].split("the older one: ")[1].split("\n")[0]
        assert Path(older).read_text() == OLD + name
    assert (place.path / "log").read_text() == OLD + "log", said


@pytest.mark.parametrize("first", [0, full(1)])
@pytest.mark.parametrize("how", ["ends", "both killed"])
@pytest.mark.parametrize("where", ["in one folder", full("in two")])
def test_two_doctors(tmp_path, first, how, where):
    """Whoever ends last puts back what was there before both."""
    place = Place(tmp_path / "work")
    other = tmp_path / "other"
    other.mkdir()
    script = (
        HEAD
        + f"""
os.chdir({str(place.path)!r})
for n in range(2):
    open("a", "w").write("new"); open("log", "a").write("new"); open("n", "w").write("n")
    os.makedirs("out", exist_ok=True); open(f"out/{{os.getpid()}}", "w").write("n"); time.sleep(1.2)
open("MINE", "w").write("n")
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""
    )
    folders = [place.path, place.path if where == "in one folder" else other]
    jobs = []
    for name, folder in zip("xy", folders, strict=True):
        jobs.append(started(place, script.replace("MINE", name), cwd=folder)[0])
    said = []
    for number in (first, 1 - first):
        if how == "ends":
            jobs[number].send_signal(signal.SIGTERM)
            said.append(jobs[number].communicate(timeout=150)[0])
        else:
            kill_both(jobs[number])
            said.append(place.restore())
        if len(said) == 1:
            assert (place.path / "a").read_text() == "new", said
            if where == "in two":
                assert not (place.path / "xy"[number]).exists(), said
            elif how == "ends":
                assert "another doctor is at work here" in said[0]
    place.assert_unchanged(said)
    assert not any("left:" in one for one in said), said
    assert os.listdir(place.state) == ["lock"]


# ---- 5. Soak: killed at random moments

WILD = (
    HEAD
    + """
import random, sqlite3
NAMES = ["a", "b", "c", "hard", "hard2", "lone", "text.json", "log", "link", "dangling", "ckpt",
         "ckpt/one", "ckpt/deep", "ckpt/deep/two", "runs", "runs/best.pth", "empty", "n", "ckpt/n",
         "out", "out/n", "out/deep", "out/deep/n", "empty/n", "out/one", "runs/one", "out/deep/two"]
def write(p, q): open(p, random.choice(["w", "a", "r+", "w+", "x"])).write("new" * 1000)
def save(p, q): open(p + ".tmp", "wb").write(b"new"); os.replace(p + ".tmp", p)
def held(p, q): HELD.append(open(p, "a")); HELD[-1].write("new"); HELD[-1].flush()
def database(p, q): d = sqlite3.connect(p + ".db"); d.execute("create table t (x)"); d.close()
def program(p, q):
    command = random.choice(["cp -r", "mv", "rm -rf", "touch", "tar cf", "mkdir", "ln", "ln -s"])
    subprocess.run([*command.split(), p, q][: 3 + command.count(" ")], stderr=subprocess.DEVNULL)
def child(p, q):
    code = f"import shutil; open({p!r}, 'a').write('new'); shutil.move({p!r}, {q!r})"
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
def common(p, q):
    open("../log", "a").write("new"); open(f"../{os.getpid()}.tmp", "w").write("new")
    os.replace(f"../{os.getpid()}.tmp", "../b"); open("../ckpt/one", "w").write("new")
HELD = []
os.chdir("FOLDER")
ACTIONS = [write, write, save, save, held, database, program, child, common,
    lambda p, q: os.rename(p, q), lambda p, q: shutil.rmtree(p), lambda p, q: os.remove(p),
    lambda p, q: os.makedirs(p), lambda p, q: os.rmdir(p), lambda p, q: os.link(p, q),
    lambda p, q: os.symlink(p, q), lambda p, q: os.truncate(p, 3), lambda p, q: shutil.move(p, q),
    lambda p, q: shutil.copy2(p, q), lambda p, q: shutil.copytree(p, q),
    lambda p, q: os.chmod(p, random.choice([0o600, 0o777, 0o500])),
    lambda p, q: os.utime(p, (random.random(), 5)), lambda p, q: json.dump([p], open(q, "w"))]
while True:
    try:
        random.choice(ACTIONS)(random.choice(NAMES), random.choice(NAMES))
    except (OSError, ValueError, shutil.Error, sqlite3.Error) as error:
        if "doctor" in str(error):
            raise
    del HELD[3:]
"""
)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak(tmp_path):
    """DOCTOR_KILLS and DOCTOR_SEED choose how many, and which."""
    kills = int(os.environ.get("DOCTOR_KILLS", "300"))
    seed = int(os.environ.get("DOCTOR_SEED", str(time.time_ns() % 10**6)))
    draw, counts = random.Random(seed), collections.Counter()
    for number in range(kills):
        place = Place(tmp_path / f"{number}/work")
        for folder in (place.path / "first", place.path / "second"):
            folder.mkdir()
            fill(folder)
        place.before = snapshot(place.path)
        libraries = number % 20 == 19
        both = ["first", "second"][: 2 if draw.random() < 0.15 else 1]
        scripts = [LIBRARIES if libraries else WILD.replace("FOLDER", folder) for folder in both]
        jobs = [place.start(script) for script in scripts]
        said = []
        for job in jobs:
            said.append(job.stdout.readline())
            time.sleep(draw.uniform(0, 9 if libraries else 1.5))
            how = draw.choice(["both", "both", "both", "parent", "child", "TERM", "INT", "script"])
            counts[how] += 1
            kill_somehow(job, how)
        for job in jobs:
            said.append(job.communicate(timeout=150)[0])
        while draw.random() < 0.3:  # killed while it puts back
            counts["restore"] += 1
            one = place.start("", "--restore")
            time.sleep(draw.uniform(0.1, 0.5))
            one.kill()
            said.append(one.communicate()[0])
        said.append(place.restore())
        text = "\n".join(said)
        place.assert_unchanged(f"seed {seed}, number {number}: {text}")
        assert "the doctor failed" not in text and "left:" not in text, text
        assert os.listdir(place.state) == ["lock"], text
        assert not processes_of(place)
        shutil.rmtree(tmp_path / str(number))
    print(f"\n0 files lost in {sum(counts.values())} kills (seed {seed}): {dict(counts)}")


def kill_somehow(job, how):
    if job.poll() is not None or not children(job.pid):
        return
    if how == "both":
        kill_both(job)
    elif how == "script":
        for pid in children(children(job.pid)[0]):
            os.kill(pid, signal.SIGKILL)
    elif how in ("parent", "child"):
        os.kill(job.pid if how == "parent" else children(job.pid)[0], signal.SIGKILL)
    else:
        job.send_signal(signal.Signals["SIG" + how])
