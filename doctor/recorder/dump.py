"""A process of the doctor's own runs writes down its calls."""

import sys

# How many calls are kept: torch's own number, named for versions in which it is 0.
SETTINGS = {"TORCH_FR_BUFFER_SIZE": "2000"}


def write(path):
    """Write this process's calls, where torch records them: gloo's from 2.14 on."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, "_dump_fr_trace", None)
    if dump is None:
        return
    try:
        calls = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    except Exception:  # another version: nothing is recorded
        return
    with open(path, "wb") as file:
        file.write(calls)
