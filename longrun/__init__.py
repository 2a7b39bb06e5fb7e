"""What a run of days needs beside common/, which imports nothing from here.

arguments   the command line: flags with their limits
messages    what a process says: lines, and the one line on an error that a user can cause
launcher    what it has set for this process: checked, or filled in for plain python
device      which GPU, and how many CPU cores, a process uses
model       the model that --arch names
weights     those that it starts from: torchvision's, or a file's
progress    how far training has come: epochs and steps, counted
checkpoint  what a run saves, and goes on from: found, compared, restored, written
files       files that are whole or not there; the lines of metrics.jsonl
locks       locks on files, for a block or until the process ends
report      what a run prints: banner, progress, an epoch's line, the end
watch       ends a process that fails or hangs, and says where it was
signals     those that ask a run to stop
spawn, slurm, sharded: for multiprocessing_, distributed_slurm_main and fsdp_distributed alone
"""
