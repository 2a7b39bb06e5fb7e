"""Python imports this when it starts: it looks at the process, then does what else is meant to be.

The doctor's folder is put before others in PYTHONPATH; another sitecustomize comes next.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def load_hook():
    """The package's hook by a name of its own: the script may have a module called doctor."""
    folder = os.path.dirname(HERE)
    name = "doctor_files_hook"
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package  # not run: a process of the script needs the hook alone
    importlib.import_module(name + ".hook").install()


def look_if_it_is_a_rank():
    """Before the hook, which the process that takes its place gets itself."""
    path = os.path.join(os.path.dirname(os.path.dirname(HERE)), "below.py")
    spec = importlib.util.spec_from_file_location("doctor_below", path)
    below = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(below)
    below.examine_if_it_is_a_rank()


sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
try:
    if sys.version_info >= (3, 10):  # noqa: UP036 - an older one runs as a program does
        look_if_it_is_a_rank()
        load_hook()
except BaseException as error:  # Python would go on, and nothing would be kept
    print(f"the doctor cannot keep files: {type(error).__name__}: {error}", file=sys.stderr)
    os._exit(70)
spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
if spec:  # the user's, or the system's
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])
