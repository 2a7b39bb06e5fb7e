"""Starts scripts as forks of one process that has imported torch: that saves each of them 3 s.

A fork is a process of its own: its memory, signals and exit code are real, and the script's file
runs from its first line on, with the common/ beside it. It differs from a new Python in how it
starts and ends, in the warnings of imports, its parent process and the seed of hashes. Where one of
these matters, a test starts the real Python.

tests/start/python runs this file in place of Python, as a stand-in: it asks the server for a fork,
passes signals on to the fork, and ends as the fork ends. So what a launcher starts can be forks.
What mp.spawn starts in a fork is a fork too, by a stand-in; it outlives a parent that is killed.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import re
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import types

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def ask(address, command, env, cwd, files, ranks=1):
    """Ask the server for a fork. Returns a connection: told() reads its pid, later its exit code.

    command: what follows "python" on a command line; files: {number of an open file in the fork:
    its number here}, at least those of stdin, stdout and stderr; ranks: with more than one, the
    fork is a launcher of so many, see launch(). If the connection is closed before the fork has
    ended, the server kills the fork.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = {"command": command, "env": env, "cwd": cwd, "ranks": ranks, "files": [*files]}
    socket.send_fds(connection, [json.dumps(request).encode()], [*files.values()])
    return connection


def told(connection):
    """The next number that the server sends. Raises ConnectionError when it has ended."""
    text = connection.recv(64)
    if not text:
        raise ConnectionError("the server of tests/forks.py is gone: see its error above")
    return int(text)


def stand_in(command):
    """Ask for a fork that runs `command`, pass signals on to it, and end as it ends."""
    files = {0: 0, 1: 1, 2: 2}
    closed = not all(os.path.exists(f"/proc/self/fd/{number}") for number in files)
    if command[:1] == ["-u"]:
        del command[0]  # no fork buffers
    if command[-1:] == ["--multiprocessing-fork"]:  # mp.spawn's: what it runs is in an open file
        del command[:-3]  # flags of Python, before -c
        opened = [int(number) for number in os.listdir("/proc/self/fd")]
        files |= {n: n for n in opened if os.path.exists(f"/proc/self/fd/{n}")}
    flag = command and command[0][0] == "-" and command[0] not in ("-m", "-c")
    # It runs beside what mp.spawn starts, needs no torch, and has an open file too.
    tracker = any("multiprocessing.resource_tracker" in word for word in command)
    if closed or not command or flag or tracker:
        os.execv(os.environ["TEST_PYTHON"], [os.environ["TEST_PYTHON"], *command])
    connection = ask(os.environ["TEST_FORKS"], command, dict(os.environ), os.getcwd(), files)
    pid = told(connection)

    def tell(number, _):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (*SIGNALS, signal.SIGABRT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, tell)
    code = told(connection)
    if code < 0:
        with contextlib.suppress(OSError):  # what SIGKILL does cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(address):
    """Fork for everyone who asks at the socket `address`, until stdin is closed.

    Returns in the forks alone: what each of them is to run, and the pid of who asked.
    """
    asked = {}  # {pid of a fork: the connection to who asked for it}
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)  # Python writes to it when a fork ends, given any handler
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    while True:
        ready, _, _ = select.select([0, read, listener, *asked.values()], [], [])
        for pid, connection in asked.items():
            if connection in ready or 0 in ready:  # closed: who asked was killed
                kill(pid)
        if 0 in ready:
            os._exit(0)
        if read in ready:
            os.read(read, 4096)
            while asked and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with asked.pop(ended[0]) as connection, contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
        if listener in ready:
            connection, _ = listener.accept()
            connection.settimeout(10)
            try:
                request, files, _, _ = socket.recv_fds(connection, 1 << 20, 100)
            except OSError:
                request = b""
            if not request:  # who asks was stopped or killed before
                connection.close()
                continue
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                for one in (listener, connection, *asked.values()):
                    one.detach()  # or Python would close that number, whatever it is by then
                request = json.loads(request)
                keep_only(dict(zip(request["files"], files, strict=True)))
                return request, struct.unpack("3i", credentials)[0]
            for file in files:
                os.close(file)
            with contextlib.suppress(OSError):
                connection.send(str(pid).encode())
            asked[pid] = connection


def keep_only(files):
    """Give the open files the numbers that are the keys of `files`, and close all others."""
    free = 1 + max([*files, *map(int, os.listdir("/proc/self/fd"))])
    aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, free) for number, file in files.items()}
    for number, file in aside.items():
        os.dup2(file, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in files:
            with contextlib.suppress(OSError):  # os.listdir() has closed its own
                os.close(number)


def kill(pid):
    """SIGKILL for a fork and for what it has started, which is its session."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def go_where(pid):
    """Take that process's cores, and its host's name, files and network: a node has its own."""
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("uts", "mnt", "net"):
        there, here = f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}"
        if os.stat(there).st_ino != os.stat(here).st_ino:
            with open(there) as file:
                if libc.setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns to {there}")


def launch(ranks):
    """As a launcher: a process for each rank, all ended when one fails. Returns in the ranks.

    It ends with the exit code of the first that failed, or the number of its signal.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            return
        pids.append(pid)

    def tell(number, _=None):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in SIGNALS:
        signal.signal(number, tell)
    code, deadline = 0, None
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            pids.remove(pid)
            if status and not code:
                code, deadline = abs(os.waitstatus_to_exitcode(status)), time.monotonic() + 30
                tell(signal.SIGTERM)
        elif deadline and time.monotonic() > deadline:
            tell(signal.SIGKILL)
        time.sleep(0.02)
    os._exit(code)


def run(request, asker):
    """Become what follows "python" on a command line: a script, -m and a module, -c and code."""
    os.setsid()
    go_where(asker)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it is asked for TMPDIR anew
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    if "TEST_FORKS" in os.environ:
        multiprocessing.set_executable(f"{PROJECT}/tests/start/python")  # mp.spawn starts it
    if request["ranks"] > 1:
        launch(request["ranks"])
    # As Python does: where the script is, or where we are; then PYTHONPATH.
    kind, *sys.argv = request["command"]
    if kind not in ("-m", "-c"):
        sys.argv.insert(0, kind)
    folder = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(kind)))
    sys.path[:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    if sys.argv[1:] == ["--multiprocessing-fork"]:
        # common/process.py ends a process whose parent is not the one that spawned it.
        with open(f"/proc/{asker}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        own, getppid = os.getpid(), os.getppid
        os.getppid = lambda: parent if os.getpid() == own else getppid()
    end = SystemExit()
    try:
        if kind == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as error:
        end = error
    if not isinstance(end.code, (int, types.NoneType)):
        raise end
    # As Python ends, but without taking torch apart: that would take half a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit((end.code or 0) & 255)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--serve"]:
        stand_in(sys.argv[1:])
    sys.path[0] = PROJECT
    import sklearn.datasets  # noqa: F401  the images of the minimal scripts

    import distributed  # noqa: F401  with all that the others need

    with contextlib.suppress(ImportError, OSError):
        import horovod.torch  # noqa: F401
    # Each fork imports these anew: a test may run a copy of a script, with a common/ of its own.
    for name in [name for name in sys.modules if re.match(r"(distributed|common)(\.|$)", name)]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # or Python would look for garbage in all of torch when a fork ends, for 1 s
    run(*serve(sys.argv[2]))
