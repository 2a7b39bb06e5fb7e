"""Runs a training script on several processes and names the mistakes of docs/bugs.md that it makes.

$ python doctor train.py

It sends nothing between processes and changes no number; it needs only torch. A reader begins with

- judges/    what is judged: a small function for each mistake, over the events of all processes
- run.py     a run as the judges see it: steps, passes over loaders, side by side
- events.py  what is recorded: each kind of event with its fields, and the file of a process
- wrappers/  what is wrapped, by subject: of torch, multiprocessing and print(); each notes events
- process.py runs the script in this process: wrapped, and watched by a thread
- launch.py  starts the processes, and ends them when they stand still
- by.py      starts the words of --by
- below.py   which processes of a shell script, or of another launcher, are looked at
- notebook.py  the code cells of a notebook, as a script
- report.py  what is told; formats.py: to GitHub and other programs
- words.py   how it is said; zh/: in Chinese; streams.py: where nobody reads it
- command.py which runs are made, and which findings they add; options.py: the command line
- files/     why the files of the user are safe
- attach/    another way in: a job that hangs now, whoever has started it
- recorder/  what torch's flight recorder knows of a hang
- cuda.py    how a script that names GPUs runs without one; libraries.py: Lightning, Accelerate
"""
