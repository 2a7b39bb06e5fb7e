"""Reads the files of the recorder: pickles of plain values, or JSON. Nothing in them is run."""

import io
import json
import pickle
import re
from pathlib import Path

from ..words import say


class Plain(pickle.Unpickler):
    """Of numbers, text, lists and dicts alone: a pickle that names a function is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(
            say("it holds {name}, and would run it", name=f"{module}.{name}")
        )

    def persistent_load(self, pid):
        raise pickle.UnpicklingError(say("it holds a reference to something outside"))


def dump_of(data):
    """A dict with "entries", "pg_config" and "pg_status"; ValueError if it is none."""
    try:
        found = json.loads(data) if data[:1] == b"{" else Plain(io.BytesIO(data)).load()
    except ValueError as error:
        raise ValueError(say("no JSON: {error}", error=error)) from None
    except Exception as error:  # a damaged pickle may raise any
        why = error.args[0] if len(error.args) == 1 else error
        raise ValueError(say("no pickle of plain values: {error}", error=why)) from None
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise ValueError(say("it has no list of entries"))
    if not all(isinstance(entry, dict) and "profiling_name" in entry for entry in found["entries"]):
        raise ValueError(say("its entries are no calls"))
    return found


def dumps_in(folder):
    """({rank: dump}, [why a file was left out]); the rank is the number that ends a name."""
    found, left = {}, []
    for path in sorted(Path(folder).iterdir()):
        number = re.search(r"(\d+)(\.(json|pickle|pkl))?$", path.name)
        if not path.is_file() or not number:
            continue
        try:
            dump = dump_of(path.read_bytes())
        except ValueError as error:
            left.append(say("{file}: {why}", file=path.name, why=error.args[0]))
            continue
        rank = int(number[1])
        if rank in found:
            text = say("{file}: another file is of rank {rank}, too", file=path.name, rank=rank)
            left.append(text)
        found.setdefault(rank, dump)
    return found, left
