"""Looks at a job that runs, or hangs, now: who started it, and how, does not matter.

$ python doctor --attach

It reads the stacks of all ranks by py-spy, a few times, and changes nothing in them.

- command.py  the command
- ranks.py    finds the processes of this machine that are ranks, and their jobs
- spawned.py  finds those that mp.spawn has started
- look.py     the looks: where each rank stands, or that it moves
- places.py   what a stack means: a collective, backward, a loader, ...
- source.py   the text of a line, and the `if rank == 0:` around it
- sight.py    what was seen of a job, as a file and beside that of other machines
- judges.py   what is judged: states.py, then waits.py; words.py: how it is said
- slurm.py    looks at all nodes of a job of Slurm
- tell.py     what is told
"""

from .command import main

__all__ = ["main"]
