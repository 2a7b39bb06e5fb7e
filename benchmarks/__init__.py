"""What measures this project. Each subject is a command: facts, step, batches, loader, scale,
strategies, communication, predict, shards. gpu_hour runs most of them on a GPU machine, and the
tests that need a GPU.

A command prints a table and writes results/NAME.json. It measures its contestants in rounds, one
after another in each round: when the machine becomes slower, it does so for all of them. A figure
is the median of the rounds, with the lowest and the highest.
"""
