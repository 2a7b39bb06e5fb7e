"""Two hosts on this machine: network namespaces with names of their own, joined by a cable."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ONE_THREAD, ROOT, Job

needs_hosts = pytest.mark.skipif(
    (os.getuid() != 0 or not shutil.which("ip")) and "CI" not in os.environ,
    reason="needs root and iproute2",
)

# 250 steps, 29 an epoch; any number of processes trains the same, but for rounding.
MODEL = "--arch tests.nets:smooth --image-size 24 --batch-size 48 -p 1 -j 1".split()
FLAGS = [*MODEL, *"--epochs 9 --max-steps 250".split()]
STEP = r"^epoch \d+/\d+ \[\d+/"  # a line of its output


def ip(line):
    subprocess.run(["ip", *line.split()], check=True, timeout=10)


class Hosts:
    """Two hosts that find each other by name.

    names: for each host its names, as in a line of /etc/hosts; `hostname` prints the last of them.
    As long as the file `brake` is there, a step of tests.nets:smooth takes a second: nothing has to
    be in time.
    """

    def __init__(self, brake, *names):
        self.brake, self.names = brake, names
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self.spaces = [f"{line.split()[-1]}-{os.getpid()}" for line in names]
        self.cables = [f"cable{side}{os.getpid()}" for side in "ab"]
        brake.touch()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for space in self.spaces:
                ip(f"netns add {space}")
                stack.callback(ip, f"netns del {space}")
                ip(f"-n {space} link set lo up")
                folder = Path("/etc/netns", space)  # its files take the place of those in /etc
                folder.mkdir(parents=True)
                stack.callback(shutil.rmtree, folder)
            self.know(0, 1)
            (a, b), (left, right) = self.spaces, self.cables
            ip(f"link add {left} netns {a} type veth peer name {right} netns {b}")
            for space, cable, address in zip(self.spaces, self.cables, self.addresses, strict=True):
                ip(f"-n {space} addr add {address}/24 dev {cable}")
            self.cable("up")
            self.undo = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.undo.close()

    def know(self, *known):
        """Each host knows the names of these hosts, and its own."""
        for i, space in enumerate(self.spaces):
            lines = [f"{self.addresses[j]} {self.names[j]}\n" for j in sorted({i, *known})]
            # Written in place: hosts that run already see the same file.
            Path("/etc/netns", space, "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def cable(self, state):
        for space, cable in zip(self.spaces, self.cables, strict=True):
            ip(f"-n {space} link set {cable} {state}")

    def start(self, i, command, cwd, env=None, pod=False):
        """A Job on host i. As in a pod its process is number 1, its /dev/shm small and its own."""
        own, shell = ["--uts"], 'hostname "$0" && exec "$@"'
        if pod:
            own += "--pid --fork --kill-child --mount-proc".split()
            shell = f"mount -t tmpfs -o size=128k shm /dev/shm && {shell}"
        inside = ["ip", "netns", "exec", self.spaces[i], "unshare", *own]
        name = self.names[i].split()[-1]
        set_up = ONE_THREAD | {"BRAKE": str(self.brake), "PYTHONPATH": str(ROOT)}
        return Job([*inside, "sh", "-c", shell, name, *command], cwd, set_up | (env or {}))


def first_child(job):
    """The pid of the first process that the job's own has started."""
    pid = job.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
