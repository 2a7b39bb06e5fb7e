"""What comes between the doctor and the files that it keeps: signals, finalizers, other threads.

And folders that cannot be written, links where folders were, mounts. See test_doctor_files.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import HEAR_SIGNALS, PYTHON, ROOT

from doctor.files import disk, guard, keep
from doctor.files.journal import Journal
from tests.docs.test_doctor_files import (
    AS_USER,
    HEAD,
    OLD,
    PLAYER,
    USER,
    Place,
    kill_both,
    place,
    processes_of,
    snapshot,
    started,
    wait_for,
)

__all__ = ["place"]
pytestmark = pytest.mark.timeout(200)
NAMES = [f"old/{number}" for number in range(100)]


def many(place):
    (place.path / "old").mkdir()
    for name in NAMES:
        (place.path / name).write_text(OLD)
    place.before = snapshot(place.path)


def ends_well(place, script, code=0):
    """What was said; nothing is lost, and nothing is left."""
    returned, said = place.run(HEAD + script)
    assert returned == code, said
    place.assert_unchanged(said)
    for word in ("left:", "the doctor failed", "cannot see", "Traceback"):
        assert word not in said, said
    return said


def test_a_handler_that_saves(place):
    """At any moment, also while another file is being kept: it waits for that."""
    many(place)
    script = f"""
import signal
names = {NAMES}
def save(*_):
    if names:
        open(names.pop(), "w").write("new")
signal.signal(signal.SIGALRM, save)
assert signal.getsignal(signal.SIGALRM) is save and signal.signal(signal.SIGALRM, save) is save
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
while names:
    open("a", "a").write("x")
signal.setitimer(signal.ITIMER_REAL, 0)
assert all(open(name).read() == "new" for name in {NAMES})
"""
    ends_well(place, script)


def test_a_handler_in_the_midst_of_a_file_of_another_folder(place):
    """As in shutil.rmtree, which opens names in open folders: the handler's names are its own."""
    many(place)
    script = f"""
import signal
names = {NAMES}
def save(*_):
    if names:
        open(names.pop(), "w").write("new")
signal.signal(signal.SIGALRM, save)
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
folder = os.open("ckpt", os.O_RDONLY)
while names:
    os.close(os.open("one", os.O_WRONLY, dir_fd=folder))
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    ends_well(place, script)


@pytest.mark.parametrize("ends", ["os._exit(3)", "raise SystemExit(3)"])
def test_a_handler_that_ends_the_process(place, ends):
    """It came while the lock of all runs was held: nobody waits for it, and none is left behind."""
    script = f"""
import signal
for _ in range(8):
    is_on, says = os.pipe()
    child = os.fork()
    if child == 0:
        def end(*_): {ends}
        signal.signal(signal.SIGTERM, end)
        os.write(says, b"on")
        try:
            while True:
                open("a", "a").write("x")
        finally:
            os._exit(3)
    os.read(is_on, 2)
    ended = 0
    while not ended:  # again: what is raised in a finalizer is ignored
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        ended, status = os.waitpid(child, os.WNOHANG)
    assert os.waitstatus_to_exitcode(status) == 3
"""
    ends_well(place, script)


def test_a_script_that_waits_for_all_its_threads(place):
    """The doctor's own are not among them, and take no signal that these have blocked."""
    script = """
import signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
open("a", "w").write("new"); time.sleep(1.2)
assert threading.enumerate() == [threading.main_thread()]
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.2)
assert signal.sigwait([signal.SIGUSR1]) == signal.SIGUSR1
"""
    ends_well(place, script)


def test_a_handler_that_raises(place):
    """The script gets its own error, at a call that was complete."""
    script = """
import signal
class Late(Exception): pass
def late(*_):
    signal.setitimer(signal.ITIMER_REAL, 1)  # what is raised in a finalizer is ignored
    raise Late
signal.signal(signal.SIGALRM, late)
for _ in range(40):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        while True:
            open("a", "a").write("x")
    except Late:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""
    ends_well(place, script)


def test_a_finalizer_that_saves(place):
    """Garbage is collected at any line, also of ours."""
    many(place)
    script = f"""
