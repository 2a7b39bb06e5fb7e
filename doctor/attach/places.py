"""What a stack means: in which call a rank stands, and at which line of its user's code.

A frame is (file, function, line); a stack is a list of them, the innermost first.
"""

import re

COLLECTIVES = """all_reduce reduce broadcast barrier all_gather all_gather_into_tensor gather
scatter reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single
all_gather_object gather_object broadcast_object_list scatter_object_list
monitored_barrier all_reduce_coalesced all_gather_coalesced""".split()
MESSAGES = "send recv isend irecv batch_isend_irecv send_object_list recv_object_list".split()
# _pre_forward: also, once, of the order of the gradients.
SYNCS = """_pre_forward _sync_buffers _sync_module_buffers _distributed_broadcast_coalesced
_default_broadcast_coalesced _check_sync_bufs_pre_fwd""".split()
STARTS = "_verify_param_shape_across_processes _sync_module_states _verify_params_across_processes"
# Kinds in which a rank waits for other ranks.
ONCE = {"wrap", "join", "group", "leave"}  # in no loop
WAITS = {"collective", "message", "work", "forward", "backward", "gpu"} | ONCE
# Of these, those in which torch lets the thread sleep until all has come (Horovod's asks again).
SLEEPS = {"collective", "message", "forward", "backward", "wrap", "work"}
# (end of the file, functions or None for all, kind, in words; {} is the function)
PLACES = [
    ("torch/distributed/distributed_c10d.py", COLLECTIVES, "collective", "{}"),
    ("torch/distributed/distributed_c10d.py", MESSAGES, "message", "{}"),
    ("torch/distributed/distributed_c10d.py", ["init_process_group"], "join", "{}"),
    ("torch/distributed/distributed_c10d.py", ["new_group", "split_group"], "group", "{}"),
    ("torch/distributed/distributed_c10d.py", ["destroy_process_group"], "leave", "{}"),
    ("torch/nn/parallel/distributed.py", ["__init__"], "wrap", "the constructor of DDP"),
    ("torch/distributed/utils.py", STARTS.split(), "wrap", "the constructor of DDP"),
    ("torch/nn/parallel/distributed.py", SYNCS, "forward", "the forward pass of DDP"),
    ("torch/nn/modules/_functions.py", ["forward"], "collective", "SyncBatchNorm"),
    ("torch/autograd/graph.py", ["_engine_run_backward"], "backward", "backward"),
    ("torch/autograd/__init__.py", ["backward"], "backward", "backward"),
    ("_fsdp_param_group.py", None, "collective", "FSDP ({})"),
    ("_fsdp_collectives.py", None, "collective", "FSDP ({})"),
    ("fsdp/_runtime_utils.py", None, "collective", "FSDP ({})"),
    ("horovod/torch/mpi_ops.py", ["synchronize", "poll"], "collective", "Horovod's allreduce"),
    ("horovod/torch/optimizer.py", ["synchronize", "step"], "collective", "Horovod's allreduce"),
    ("horovod/torch/mpi_ops.py", None, "collective", "Horovod's {}"),
    ("pipelining/schedules.py", ["_wait_batch_p2p"], "work", "a message of the pipeline"),
    ("distributed/_functional_collectives.py", ["wait_tensor"], "collective", "{}"),
    ("torch/cuda/__init__.py", ["synchronize"], "gpu", "synchronize()"),
    ("torch/cuda/streams.py", ["synchronize"], "gpu", "synchronize()"),
]
# What a rank does that waits for no other rank.
DOES = [
    ("pdb.py", None, "debugger", "the debugger"),
    ("bdb.py", None, "debugger", "the debugger"),
    ("torch/utils/data/dataloader.py", ["_try_get_data", "_get_data"], "loader", "a loader"),
    ("torch/utils/data/dataloader.py", ["_shutdown_workers"], "loader", "the end of a loader"),
    ("torch/utils/data/_utils/fetch.py", None, "data", "reading data"),
    ("torch/serialization.py", ["save", "_save", "_legacy_save"], "saves", "torch.save"),
    ("torch/serialization.py", ["load", "_load"], "loads", "torch.load"),
    ("torch/optim/optimizer.py", ["profile_hook_step", "wrapper"], "optimizer", "optimizer.step"),
    ("subprocess.py", None, "command", "a command that it has started"),
    ("socket.py", None, "network", "the network"),
    ("ssl.py", None, "network", "the network"),
]
WORKER = "torch/utils/data/_utils/worker.py"  # frames of a loader's worker
SPAWNED = "torch/multiprocessing/spawn.py"  # frames of a rank of mp.spawn, and of its parent
STARTED = "multiprocessing/process.py"  # frames of any process that Python has started
# A call that reads what a GPU computes, and so waits for all that was queued before.
READS = re.compile(r"\.(item|cpu|tolist|numpy)\(|\b(float|int|bool|print)\(|synchronize|\bif ")

# A wait for an asynchronous call is no function of Python: its line alone shows it.
WORK = re.compile(r"(?<!\bos)\.wait\(|\bwait_all")


def is_users(file):
    library = re.search(r"/lib(64)?/python\d|[/\\](site|dist)-packages[/\\]", file)
    return not library and not file.startswith("<") and not is_torchs(file)


def is_torchs(file):  # also of a torch that was built in a folder of one's own
    return any(file.endswith(end) for end, *_ in PLACES + DOES if end.startswith("torch/"))


def users_frame(stack):
    """The innermost frame of the user's code; else the innermost that is not torch's; or None."""
    others = [frame for frame in stack if not re.search("/lib(64)?/python[^/]*/(?!site)", frame[0])]
    others = [frame for frame in others if "/torch/" not in frame[0] and frame[0][0] != "<"]
    return next((frame for frame in stack if is_users(frame[0])), next(iter(others), None))


def meaning(stack, gpu=False, text=""):
    """(kind, in words) of what it stands in, or (None, "").

    gpu: whether the process uses one; text: of the user's line.
    """
    mine = users_frame(stack)
    inner = stack[: stack.index(mine)] if mine else stack
    found = known(inner, PLACES) or known(inner, DOES)
    if found:
        return found
    if inner == [] and WORK.search(text):
        return "work", "an asynchronous call"
    if gpu and inner == [] and READS.search(text):
        return "gpu", "a result of the GPU"
    around = known(stack, DOES)  # a data set's own code, called by a loader
    return around if around and around[0] == "data" else (None, "")


def known(stack, places):
    """The outermost of the calls that are known: all_gather_object, not its all_gather."""
    return next((found for _, found in matches(stack, places)), None)


def matches(stack, places):
    """(frame, (kind, in words)) of each that is known, the outermost first."""
    for frame in reversed(stack):
        for end, functions, kind, words in places:
            if frame[0].endswith(end) and (functions is None or frame[1] in functions):
                yield frame, (kind, words.format(frame[1]))
                break


def outermost(stack):
    """The frame of the call in which it waits, for ranks or for a loader's workers, or None."""
    mine = users_frame(stack)
    inner = stack[: stack.index(mine)] if mine else stack
    loaders = [place for place in DOES if place[2] == "loader"]
    return next((frame for frame, _ in [*matches(inner, PLACES), *matches(inner, loaders)]), None)


def has(stack, end, function=None):
    return any(f.endswith(end) and function in (None, name) for f, name, _ in stack)
