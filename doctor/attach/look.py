"""The looks: a few stacks of each rank, by py-spy, and what they say together."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from . import places, ranks, source

LOOKS = 4  # a rank that works may be found at one line twice
SWITCHES = 2  # of a thread, between two looks: with more it was awake; a look itself may wake it
BETWEEN = 0.5  # s, of the two looks at a loader's workers
BUSY = 0.05  # of a core: it computes; a busy machine may give it little


def py_spy():
    """Its path, or None. It may lie beside a Python whose environment is not active."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)


STOPPED, ENDED = "it was stopped", "it has ended"  # errors of a Look


class Refused(Exception):
    """py-spy may not read a process, or could not; its words."""


def dump(pid, nonblocking=False):
    """The threads of a process: its interpreter is read from outside, and runs nothing."""
    words = [py_spy(), "dump", "--json", "--locals", "--pid", str(pid)]
    words += ["--nonblocking"] if nonblocking else []
    for last in (False, True):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            raise Refused("py-spy took longer than 60 s") from None
        if done.returncode == 0:
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(done.stdout)
        if last or re.search("denied|not permitted", done.stderr):
            raise Refused(done.stderr.strip() or "py-spy said nothing")
        time.sleep(0.2)  # the interpreter was in the middle of a change


def frames(thread):
    """[(file, function, line)], the innermost first; functions without their class."""
    found = thread["frames"]
    return [(f["filename"], f["name"].rpartition(".")[2], f["line"]) for f in found]


def main_thread(threads):
    """The one that trains: that of the user's code, where it is not the main one (as in Ray)."""
    main = next((t for t in threads if t["thread_name"] == "MainThread"), None)
    theirs = [t for t in threads if any(places.is_users(file) for file, *_ in frames(t))]
    if main and main in theirs:
        return main
    calls = [t for t in theirs if places.meaning(frames(t))[0] in places.WAITS]
    return next(iter(calls or ([main] if main else theirs)), threads[0] if threads else None)


class Look:
    """One look at a process: the stack of the thread that trains, and its processor's time."""

    def __init__(self, pid, nonblocking=False):
        self.error, self.thread, self.stack, self.sum = "", None, [], ""
        self.cpu, self.at = cpu(pid), time.monotonic()
        self.before = self.after = switches(pid)
        if state(pid) == "T":  # py-spy cannot read it then
            self.error = STOPPED
            return
        try:
            self.thread = main_thread(dump(pid, nonblocking))
        except Refused as error:
            self.error = str(error) if state(pid) not in ("", "Z") else ENDED
        self.after = switches(pid)
        self.stack = frames(self.thread) if self.thread else []
        self.sum = hashlib.sha256(json.dumps(self.what_changes()).encode()).hexdigest()

    def what_changes(self):
        """What is another from step to step: lines, and what the user's variables hold.

        Only a sum of it is kept. A call that waits may ask again and again whether it is over: of
        what is inside of it nothing counts.
        """
        if not self.thread:
            return []
        call = places.outermost(self.stack)
        stack = self.stack[self.stack.index(call) :] if call else self.stack
        mine = [f["locals"] for f in self.thread["frames"] if places.is_users(f["filename"])]
        return [stack, mine]


def state(pid):
    """The kernel's letter: R runs, S sleeps, D waits for a disk, T was stopped; or ""."""
    with contextlib.suppress(OSError, IndexError):
        return ranks.read(pid, "stat").rpartition(")")[2].split()[0]
    return ""


