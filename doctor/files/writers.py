"""Libraries that write files in C++ or Rust, of which no audit event tells.

Each gets its function wrapped when its module has been imported: a finder sees to that, so that
nothing is imported that the script does not import. What is special of pyarrow is in arrow.py.
"""

import functools
import importlib.util
import os
import sys
import types

from . import arrow
from .opened import PROGRAM

# module: (where the function is, the number of the argument with the file's name, its keyword)
WRITERS = {
    "torch": [
        ("_C.ScriptModule.save", 1, "filename"),
        ("_C.ScriptFunction.save", 1, "filename"),
    ],
    "torch.autograd.profiler": [("profile.export_chrome_trace", 1, "path")],
    "safetensors": [("serialize_file", 1, "filename")],
    "torchvision.io.image": [
        ("write_file", 0, "filename"),
        ("write_png", 1, "filename"),
        ("write_jpeg", 1, "filename"),
    ],
    "torchvision.io.video": [("write_video", 0, "filename")],
    "_gdbm": [("open", 0, "filename")],
    "readline": [("write_history_file", 0, ""), ("append_history_file", 1, "")],
    "cv2": [("imwrite", 0, "filename")],
    "pyarrow.parquet.core": [("ParquetWriter.__init__", 1, "where")],
    "pyarrow.feather": [("write_feather", 1, "dest")],
    "pyarrow.csv": [("write_csv", 1, "output_file")],
    "pyarrow.ipc": [
        ("RecordBatchFileWriter.__init__", 1, "sink"),
        ("RecordBatchStreamWriter.__init__", 1, "sink"),
    ],
    "pyarrow.orc": [("ORCWriter.__init__", 1, "where")],
    "tokenizers": [("Tokenizer.save", 1, "path")],
    "torchaudio": [("save", 0, "uri")],
}


class Finder:
    """Tells of a module when it has been imported; the other finders find it."""

    def __init__(self, process):
        self.process = process
        self.asks = False

    def find_spec(self, name, path=None, target=None):
        if self.asks or (name not in WRITERS and name not in SPECIAL):
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec and spec.loader and hasattr(spec.loader, "exec_module"):
            if isinstance(spec.loader, type):  # of all modules that are built into this Python
                spec.loader = types.SimpleNamespace(
                    create_module=spec.loader.create_module, exec_module=spec.loader.exec_module
                )
            real = spec.loader.exec_module

            def exec_module(module):
                real(module)
                wrap_all(self.process, name, module)

            spec.loader.exec_module = exec_module
        return spec


def install(process):
    sys.meta_path.insert(0, Finder(process))
    for name in {**WRITERS, **SPECIAL}:
        if name in sys.modules:
            wrap_all(process, name, sys.modules[name])


def wrap_all(process, name, module):
    """A library that has no such function, or another one, is left as it is."""
    try:
        for where, number, keyword in WRITERS.get(name, ()):
            wrap(process, module, where, number, keyword)
        for special in SPECIAL.get(name, ()):
            special(process, module)
    except Exception as error:
        said = f"{type(error).__name__}: {error} (wrapping {name})"
        process.do(lambda keeper: keeper.journal.append({"do": "note", "text": said}))


def wrap(process, module, where, number, keyword):
    *path, name = where.split(".")
    owner = functools.reduce(lambda at, part: getattr(at, part, None), path, module)
    real = getattr(owner, name, None)
    if real is None or hasattr(real, "doctor"):
        return

    @functools.wraps(real)
    def call(*args, **kwargs):
        file = kwargs.get(keyword, args[number] if len(args) > number else None)
        named = isinstance(file, (str, bytes, os.PathLike))
        if named:
            announce(process, file, replaces=True)
        try:
            return real(*args, **kwargs)
        finally:
            if named:
                process.has_written(file)

    call.doctor = True
    setattr(owner, name, call)


def announce(process, file, cuts=False, replaces=False):
    from .hook import handle, on_write  # it imports us

    handle(process, on_write, file, cuts, replaces)


