"""When the doctor has ended, however it ended, each file that was there before is there, unchanged.

journal.py   what is written down before a file is touched; opened.py: which files are open, in
             which inodes; paths.py, disk.py: what is at a path, copies and walks
doctors.py   begins a run, and knows which doctors live; hosts.py: on which machine
whose.py     whose a file is: the run's, another run's, somebody else's
keep.py      how what was there is kept
hook.py      sees what a process of the run is about to do; programs.py and writers.py see what
             Python's audit events do not tell, arrow.py those of pyarrow; record.py: when a file
             was closed; site/ starts it
process.py   that process, and what must not come in between: signals, finalizers, other threads;
             threads.py: the doctor's own
instead.py   puts a function in the place of a built-in one
listing.py   hides the folders of kept files from it
shells.py    which programs a command starts, and where; syntax.py: a shell's words;
             names.py: what its words name; effects.py, git.py: what a program does with it;
             pythons.py: a Python gets the hook
restore.py   puts back; tell.py: says so; inventory.py: what nobody saw
guard.py     ends all processes and puts back, however the doctor ends; ends.py: finds and ends them

run_guarded(work)  runs work(run) under a guard; returns the exit code
GuardedRun         .env() for the script's processes, .put_back(keep) -> the report's lines
install()          looks at this process; the environment of GuardedRun.env() does it, too
restore_dead()     puts back what killed doctors have left -> the report's lines
"""

from .guard import GuardedRun, restore_dead, run_guarded
from .hook import install

__all__ = ["GuardedRun", "install", "restore_dead", "run_guarded"]