def cpu(pid):
    """Seconds of processor time that a process has used, all its threads together."""
    with contextlib.suppress(OSError, IndexError):
        fields = ranks.read(pid, "stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def switches(pid):
    """{thread: how often it has given up its core, or was taken from it}"""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            counts = re.findall(r"ctxt_switches:\s*(\d+)", ranks.read(pid, f"task/{thread}/status"))
            found[int(thread)] = sum(map(int, counts))
    return found


def was_awake(looks):
    """Whether the thread woke up between two looks. One that hangs in a call of torch sleeps on."""
    thread = (looks[-1].thread or {}).get("os_thread_id")
    gaps = [b.before.get(thread, 0) - a.after.get(thread, 0) for a, b in pairwise(looks)]
    return max(gaps, default=0) > SWITCHES


def looks_at(pids, seconds, nonblocking=False):
    """{pid: [Look]}, LOOKS of each, spread over so many seconds."""
    found = {pid: [] for pid in pids}
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        for number in range(LOOKS):
            time.sleep(max(0, began + seconds * number / (LOOKS - 1) - time.monotonic()))
            for pid, one in zip(
                pids, threads.map(lambda p: Look(p, nonblocking), pids), strict=True
            ):
                found[pid].append(one)
    return found


def seen(rank, looks, found, nonblocking=False):
    """What was seen of a Rank, as a dict of plain values: see sight.py."""
    last = looks[-1]
    pid, stack = rank.pid, last.stack
    known = {"rank": rank.rank, "size": rank.size, "here": rank.here, "local": rank.local}
    known |= {"pid": pid, "error": last.error, "folder": source.folder_of(pid)}
    if not stack:
        return known | {"state": {STOPPED: "stopped", ENDED: "gone"}.get(last.error, "unread")}
    mine = places.users_frame(stack)
    file, function, line = mine or stack[-1]
    text = source.text_of(pid, file, line)
    gpu = pid in found and found[pid].gpu
    kind, words = places.meaning(stack, gpu, text)
    seconds = max(last.at - looks[0].at, 0.1)
    busy = (last.cpu - looks[0].cpu) / seconds
    moved = len({one.sum for one in looks}) > 1
    call = places.outermost(stack)
    if kind in places.SLEEPS and not gpu and not (call and "horovod" in call[0]):
        moved |= was_awake(looks)  # each time at one line: a loop at the top of a script
    # With a GPU a rank that waits keeps its core busy, too.
    works = moved or (busy > BUSY and not gpu)
    known |= {"state": "works" if works else "stands", "kind": kind, "words": words}
    known |= {"file": shown(pid, file), "line": line, "function": function, "text": text}
    known |= conditions(pid, stack) | {"seconds": round(seconds, 1)}
    # A loop outside of any function shows no variables: on a GPU each step looks like the last.
    theirs = [f for f in last.thread["frames"] if places.is_users(f["filename"])]
    sure = not gpu or kind in places.ONCE or any(f["locals"] for f in theirs)
    known |= {"sure": sure, "gpu": gpu, "busy": busy > BUSY}
    known |= {"times": sum(meaning_of(one, gpu) == kind for one in looks)}
    children, those = workers(pid, nonblocking) if kind == "loader" else (0, [])
    return known | {"children": children, "workers": those}


def meaning_of(one, gpu):
    return places.meaning(one.stack, gpu)[0] if one.stack else None


def conditions(pid, stack):
    """What is around the innermost call that has a condition: see source.Around, and sight."""
    known = {"under": "", "when": "", "without": False, "leaves": [], "loops": []}
    for number, (file, _, line) in enumerate(f for f in stack if places.is_users(f[0])):
        around = source.Around(pid, file, line)
        known["under"] = known["under"] or around.under
        known["when"] = known["when"] or around.when
        known["without"] |= around.without
        if number == 0:
            known |= {"leaves": around.leaves, "loops": around.loops}
    return known


def shown(pid, file):
    """A file's name from the folder in which its process was started."""
    with contextlib.suppress(OSError):
        inside = os.path.relpath(file, os.readlink(f"/proc/{pid}/cwd"))
        return inside if not inside.startswith("..") else file
    return file


def workers(pid, nonblocking):
    """(how many Python processes a rank has started, [{"pid", "file", "line", "text", "disk",
    "busy", "starts"}] of its loader's workers); disk: it waits for one; busy: it moved, or
    computed; starts: it still imports what it needs.

    line 0: it waits for work, or is in a library.
    """
    found, said = ranks.processes(), []  # they may be new
    below = [one for one in ranks.tree(pid, found)[1:] if found[one].python or found[one].torch]
    below = [one for one in below if ranks.HELPER not in found[one].command]
    first = [Look(one, nonblocking) for one in below]
    time.sleep(BETWEEN if below else 0)
    for one, before in zip(below, first, strict=True):
        look = Look(one, nonblocking)
        loop = [n for n, frame in enumerate(look.stack) if frame[0].endswith(places.WORKER)]
        starts = not loop and places.has(look.stack, "multiprocessing/spawn.py")
        if not loop and not starts:
            continue
        # What is above its loop is of the rank that has forked it.
        inner = look.stack[: loop[0]] if loop else look.stack
        mine = [frame for frame in inner if places.is_users(frame[0])]
        file, _, line = mine[0] if mine else ("", "", 0)
        known = {"pid": one, "file": shown(one, file) if file else "", "line": line}
        known["text"] = source.text_of(one, file, line) if file else ""
        used = (look.cpu - before.cpu) / (look.at - before.at)
        may_move = starts or places.has(look.stack, "_utils/fetch.py")  # others wait for work
        known |= {"busy": used > BUSY or (may_move and look.sum != before.sum), "starts": starts}
        said.append(known | {"disk": state(one) == "D"})
    return len(first), said
