"""Libraries that look for GPUs themselves: where there is none they are told to use CPUs.

Each is told when the script imports it: nothing is imported that the script does not import.
"""

import functools
import importlib.util
import inspect
import os
import sys

from .events import note


def install():
    sys.meta_path.insert(0, Finder())


class Finder:
    """Tells of a module when it has been imported; the other finders find it."""

    asks = False

    def find_spec(self, name, path=None, target=None):
        if self.asks or name not in ADAPT:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec and spec.loader:
            real = spec.loader.exec_module

            def exec_module(module):
                real(module)
                ADAPT[name](module)

            spec.loader.exec_module = exec_module
        return spec


def changed(owner, change):
    """Call change(arguments) ahead of the constructor; a class that has changed since is left."""
    real = owner.__init__
    takes = inspect.signature(real)

    @functools.wraps(real)
    def init(*args, **kwargs):
        given = takes.bind(*args, **kwargs)
        given.apply_defaults()
        change(given.arguments)
        return real(*given.args, **given.kwargs)

    owner.__init__ = init


def lightning(module):
    """Lightning's Trainer and Fabric: a process for each GPU that was meant."""
    for name in ("_AcceleratorConnector", "_Connector"):
        if hasattr(module, name):
            changed(getattr(module, name), on_cpus)


def on_cpus(arguments):
    if arguments["accelerator"] == "cpu":
        return
    if arguments["accelerator"] not in ("auto", None):
        note("names a gpu")
    env, devices = os.environ, arguments["devices"]
    here = int(env.get("LOCAL_WORLD_SIZE", 0))  # of a launcher
    if not here:
        here = len(devices) if isinstance(devices, (list, tuple)) else 2
        here = int(devices) if str(devices).isdigit() else here
    arguments |= {"accelerator": "cpu", "devices": max(here, 1)}
    if "LOCAL_WORLD_SIZE" in env:
        arguments["num_nodes"] = int(env["WORLD_SIZE"]) // here


def accelerate(module):
    """Accelerate, and what uses it, such as the Trainer of transformers: no fp16 on a CPU."""

    def change(arguments):
        if str(arguments.get("mixed_precision")) == "fp16":
            arguments["mixed_precision"] = "no"
        if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"

    changed(module.Accelerator, change)


CONNECTORS = ["pytorch_lightning.trainer.connectors.accelerator_connector"]
CONNECTORS += ["lightning.pytorch.trainer.connectors.accelerator_connector"]
CONNECTORS += ["lightning_fabric.connector", "lightning.fabric.connector"]
ADAPT = dict.fromkeys(CONNECTORS, lightning) | {"accelerate.accelerator": accelerate}