import gc
class Saves:
    def __init__(self, name): self.name, self.me = name, self
    def __del__(self):
        with open(self.name, "w") as file: file.write("new")
for number, name in enumerate({NAMES}):
    gc.collect(); Saves(name); gc.set_threshold(11 + 7 * (number % 30))
    for _ in range(8): open("a", "w").write("x")
gc.collect()
assert gc.isenabled() and all(open(name).read() == "new" for name in {NAMES})
"""
    ends_well(place, script)


def test_what_a_handler_raises_is_not_lost(place):
    """Much of the time garbage is collected here."""
    script = """
import signal
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
heap, lost = [{"id": n, "more": [n]} for n in range(100_000)], 0
for _ in range(12):
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    try:
        rows, until = [], time.time() + 5
        while time.time() < until:
            rows.append({"id": 1, "more": [1, 2]})
        lost += 1
    except Late:
        pass
assert lost == 0, lost
"""
    ends_well(place, script)


def test_like_the_built_in_functions(place):
    """A class's attribute, a pickle, keywords: nothing tells them apart."""
    script = """
import pathlib, pickle, signal
class Files:
    names, entries = os.listdir, os.scandir
with Files().entries(".") as entries:
    assert sorted(Files().names(".")) == sorted(entry.name for entry in entries)
assert len([*pathlib.Path().iterdir()]) == len(os.listdir())
for one in (os.listdir, os.scandir, os.open, os._exit, os.execve, signal.signal):
    assert pickle.loads(pickle.dumps(one)) is one
signal.signal(signalnum=signal.SIGUSR1, handler=signal.SIG_IGN)
assert signal.getsignal(signalnum=signal.SIGUSR1) is signal.SIG_IGN
assert os.listdir in os.supports_fd and {os.open, os.mkfifo} <= os.supports_dir_fd
"""
    ends_well(place, script)


def test_a_process_ends_though_nothing_can_be_written(place):
    script = """
import resource
child = os.fork()
if child == 0:
    open("a", "w").write("x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    try:
        os._exit(0)
    finally:
        print("went on", flush=True)
        os.kill(os.getpid(), 9)
assert os.waitpid(child, 0)[1] == 0
"""
    said = ends_well(place, script)
    assert "went on" not in said


def test_threads_that_write_and_move_one_file(place):
    script = """
import threading
def save():
    for number in range(60):
        try:
            open("a", "w").write("n" * number); os.replace("a", "b")
        except FileNotFoundError:
            pass
threads = [threading.Thread(target=save) for _ in range(3)]
[one.start() for one in threads]; [one.join() for one in threads]
time.sleep(1.2)
open("a", "w").write("n"); open("b", "a").write("n")
"""
    ends_well(place, script)


def test_a_thread_moves_what_another_is_about_to_open(place):
    """Then the other makes a new file: it is the run's, too."""
    script = """
import threading
def between(path):
    told.clear()
    other = threading.Thread(target=os.replace, args=["a", "b"]); other.start(); other.join()
told = sys.doctor_files.told  # called when what is there has been kept
told.append(between)
open("a", "w").write("n" * 9)
open("a", "a").write("n")
"""
    ends_well(place, script)


HELD = """
child = os.fork()
if child == 0:
    file = open("ckpt/new", "w"); file.write("new"); file.flush(); time.sleep(0.8); os._exit(0)
time.sleep(0.3)
"""


@pytest.mark.parametrize("before", ["os.system('echo x > ckpt/new')", HELD])
def test_a_link_where_a_folder_was(place, before):
    """What the link leads to is another folder of the user's."""
    (place.path / "store").mkdir()
    (place.path / "store/new").write_text(OLD)
    (place.path / "store/one").write_text(OLD)
    place.before = snapshot(place.path)
    more = "\nshutil.rmtree('ckpt'); os.symlink('store', 'ckpt'); time.sleep(0.8)\n"
    said = place.run(HEAD + before + more)[1]
    place.assert_unchanged(said)
    assert "left:" not in said, said


