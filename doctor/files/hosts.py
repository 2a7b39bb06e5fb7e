"""Which machine this is: another one has other processes by the same numbers, and locks of its own.

Where a file system is shared, so are the doctor's files; its locks may not be.
"""

import os
import re
import zlib


def text_of(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:  # not Linux
        return ""


HOST = re.sub(r"[^\w.-]", "_", os.uname().nodename)
BOOT = text_of("/proc/sys/kernel/random/boot_id")  # of the kernel: all its containers have one


def space():
    """Where the number of this process is known: this machine, and this namespace of processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32(f'{HOST} {BOOT} {namespace}'.encode()):08x}"


def who(pid=None):
    """The name of a process of this machine, by default of this one, among those of all."""
    return f"{pid or os.getpid()}-{space()}"


def pid_of(name):
    """Its number here; None if it is not of this machine: nobody may ask for it, or end it."""
    pid, _, where = name.partition("-")
    return int(pid) if where == space() else None