def wrap_archives(process, torch):
    """torch.save, torch.export.save and torch.package write by this class."""
    real = torch._C.PyTorchFileWriter

    class PyTorchFileWriter(real):
        def __init__(self, file, *args, **kwargs):
            self.doctor_file = file if isinstance(file, (str, bytes, os.PathLike)) else None
            if self.doctor_file is not None:
                announce(process, file, cuts=True)
            super().__init__(file, *args, **kwargs)

        def write_end_of_file(self):
            super().write_end_of_file()
            if self.doctor_file is not None:
                process.has_written(self.doctor_file)

    torch._C.PyTorchFileWriter = PyTorchFileWriter


def wrap_h5py(process, h5py):
    real = h5py.File.__init__

    @functools.wraps(real)
    def begin(self, name, mode="r", *args, **kwargs):
        if mode != "r" and isinstance(name, (str, bytes, os.PathLike)):
            announce(process, name, cuts=mode == "w")
        real(self, name, mode, *args, **kwargs)

    h5py.File.__init__ = begin


def wrap_mapped(process, torch):
    """A tensor that is a file: what is written into it is written there."""
    for owner in (torch, torch.UntypedStorage):
        real = owner.from_file

        @functools.wraps(real)
        def from_file(filename, shared=False, *args, real=real, **kwargs):
            if shared:
                announce(process, filename)
            return real(filename, shared, *args, **kwargs)

        owner.from_file = staticmethod(from_file) if isinstance(owner, type) else from_file


def wrap_stores(process, distributed):
    """init_method="file://..." is written as long as the group lives, and removed by the last."""
    real = distributed.FileStore.__init__

    @functools.wraps(real)
    def begin(self, file_name, *args, **kwargs):
        from .hook import handle

        handle(process, write_on, file_name)
        real(self, file_name, *args, **kwargs)

    distributed.FileStore.__init__ = begin


def write_on(process, file):
    path = os.path.realpath(os.fsencode(file))
    process.on(lambda keeper, path: keeper.will_write(path, False, PROGRAM), path)


def wrap_tokenizers(process, tokenizers):
    """A model in Rust writes files by names of its own. transformers saves by these, too."""
    owner = tokenizers.models.Model
    real = owner.save

    @functools.wraps(real)
    def save(self, folder, *args, **kwargs):
        prefix = (*args, kwargs.get("prefix", kwargs.get("name")), None)[0]
        names = ("vocab.json", "merges.txt", "vocab.txt", "unigram.json")
        files = [os.path.join(folder, f"{prefix}-{name}" if prefix else name) for name in names]
        for file in files:
            announce(process, file, replaces=True)
        try:
            return real(self, folder, *args, **kwargs)
        finally:
            process.has_written(*files)

    owner.save = save


def wrap_dbm(process, dbm):
    """Databases of ndbm are one file or two; Berkeley DB, which is its usual form, makes one."""
    real = dbm.open

    @functools.wraps(real)
    def open_(filename, flags="r", *args):
        for end in (".db", ".dir", ".pag") if flags != "r" else ():
            announce(process, os.fsdecode(filename) + end)
        return real(filename, flags, *args)

    dbm.open = open_


def wrap_shared_memory(process, posix):
    """Blocks of multiprocessing.shared_memory are files of /dev/shm, which C opens and removes."""
    real_open, real_unlink = posix.shm_open, posix.shm_unlink

    @functools.wraps(real_open)
    def shm_open(path, flags, *args, **kwargs):
        if flags & (os.O_CREAT | os.O_RDWR):
            announce(process, "/dev/shm/" + path.lstrip("/"))
        return real_open(path, flags, *args, **kwargs)

    @functools.wraps(real_unlink)
    def shm_unlink(path):
        from .hook import handle, on_remove

        handle(process, on_remove, "/dev/shm/" + path.lstrip("/"))
        real_unlink(path)

    posix.shm_open, posix.shm_unlink = shm_open, shm_unlink


SPECIAL = {
    "_posixshmem": [wrap_shared_memory],
    "torch": [wrap_archives, wrap_mapped],
    "torch.distributed": [wrap_stores],
    "h5py": [wrap_h5py],
    "tokenizers": [wrap_tokenizers],
    "_dbm": [wrap_dbm],
    "pyarrow.lib": [arrow.wrap_lib],
    "pyarrow._csv": [arrow.wrap_csv],
    "pyarrow._parquet": [arrow.wrap_metadata],
    "pyarrow._fs": [arrow.wrap_file_systems],
    "pyarrow.fs": [arrow.wrap_copies],
    "pyarrow.dataset": [arrow.wrap_dataset],
}
