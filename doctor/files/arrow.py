"""pyarrow writes in C++: its files, its file systems, and folders of many files.

pandas, datasets of Hugging Face and others write Parquet by it. Other file systems than the local
one are none of ours, and those that are written in Python are seen by events.
"""

import contextlib
import fnmatch
import functools
import os
import stat

from . import programs
from .disk import walk
from .instead import put_into_class, put_subclass
from .journal import state
from .keep import Keeper
from .opened import PROGRAM

NAMES = (str, bytes, os.PathLike)


def announce(process, file, cuts=False):
    from .hook import handle, on_write  # it imports us

    handle(process, on_write, file, cuts, False)


def wrap_lib(process, lib):
    def opens(path, mode="r", *args, **kwargs):
        if isinstance(path, NAMES) and mode not in ("r", "rb"):
            announce(process, path, cuts=mode.startswith("w"))

    put_subclass(lib, "OSFile", opens)
    wrap_function(lib, "memory_map", lambda path, mode="r": opens(path, mode.replace("w", "r+")))
    wrap_function(lib, "create_memory_map", lambda path, size: opens(path, "w"))
    wrap_function(lib, "output_stream", lambda source, *args, **kwargs: opens(source, "w"))


def wrap_csv(process, csv):
    def opens(sink, *args, **kwargs):
        if isinstance(sink, NAMES):
            announce(process, sink, cuts=True)

    put_subclass(csv, "CSVWriter", opens)


def wrap_metadata(process, parquet):
    real = parquet.FileMetaData.write_metadata_file

    def write_metadata_file(self, where):
        if isinstance(where, NAMES):
            announce(process, where, cuts=True)
        return real(self, where)

    put_into_class(parquet.FileMetaData, "write_metadata_file", write_metadata_file)


def wrap_function(module, name, before):
    real = getattr(module, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        before(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(module, name, call)


# ---- file systems


def wrap_file_systems(process, arrow):
    """Of some, C makes the objects: so their class keeps its place, and gets other methods."""
    from .hook import handle, on_remove, on_rename, on_rmtree

    def empties(path):
        for name in os.listdir(path) if os.path.isdir(path) else ():
            inner = os.path.join(path, name)
            handle(process, on_rmtree if is_folder(inner) else on_remove, inner)

    methods = {
        "open_output_stream": lambda path: announce(process, path, cuts=True),
        "open_append_stream": lambda path: announce(process, path),
        "create_dir": lambda path: handle(process, on_folders, path),
        "delete_file": lambda path: handle(process, on_remove, path),
        "delete_dir": lambda path: handle(process, on_rmtree, path),
        "delete_dir_contents": empties,
        "move": lambda src, dest: handle(process, on_rename, src, dest),
        "copy_file": lambda src, dest: announce(process, dest),
    }
    for name, before in methods.items():
        put_into_class(arrow.FileSystem, name, method(arrow, name, before))


def method(arrow, name, before):
    """before(*paths) is called if they are local: as many as it has arguments, named as they."""
    real = getattr(arrow.FileSystem, name)
    words = before.__code__.co_varnames[: before.__code__.co_argcount]

    def call(self, *args, **kwargs):
        given = dict(zip(words, args, strict=False)) | kwargs
        paths = [local(arrow, self, given.get(word)) for word in words]
        if all(paths):
            before(*paths)
        return real(self, *args, **kwargs)

    return call


def local(arrow, system, path):
    """The file's name, if it is one of this machine's."""
    if not isinstance(path, NAMES):
        return None
    path = os.fsdecode(path)
    while isinstance(system, arrow.SubTreeFileSystem):
        path = os.path.join(system.base_path, path.lstrip("/"))
        system = system.base_fs
    return path if isinstance(system, arrow.LocalFileSystem) else None


def is_folder(path):
    return os.path.isdir(path) and not os.path.islink(path)


def on_folders(process, path):
    """One, and those above it that are not there."""
    path = os.path.realpath(os.fsencode(path))
    while not os.path.lexists(os.path.dirname(path)):
        path = os.path.dirname(path)
    process.on(Keeper.will_make, path)


# ---- many files at once


def wrap_dataset(process, dataset):
    """Files are named by a template, in the folder and below it; others may be removed."""
    real = dataset._filesystemdataset_write

    def write(data, base_dir, basename_template, filesystem, *args, **kwargs):
        pattern = os.fsencode(basename_template.replace("{i}", "*"))
        with many(process, filesystem, base_dir, pattern):
            return real(data, base_dir, basename_template, filesystem, *args, **kwargs)

    dataset._filesystemdataset_write = functools.wraps(real)(write)


def wrap_copies(process, fs):
    for name in ("_copy_files", "_copy_files_selector"):
        real = getattr(fs, name)

        def copy(source_fs, source, destination_fs, destination, *args, real=real):
            with many(process, destination_fs, destination, b"*"):
                return real(source_fs, source, destination_fs, destination, *args)

        setattr(fs, name, functools.wraps(real)(copy))


@contextlib.contextmanager
def many(process, system, path, pattern):
    """While files are written in a folder: what fits the pattern is written where it lies."""
    import pyarrow._fs

    from .hook import handle

    path = local(pyarrow._fs, system, path)
    if not path:
        yield
        return
    path = os.path.realpath(os.fsencode(path))
    handle(process, on_many, path, pattern)
    before = dict(walk(path))
    try:
        yield
    finally:
        handle(process, on_many_written, path, before)


def on_many(process, path, pattern):
    process.on(lambda keeper, path: keep_many(keeper, path, pattern), path)


def on_many_written(process, path, before):
    process.on(lambda keeper, path: note_many(keeper, path, before), path)


def keep_many(keeper, path, pattern):
    """Of files that do not fit the pattern, a link is enough."""
    found = [*walk(path)] if os.path.isdir(path) else []
    if found:
        keeper.will_remove_tree(path, found)
    else:
        programs.keep(keeper, path, "alone")
    for inner, info in found:
        if stat.S_ISREG(info.st_mode) and fnmatch.fnmatch(os.path.basename(inner), pattern):
            programs.keep(keeper, inner, "alone")
    keeper.writes(path, PROGRAM)


def note_many(keeper, path, before):
    """What is new or changed is taken for the run's: who else has written just then is not seen."""
    closed = {"do": "state", "by": PROGRAM}
    for inner, info in walk(path):
        if inner not in before:
            keeper.journal.append(*keeper.entries_for_new(inner))
        is_open = PROGRAM in keeper.journal.opened.now.get(inner, ())
        written = inner not in before or state(info) != state(before[inner])
        protected = not stat.S_ISREG(info.st_mode) or keeper.others.is_protected(info)
        if (is_open or written) and not protected:
            keeper.journal.append(closed | {"path": inner, "state": state(info)})
    keeper.journal.append(closed | {"path": path, "state": None})