def test_sockets_and_pipes(place):
    ends_well(place, "import socket; s = socket.socket(1); s.bind('sock'); os.mkfifo('pipe')\n")


def test_blocks_of_shared_memory(place):
    """Files of /dev/shm: a new one goes, one that was there stays as it was."""
    from multiprocessing.shared_memory import SharedMemory

    block = SharedMemory(create=True, size=8)
    try:
        block.buf[:3] = b"old"
        old, new = block._name, f"/new-{os.getpid()}"
        script = f"""
from multiprocessing.shared_memory import SharedMemory
SharedMemory({new!r}, create=True, size=1000)
one = SharedMemory({old!r}); one.buf[:3] = b"new"; one.unlink()
"""
        code, said = place.run(HEAD + script)
        assert code == 0 and "left:" not in said, said
        assert not os.path.exists("/dev/shm" + new)
        assert Path("/dev/shm" + old).read_bytes()[:3] == b"old"
    finally:
        block.close()
        block.unlink()


def test_a_hole_stays_one(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.write(b"begin")
        file.seek(1 << 30)
        file.write(b"middle")
        file.truncate((1 << 30) + (1 << 20))
    disk.copy(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "b"))
    assert (tmp_path / "b").stat().st_blocks < 1000
    with open(tmp_path / "b", "rb") as file:
        assert file.read(5) == b"begin" and file.seek(1 << 30) and file.read(7) == b"middle\0"
    assert (tmp_path / "b").stat().st_size == (tmp_path / "a").stat().st_size


def test_sqlite_through_a_link(place):
    """Its journals lie beside the file, not beside the link; a crash has left one."""
    there = place.path.parent / "there"
    crash = (
        "import os, sqlite3; d = sqlite3.connect('x.db'); d.execute('pragma journal_mode=wal')\n"
    )
    crash += "d.execute('create table t (x)'); d.commit(); os._exit(0)"
    there.mkdir()
    subprocess.check_call([sys.executable, "-c", crash], cwd=there)
    assert (there / "x.db-wal").stat().st_size
    (place.path / "db").symlink_to("../there/x.db")
    place.before, before = snapshot(place.path), snapshot(there)
    script = "import sqlite3; d = sqlite3.connect('db'); d.execute('insert into t values (1)')\n"
    ends_well(place, script + "d.commit(); d.close()\n")
    assert snapshot(there) == before


def test_memory_that_is_a_file():
    """/dev/shm holds files, as any folder."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = Place(Path(folder) / "work", state=Path(folder) / "state")
        shm = f"/dev/shm/new-{os.getpid()}"
        ends_well(place, f"open('a', 'w').write('n'); open('{shm}', 'w').write('n')\n")
        assert not os.path.exists(shm)


@pytest.fixture
def users_place():
    """A Place that another user may look into, with a state folder of his own."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's folders are root's alone
    base.chmod(0o755)
    place = Place(base / "work", state=base / "state")
    place.state.mkdir()
    os.chown(place.state, USER, USER)
    yield place
    shutil.rmtree(base)


def said_to_user(place, lines):
    """What the doctor says to him of a script with these lines."""
    script = re.sub(r"        open\(\"closed.*?os\._exit\(0\)\n", lines, AS_USER, flags=re.S)
    script = script.replace('    print(open("closed/mine").read(), flush=True)\n', "")
    assert lines in script and 'open("closed/mine")' not in script.replace(lines, "")
    env = os.environ | {"DOCTOR_STATE": str(place.state)}
    command = [sys.executable, "-c", script]
    return subprocess.check_output(command, cwd=place.path, env=env, text=True, timeout=150)


