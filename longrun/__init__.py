"""What a run of days needs beside common/, which imports nothing from here.

arguments   the command line, and errors that a user can cause: one line, exit code 2
checkpoint  where a run stands; checkpoints are written, found and read here
files       files that are whole or not there; the lines of metrics.jsonl
report      what a run prints: banner, progress, an epoch's line, the end
weights     those that a model starts from: torchvision's, or a file's
watch       ends a process that fails or hangs, and says where it was
process     signals that ask a run to stop
rendezvous  the ranks that a launcher sets
spawn, slurm, sharded: for multiprocessing_, distributed_slurm_main and fsdp_distributed alone
"""
