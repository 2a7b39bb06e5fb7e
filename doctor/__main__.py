"""The command. In a process that it has started, the script runs here, and is looked at."""

import importlib.util
import os
import sys


def load():
    """Import this folder as the package `doctor`, wherever it lies; sys.path stays the script's."""
    here = os.path.dirname(os.path.abspath(__file__))
    init = os.path.join(here, "__init__.py")
    spec = importlib.util.spec_from_file_location("doctor", init, submodule_search_locations=[here])
    sys.modules["doctor"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def main():
    if "doctor" not in sys.modules:  # started as `python doctor`
        load()
    if "DOCTOR" in os.environ:
        from doctor import process

        process.be_examined()
    else:
        from doctor import command, streams

        streams.install()
        command.main()


if __name__ == "__main__":
    main()
