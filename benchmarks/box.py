"""A cluster in a box: network namespaces joined by a switch (Box), and ranks in them (Ranks).

Needs root and iproute2. Without latency the switch is a bridge, and tc's token bucket gives each
node its rate. With latency or loss a process passes the packets on, each after its time: netem,
which does that, is a module of the kernel that many kernels lack.
"""

import contextlib
import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
TAP, NO_HEADER, SET_INTERFACE = 0x0002, 0x1000, 0x400454CA  # of linux/if_tun.h
MTU = 9000  # fewer packets for the same bytes
PORT = 29500
forks = multiprocessing.get_context("fork")  # they have imported torch already


def missing():
    """What this machine lacks, as a text; "" where a box can be made."""
    if os.getuid() != 0:
        return "needs root"
    lacks = [name for name in ("ip", "tc") if not shutil.which(name)]
    return f"needs {' and '.join(lacks)}, of iproute2" if lacks else ""


def run(line):
    done = subprocess.run(line.split(), capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{line}: {done.stderr.strip()}")


class Box:
    """`nodes` namespaces, each with an interface of `mbit` Mbit/s; with a `with` block, then gone.

    latency: ms from one node to another. loss: share of packets. Both need the process that passes
    packets on, and are as they were made; the rate of a box without them can be changed.
    """

    def __init__(self, nodes, mbit, latency=0.0, loss=0.0):
        self.nodes, self.mbit, self.latency, self.loss = nodes, mbit, latency, loss
        self.mark = f"{os.getpid()}"
        self.spaces = [f"box{self.mark}-{node}" for node in range(nodes)]

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for space in self.spaces:
                run(f"ip netns add {space}")
                stack.callback(run, f"ip netns del {space}")
                run(f"ip -n {space} link set lo up")
            if self.latency or self.loss:
                self._relay(stack)
            else:
                self._bridge(stack)
            self.undo = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.undo.close()

    def _up(self, node):
        space = self.spaces[node]
        run(f"ip -n {space} link set eth0 mtu {MTU}")
        run(f"ip -n {space} addr add 10.78.0.{node + 1}/24 dev eth0")
        run(f"ip -n {space} link set eth0 up")

    def _bridge(self, stack):
        switch = f"box{self.mark}-switch"
        run(f"ip netns add {switch}")
        stack.callback(run, f"ip netns del {switch}")
        run(f"ip -n {switch} link add br0 mtu {MTU} type bridge")
        run(f"ip -n {switch} link set br0 up")
        for node, space in enumerate(self.spaces):
            run(f"ip link add eth0 netns {space} type veth peer name port{node} netns {switch}")
            run(f"ip -n {switch} link set port{node} mtu {MTU} master br0 up")
            self._up(node)
        self.set_rate(self.mbit)

    def set_rate(self, mbit):
        self.mbit = mbit
        for space in self.spaces:
            bucket = f"tbf rate {mbit}mbit burst 64kb limit 64000000"  # nothing is dropped
            run(f"tc -n {space} qdisc replace dev eth0 root {bucket}")

    def _relay(self, stack):
        taps = []
        for node, space in enumerate(self.spaces):
            tap, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"b{self.mark}t{node}"
            stack.callback(os.close, tap)
            fcntl.ioctl(tap, SET_INTERFACE, struct.pack("16sH", name.encode(), TAP | NO_HEADER))
            run(f"ip link set {name} netns {space} name eth0")
            self._up(node)
            taps.append(tap)
        what = taps, self.mbit * 1e6 / 8, self.latency / 1000, self.loss
        process = forks.Process(target=pass_on, args=what, daemon=True)
        process.start()
        stack.callback(process.join)
        stack.callback(process.kill)


def pass_on(taps, rate, latency, loss):
    """Pass packets from each tap to the one they are for, at `rate` bytes/s, `latency` s later."""
    draw = random.Random(0)
    places, waiting, order = {}, [], 0  # {address: tap}; a heap of (when, number, tap, packet)
    free = dict.fromkeys(taps, 0.0)  # until when the link of each is busy
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, tap, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError, OSError):  # as a full queue drops it
                os.write(tap, packet)
        patience = waiting[0][0] - time.monotonic() if waiting else 1.0
        ready, _, _ = select.select(taps, [], [], max(0.0, patience))
        for source in ready:
            try:
                packet = os.read(source, 65536)
            except BlockingIOError:
                continue
            to, places[packet[6:12]] = packet[:6], source
            if loss and draw.random() < loss:
                continue
            free[source] = max(time.monotonic(), free[source]) + len(packet) / rate
            due = free[source] + latency
            for tap in [places[to]] if to in places else [tap for tap in taps if tap != source]:
                order += 1
                heapq.heappush(waiting, (due, order, tap, packet))


class Ranks:
    """Processes as torchrun would start them, `gpus` on each node of a box.

    Each calls function(rank, connection, *args); only rank 0's connection leads here. At the end of
    its `with` block all are killed.
    """

    def __init__(self, box, gpus, function, *args):
        self.world = box.nodes * gpus
        self.connection, other = forks.Pipe()
        sys.stdout.flush()
        self.processes = []
        for rank in range(self.world):
            end = other if rank == 0 else None
            what = (box.spaces[rank // gpus], rank, self.world, gpus, function, end, args)
            self.processes.append(forks.Process(target=be_a_rank, args=what, daemon=True))
            self.processes[-1].start()
        other.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.connection.close()

    def answer(self, seconds):
        """What rank 0 sends next; SystemExit where it does not, or a rank has failed."""
        deadline = time.monotonic() + seconds
        while not self.connection.poll(0.2):
            codes = [process.exitcode for process in self.processes]
            if any(codes) or time.monotonic() > deadline:
                sys.exit(f"error: no answer from the box in {seconds} s; exit codes {codes}")
        try:
            return self.connection.recv()
        except EOFError:
            sys.exit("error: rank 0 in the box has ended, see above")


def be_a_rank(space, rank, world, gpus, function, connection, args):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it kills this process
    with open(f"/run/netns/{space}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns: {space}")
    # A sender fills no queue with more than a part of a second: other connections wait behind it.
    Path("/proc/sys/net/ipv4/tcp_limit_output_bytes").write_text("262144")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % gpus),
        "LOCAL_WORLD_SIZE": str(gpus),
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    import torch

    torch.set_num_threads(1)
    function(rank, connection, *args)
