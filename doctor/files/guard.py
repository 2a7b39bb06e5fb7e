"""Keeps watch over a run: whatever ends the doctor, its processes end and the files are put back.

The command forks. The parent waits and passes signals on; the child does the work. Each is told
when the other dies, and then ends every process of the run and puts back. Only if both are killed
at once is it left to the next start; a process of the run sees it and ends them all (record.py).
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback

from .. import words
from . import doctors, ends, inventory, journal, restore, tell
from .ends import CHILD_SUBREAPER, PDEATHSIG, RUN, prctl

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


class Ended(BaseException):
    """The doctor was told to end."""


class GuardedRun:
    """One run of a script, or several after each other, whose files are put back together.

    After put_back(), begin() makes it ready for the next.
    """

    def __init__(self):
        self.begin()

    def begin(self):
        self.folder = os.getcwdb()
        begun = doctors.begin(journal.state_folder(), self.folder, caches())
        self.journal, self.mark, self.alive = begun
        self.before = inventory.inventory(self.folder, self.journal.root)
        self.is_done = False

    def env(self):
        """The environment for the script's processes: each Python gets the hook by it."""
        path = os.environ.get("PYTHONPATH")
        return os.environ | {
            RUN: os.fsdecode(self.mark),
            "PYTHONPATH": f"{SITE}{os.pathsep}{path}" if path else SITE,
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def end_processes(self):
        return end_processes([self.mark])

    def put_back(self, keep=False):
        """End what still runs, put everything back; returns the report's lines."""
        with signals_blocked():
            outlived = self.end_processes()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.mark)
            done = restore.put_back(self.journal, end_processes, keep)
            with contextlib.suppress(OSError):  # it may be another folder that has its name now
                os.chdir(self.folder)
            self.is_done = True
            if not done:
                return [
                    words.say("another doctor is at work here: it puts back what both have touched")
                ]
            unseen = []
            if not self.journal.met:  # else it may be the other run's
                unseen = inventory.changed(
                    self.before, inventory.inventory(self.folder, self.journal.root)
                )
            lines = tell.lines(done, self.folder, unseen)
            if self.before is None and done.journal.programs:
                lines.append(words.say("too many files to see what programs changed besides"))
        outlived = sorted({*outlived, *done.outlived})
        if outlived:
            pids = words.listed(outlived)
            lines.append(words.say("could not be ended: processes {pids}", pids=pids))
        return lines


def end_processes(marks):
    """Of these doctors' runs; returns those that do not die."""
    return ends.end_processes(marks, spared=[os.getppid()])


def caches():
    """Folders whose new files stay: a model that was downloaded is not downloaded again."""
    home, user = os.path.expanduser("~"), os.environ.get("USER", "")
    given = "XDG_CACHE_HOME TORCH_HOME HF_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR"
    found = [os.environ.get(name) for name in given.split()]
    found += [f"{home}/.cache", f"{home}/.triton", f"/tmp/torchinductor_{user or 'root'}"]
    return [os.fsencode(os.path.realpath(path)) for path in found if path]


def restore_dead():
    """Put back what runs have left whose doctor was killed. Returns the report's lines."""
    root, lines = journal.state_folder(), []
    with signals_blocked(), journal.locked(root):
        doctors.sweep(root)
    with signals_blocked():
        for one in [*journal.runs(root)]:
            if host := doctors.left_elsewhere(one):
                lines.append(
                    words.say(
                        "a doctor on {host} was killed, it seems: --restore puts its files back "
                        "there; what is kept: {folder}",
                        host=host,
                        folder=os.fsdecode(one.folder),
                    )
                )
            try:
                done = restore.put_back(one, end_processes, limit=doctors.last_beat(one))
            except Exception as error:  # it must not keep this run from its work
                lines.append(tell.not_all(one, error))
                continue
            if done:
                lines.append(words.say("an earlier run of the doctor was killed"))
                lines += tell.lines(done, os.getcwdb(), earlier=True)
    return lines


# ---- the two processes


def run_guarded(work, keep=False, show=print):
    """work(run) -> exit code, with a guard. What work did not put back itself is put back."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for line in restore_dead():
        show(f" {words.on_screen(line)}")
    run = GuardedRun()
    flush()
    prctl(CHILD_SUBREAPER, 1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = be_child(work, run, keep, show, parent)
        finally:
            flush()
            os._exit(code)
    return be_parent(child, run, keep, show)


def be_child(work, run, keep, show, parent):
    os.setsid()  # Ctrl-C is for the doctor: it ends the run then
    prctl(PDEATHSIG, signal.SIGTERM)
    prctl(CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
    code = 1

    def end(number, frame):
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        run.end_processes()  # what work waits for has ended then
        raise Ended(128 + number)

    try:
        listen(end)
        start_heartbeat(run)
        code = work(run) or 0
    except Ended as ended:
        code = ended.args[0]
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        finish(run, keep, show)
    return code


def be_parent(child, run, keep, show):
    told = []

    def tell_child(number, frame):
        told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    listen(tell_child)
    start_heartbeat(run)
    _, status = os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if os.WIFSIGNALED(status):
        text = words.say("the doctor was killed by signal {number}", number=os.WTERMSIG(status))
        show(f" {words.on_screen(text)}")
        finish(run, keep, show)
        for line in restore_dead():  # of a run that the child has begun
            show(f" {words.on_screen(line)}")
    os.close(run.alive)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = os.waitstatus_to_exitcode(status)
    if told:
        return 128 + told[0]
    return code if code >= 0 else 128 - code  # below 0: killed by that signal


def finish(run, keep, show):
    """In whichever of the two is left."""
    if run.is_done or run.journal.refresh().done:
        run.end_processes()
        return
    try:
        lines = run.put_back(keep)
    except Exception as error:  # the journal stays: the next start tries again
        lines = [tell.not_all(run.journal, error)]
    for line in lines:
        with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
            show(f" {words.on_screen(line)}")


def start_heartbeat(run):
    """From now on a thread of this process says each second that the doctor lives."""

    def heart():
        while True:
            with contextlib.suppress(OSError):
                os.utime(os.path.join(run.journal.folder, b"heartbeat"))
            time.sleep(1)

    threading.Thread(target=heart, daemon=True).start()


def listen(handler):
    """What was ignored before stays so: nohup means it."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def signals_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
