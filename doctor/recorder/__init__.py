"""torch's flight recorder: the last calls of each process, with their sizes, also those of DDP.

$ python doctor --dumps DIR

- dump.py     a process writes its own, in the doctor's runs
- read.py     reads files, of NCCL's time-out too; nothing in them is run
- calls.py    the calls of all ranks, side by side
- compare.py  what is judged, and the command
"""
