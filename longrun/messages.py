"""Lines to stdout; for an error of the user's one line to stderr, and exit code 2."""

import atexit
import contextlib
import json
import os
import sys
import time


@contextlib.contextmanager
def exit_on_user_error(rank):
    """Turn a ValueError, an OSError or an ImportError into one line on stderr and exit code 2.

    Of processes that meet the same error rank 0 reports it. The others wait for the launcher to
    stop them: if one exited first, it might stop rank 0 before that has written its line. rank: the
    local rank where nodes can fail differently, for a line from each node; else the rank.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if rank > 0:
            time.sleep(30)  # if rank 0 has not exited by then, only this process has the error
        print_error(f"error: {first_line(error)}")
        os._exit(2)  # sys.exit() would wait for loader workers, which ignore SIGTERM


def first_line(error):
    """What an exception says, without the lines that follow; its type where it says nothing."""
    said = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError) and error.args:  # says the key alone
        said = f"{type(error).__name__}: {said}"
    return said.splitlines()[0]


def escaped(text):
    """The text with escapes for what is no visible character: as \\x1b in the name of a file.

    Raw, such a name could move the cursor, or look like a line of ours. What the encoding of the
    terminal does not have is escaped too.
    """
    text = "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_lines(*lines):
    """Print lines to stdout. If nobody reads it any more, go on without it.

    Raises OSError where they cannot be written, such as for a full disk.
    """
    try:
        print(*map(escaped, lines), sep="\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@atexit.register
def flush_stdout():
    """Before Python does so itself: where it cannot, such as on a full disk, it exits with 120."""
    try:
        if sys.stdout and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_if_possible(*lines):
    """print_lines() of a run, which goes on if its output is lost: it is still to be saved.

    Ctrl-C also ends the `tee` that it is piped into. What a full disk has not taken is written with
    a later line, if there is room then.
    """
    with contextlib.suppress(OSError):
        print_lines(*lines)


def print_error(reason, trace=""):
    """Write the reason of an error to stderr, as one line, below a traceback if there is one."""
    reason = escaped(reason)
    trace = "\n".join(map(escaped, trace.split("\n")))  # it ends with the error's own text
    if sys.__stderr__ and sys.__stderr__.isatty():
        trace = f"\r\033[K{trace}"  # over a progress bar
    for stream, text in ((sys.stdout, ""), (sys.__stderr__, f"{trace}{reason}\n")):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; closed by close()
            print(text, end="", file=stream, flush=True)
    tell_torchrun(reason)


def tell_torchrun(reason):
    """Why this process ends, for the report that torchrun prints after its end."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": reason, "extraInfo": more}}, file)
