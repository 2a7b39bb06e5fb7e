"""Starts scripts as forks of one process that has imported torch: that saves each of them 3 s.

A fork is a process of its own: its memory, signals and exit code are real, and the script's file
runs from its first line on, with the common/ beside it. How Python starts is not shown by it: where
that or its parent matters, the tests use the real one.

tests/start/python calls this file as well, in place of Python: it asks for a fork, passes signals
on to it, and ends as it does. So a launcher starts forks too.
"""

import contextlib
import gc
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import tempfile
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def ask(address, command, env, cwd, files, ranks=1):
    """Ask for a fork. Returns a connection, which receives its pid and later its exit code.

    command: what follows "python" on a command line; files: the numbers of stdin, stdout and
    stderr. When the connection is closed before, the fork is killed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = {"command": command, "env": env, "cwd": cwd, "ranks": ranks}
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection


def stand_in(command):
    """Be the process that a launcher has started, for a fork that does its work."""
    if command[0] == "-u":
        del command[0]
    if command[0].startswith("-") and command[0] not in ("-m", "-c"):
        os.execv(os.environ["TEST_PYTHON"], [os.environ["TEST_PYTHON"], *command])
    connection = ask(os.environ["TEST_FORKS"], command, dict(os.environ), os.getcwd(), [0, 1, 2])
    pid = int(connection.recv(64))

    def tell(number, _):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, tell)
    code = int(connection.recv(64))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(address):
    """Start what is asked for at the socket `address`, until stdin is closed.

    Returns in a new process alone, with its request.
    """
    asked = {}  # {pid: the connection of who asked for it}
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # writes to that pipe
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    while True:
        ready, _, _ = select.select([0, read, listener, *asked.values()], [], [])
        if 0 in ready:
            os._exit(0)
        if read in ready:
            os.read(read, 4096)
            while asked and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with asked.pop(ended[0]) as connection, contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
        for pid, connection in asked.items():
            if connection in ready:  # closed: who asked was killed
                os.kill(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            if not request:  # who asks was killed before
                continue
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
                return json.loads(request)
            for file in files:
                os.close(file)
            with contextlib.suppress(OSError):
                connection.send(str(pid).encode())
            asked[pid] = connection


def launch(ranks):
    """As a launcher: a process for each rank, all ended when one fails. Returns in the ranks."""
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


def run(request):
    """Become what follows "python" on a command line: a script, -m and a module, -c and code."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it is asked for TMPDIR anew
    if request["ranks"] > 1:
        launch(request["ranks"])
    # As Python does: where the script is, or where we are; then PYTHONPATH.
    kind, *sys.argv = request["command"]
    if kind not in ("-m", "-c"):
        sys.argv.insert(0, kind)
    folder = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(kind)))
    sys.path[:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    if kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        stand_in(sys.argv[1:])
    sys.path[0] = PROJECT
    import sklearn.datasets  # noqa: F401  the images of the minimal scripts

    import distributed  # noqa: F401  with all that the others need

    with contextlib.suppress(ImportError):
        import horovod.torch  # noqa: F401
    # Each fork imports its own: that of a copy may be another.
    for name in [name for name in sys.modules if re.match(r"(distributed|common)(\.|$)", name)]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # or each fork would look at all of it once more when it ends, for 1 s
    run(serve(sys.argv[2]))