CLOSES = """
        open("a", "w").write("new"); open("ckpt/one", "w").write("new"); os.chmod("ckpt", 0o600)
        os.makedirs("out/deep"); open("out/deep/x", "w").write("new"); os.chmod("out/deep", 0o500)
        os.mkdir("shut"); open("shut/x", "w").write("new"); os.chmod("shut", 0)
        import tempfile; tempfile.NamedTemporaryFile().close()
        os._exit(0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_folders_that_were_closed_and_those_of_others(users_place):
    """Not root: it may not look into them, and may not set the time of /tmp."""
    place = users_place
    for path in (place.path, *place.path.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    place.before = snapshot(place.path)
    said = said_to_user(place, CLOSES)
    place.assert_unchanged(said)
    assert "left" not in said and "not all" not in said and "cannot see" not in said, said


OTHERS = """
        assert os.stat("closed/mine").st_size == 3
        info = os.stat("closed/mine"); open("closed/mine", "r+").write("new")
        os.utime("closed/mine", ns=(info.st_atime_ns, info.st_mtime_ns))
        os.replace("b", "theirs/root"); open("theirs/root", "a").write("x")
        subprocess.check_call(["sed", "-i", "s/old/new/", "fixed"])
        subprocess.check_call(["gzip", "fixed2"])
        os._exit(0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_files_of_others_and_files_that_cannot_be_written(users_place):
    """A copy is kept where no link may be made. A program puts another file in the place of one."""
    place = users_place
    for name in ("closed", "theirs"):
        (place.path / name).mkdir()
    for name in ("closed/mine", "theirs/root", "fixed", "fixed2"):
        (place.path / name).write_text("old")
    for name in (".", "closed/mine", "theirs", "b", "fixed", "fixed2"):
        os.chown(place.path / name, USER, USER)
    for name in ("fixed", "fixed2"):
        (place.path / name).chmod(0o444)
    place.before = snapshot(place.path)
    said = said_to_user(place, OTHERS)
    assert (place.path / "theirs/root").read_text() == "old"
    theirs = os.fsencode(place.path / "theirs")
    if (place.path / "theirs/root").stat().st_uid:  # it cannot be root's again: that is said
        assert said.count("left:") == 1 and "left: theirs/root: could not be put back" in said
        os.chown(place.path / "theirs/root", 0, 0)
    # The time of that folder is the new file's.
    now = {p: facts for p, facts in snapshot(place.path).items() if p.rstrip(b"/.") != theirs}
    assert now == {p: facts for p, facts in place.before.items() if p.rstrip(b"/.") != theirs}


EMPTIED = {
    "one by one": """
for name in os.listdir():
    (shutil.rmtree if os.path.isdir(name) and not os.path.islink(name) else os.remove)(name)
assert not [*os.scandir()] and [*os.walk(".")] == [(".", [], [])]
""",
    "rmtree": "shutil.rmtree(os.getcwd(), ignore_errors=True)\n",
    "find": """
try:
    subprocess.run(["find", ".", "-mindepth", "1", "-delete"])
except PermissionError as error:
    assert "the doctor keeps files in this folder" in str(error)
else:
    sys.exit(7)
""",
    "moved": "a = os.listdir(); os.mkdir('old'); [os.rename(one, 'old/' + one) for one in a]\n",
}
IN_A_MOUNT = """
import subprocess, sys
from pathlib import Path
from tests.docs.test_doctor_files import fill, snapshot
work = Path.cwd()
fill(work)
before = snapshot(work)
for _ in range(2):
    player = [sys.executable, "../player.py", "../script.py"]
    said = subprocess.check_output(player, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert snapshot(work) == before, said
    assert "left:" not in said and "cannot see" not in said, said
"""


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("how", EMPTIED)
def test_a_mount_that_is_emptied(tmp_path, how):
    """What is kept lies in it, for that is the only place: the script does not see it."""
    (tmp_path / "script.py").write_text(HEAD + EMPTIED[how] + "open('a', 'w').write('new')\n")
    (tmp_path / "player.py").write_text(PLAYER.replace("{processes}", "1"))
    (tmp_path / "m").mkdir()
    mount = 'mount -t tmpfs none m && cd m && exec "$@"'
    env = {"DOCTOR_STATE": str(tmp_path / "state"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", IN_A_MOUNT]
    subprocess.run(command, cwd=tmp_path, env=os.environ | env, check=True, timeout=250)


def test_a_disk_that_is_mounted_twice(tmp_path, monkeypatch):
    """The first place for a fresh inode lies beyond the border: the next is taken."""
    (tmp_path / "run/kept").mkdir(parents=True)
    (tmp_path / "a").write_text(OLD)
    real = os.replace

    def replace(old, new):
        if b"/run/kept/" in old:
            raise OSError(18, "Invalid cross-device link")
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    keeper = keep.Keeper(Journal(os.fsencode(tmp_path / "run")))
    keeper.will_write(os.fsencode(tmp_path / "a"), False, 1)
    info = (tmp_path / "a").stat()
    for store in keeper.journal.stores:
        shutil.rmtree(store)
    assert (info.st_dev, info.st_ino) not in keeper.journal.protected
    assert (tmp_path / "a").read_text() == OLD


def test_a_run_that_cannot_be_put_back_does_not_stop_the_next(place, monkeypatch):
    job, _ = started(place)
    kill_both(job)
    monkeypatch.setenv("DOCTOR_STATE", str(place.state))

    def fails(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as one:
        one.setattr(guard.restore, "put_back", fails)
        (said,) = guard.restore_dead()
    assert said.startswith("not all was put back: PermissionError: ") and str(place.state) in said
    place.assert_unchanged(place.restore())


GOES_ON = "echo ready $$; sleep 2; cp b a; sleep 300"


def test_a_program_ends_with_both_of_the_doctors_processes(place):
    """It has left its parent, and is no Python, which would see that the doctor is gone."""
    script = HEAD + f"subprocess.run(['setsid', 'bash', '-c', {GOES_ON!r}])"
    kill_both(started(place, script)[0])
    wait_for(lambda: not processes_of(place))
    place.assert_unchanged(place.restore())


def test_a_shell_script_ends_with_both_of_the_doctors_processes(place):
    """No process of --by is a Python of the user's."""
    (place.path / "train.sh").write_text(GOES_ON)
    place.before = snapshot(place.path)
    job = subprocess.Popen(
        [*HEAR_SIGNALS, PYTHON, ROOT / "doctor", "--quick", "--by", "bash train.sh"],
        env=os.environ | {"DOCTOR_STATE": str(place.state)},
        cwd=place.path,
        stdout=subprocess.PIPE,
        text=True,
    )
    place.jobs.append(job)
    assert job.stdout.readline().startswith("ready")
    kill_both(job)
    wait_for(lambda: not processes_of(place))
    place.assert_unchanged(place.restore())


def doctor_by(place, words, *flags, **more):
    """The real one, which has no process to look at: it says so by exit code 2."""
    env = os.environ | {"DOCTOR_STATE": str(place.state), "PYTHONUNBUFFERED": "1"}
    command = [PYTHON, ROOT / "doctor", "--quick", *flags, "--by", words]
    more = {"stderr": subprocess.PIPE, "timeout": 60, "check": False} | more
    return subprocess.run(command, env=env, cwd=place.path, text=True, **more)


@pytest.mark.parametrize("flags", [[], ["--format", "json"]])
def test_nobody_reads_the_report(place, flags):
    ours, nobodys = os.pipe()
    os.close(ours)
    done = doctor_by(place, "rm a", *flags, stdout=nobodys)
    os.close(nobodys)
    assert done.returncode == 2 and "Error" not in done.stderr, done.stderr
    place.assert_unchanged(done.stderr)


def test_a_script_that_renames_the_working_folder(place):
    """Then the doctor's own is another, and that is gone when all is put back."""
    file = place.path.parent / "renames.py"
    file.write_text(
        "import os; here = os.getcwd(); os.rename(here, here + '.moved'); os.mkdir(here)\n"
        "os.chdir(here); open('a', 'w').write('new')\n"
    )
    words = f"{PYTHON} -c \"exec(open('{file}').read())\""
    done = doctor_by(place, words, "--format", "json", stdout=subprocess.PIPE)
    assert done.returncode == 2 and "Error" not in done.stderr, done.stderr
    assert json.loads(done.stdout), done.stdout
    place.assert_unchanged(done.stderr)
