"""Starts scripts as forks of one process that has imported torch: that saves each of them 3 s.

A fork is a process of its own: its memory, signals and exit code are real, and the script's file
runs from its first line on. How a script is started is not shown by it: the tests of launchers use
the real ones.
"""

import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def serve(connection):
    """Start what is asked for over `connection`, until its other end is closed.

    A request is one packet: a dict as JSON, and with it the files for the output and for what
    becomes of the process: its pid, then its exit code. Returns in a new process alone, with its
    request.
    """
    awaited = {}  # {pid: where its exit code is written to}
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # writes to that pipe
    while True:
        ready, _, _ = select.select([connection, read], [], [])
        if read in ready:
            os.read(read, 4096)
            while awaited and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with open(awaited.pop(ended[0]), "w") as status:
                    status.write(f"{os.waitstatus_to_exitcode(ended[1])}\n")
        if connection in ready:
            request, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            if not request:
                os._exit(0)
            output, status = files
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for stream in (1, 2):
                    os.dup2(output, stream)
                os.closerange(3, 1 + max(read, write, output, status, *awaited.values(), 2))
                return json.loads(request)
            os.close(output)
            os.write(status, f"{pid}\n".encode())
            awaited[pid] = status


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
    """Become the script, or the line of code after -c."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it is asked for TMPDIR anew
    script, *flags = request["command"]
    if request["ranks"] > 1:
        launch(request["ranks"])
    folder = "" if script == "-c" else os.path.dirname(script)
    # sys.path[0] is this project: code after -c may import it.
    sys.path[0:0] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    if script == "-c":
        sys.argv = flags
        sys.argv[0], code = "-c", sys.argv[0]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [script, *flags]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    import sklearn.datasets  # noqa: F401  the images of the minimal scripts

    import distributed  # noqa: F401  with all that the others need

    run(serve(socket.socket(fileno=int(sys.argv[1]))))
