"""What the doctor has seen is told: each certain fact, on a small script with one edit."""

import textwrap

import pytest
from conftest import each

from tests.docs.copies import edited
from tests.docs.doctors import looked_at

RIGHT = """import copy
import random
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
seeded = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 4, generator=seeded), torch.arange(64) % 2)
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, 8, sampler=sampler)
val_loader = DataLoader(data, 8, sampler=range(rank, 64, 2))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model = DistributedDataParallel(net)
for epoch in range(2):
    sampler.set_epoch(epoch)
    net.train()
    for step, (images, target) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    net.eval()
    correct = torch.zeros(1)
    with torch.no_grad():
        for images, target in val_loader:
            correct += (net(images).argmax(1) == target).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"{100 * correct.item() / 64:.1f} % correct")
del model
dist.destroy_process_group()
"""
WRAP = "model = DistributedDataParallel(net)"
AVERAGE = """        for w in net.parameters():
            dist.all_reduce(w.grad)
            w.grad /= 2
"""
LAST = "last = torch.optim.SGD(net[2].parameters(), lr=0.1)"
MESH = "('cpu', (2, 1), mesh_dim_names=('data', 'model'))"
LOADER = "loader = DataLoader(data, 8, sampler=sampler)\n"
ZIPPED = [
    (
        f"\n{LOADER}",
        f"\n{LOADER}also = DistributedSampler(data, drop_last=True)\n"
        "other = DataLoader(data, 8, sampler=also)\n",
    ),
    (
        "(images, target) in enumerate(loader)",
        "((images, target), _) in enumerate(zip(other, loader))",
    ),
]
BY_HAND = [
    (WRAP, "model = net"),
    (
        "        optimizer.step()",
        AVERAGE + "        optimizer.step()",
    ),
    ("del model\n", ""),
]
FORWARD = "        loss = torch"
REDUCE = "    dist.all_reduce(correct)"
DROPS = "loader = DataLoader(data, 8, sampler=sampler, drop_last=True)"
DROPOUT = ("torch.nn.ReLU()", "torch.nn.Dropout()")
DONE = """net.eval()
correct = torch.zeros(1)
with torch.no_grad():
    for images, target in val_loader:
        correct += (net(images).argmax(1) == target).sum()
dist.all_reduce(correct)
"""
SUMS = '    sums = {"right": correct, "all": torch.tensor([32.0])}\n'

PARTS = "    parts = [torch.zeros(1) for _ in range(2)]\n    work = dist.all_gather(parts, correct"
# Processes have 5 and 3 batches.
LOOP = RIGHT.partition("    for step, ")[2].partition("    scheduler.step()")[0]
JOIN = [
    ("import random\n", "import random\nfrom torch.distributed.algorithms.join import Join\n"),
    (
        "sampler = DistributedSampler(data, drop_last=True)",
        "sampler = DistributedSampler(range(40 - 16 * rank), 1, 0)\n"
        "mine = torch.utils.data.Subset(data, range(40) if rank == 0 else range(40, 64))",
    ),
    (
        "loader = DataLoader(data, 8, sampler=sampler)",
        "loader = DataLoader(mine, 8, sampler=sampler)",
    ),
    (
        f"    for step, {LOOP}",
        f"    with Join([model]):\n{textwrap.indent('    for step, ' + LOOP, '    ')}",
    ),
]
SEEDED = "torch.manual_seed(rank)\noptimizer"
STORE = "store = dist.PrefixStore('of', dist.distributed_c10d._get_default_store())\n"
SAVES = "if rank == 0:\n    torch.save(net.state_dict(), 'first.pth')\n    "
LOADS = f"net.load_state_dict(torch.load('first.pth'))\n{SEEDED}"
STREAM = [
    (
        "sampler = DistributedSampler(data, drop_last=True)",
        "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
        "        return iter(data)",
    ),
    ("loader = DataLoader(data, 8, sampler=sampler)", "loader = DataLoader(Stream(), 8)"),
    ("    sampler.set_epoch(epoch)\n", ""),
]
MICRO = [
    ("import copy\n", "import contextlib\nimport copy\n"),
    (
        f"{FORWARD}.nn.functional.cross_entropy(model(images), target)\n"
        "        optimizer.zero_grad()\n        loss.backward()\n",
        """        parts, last = [*zip(images.split(2), target.split(2))], 3
        optimizer.zero_grad()
        for i, (x, y) in enumerate(parts):
            with contextlib.nullcontext() if i == last else model.no_sync():
                torch.nn.functional.cross_entropy(model(x), y).backward()
""",
    ),
]
FOLDS = [
    (
        "sampler = DistributedSampler(data, drop_last=True)",
        "fold = torch.utils.data.Subset(data, range(rank * 32, rank * 32 + 32))\n"
        "sampler = range(32 - rank * 32, 64 - rank * 32)",
    ),
    ("    sampler.set_epoch(epoch)\n", ""),
    ("DataLoader(data, 8, sampler=range(rank, 64, 2))", "DataLoader(fold, 8)"),
    (WRAP, "model = net"),
    ("del model\n", ""),
]
SAVE = "torch.save(net.state_dict(), 'last.pth')"
SPLIT = [
    ("sampler = DistributedSampler(data,", "sampler = DistributedSampler(range(48),"),
    ("sampler=range(rank, 64, 2))", "sampler=range(48 + rank, 64, 2))"),
]


def alone(line):
    """An edit: only rank 0 does this."""
    blanks = line[: len(line) - len(line.lstrip())]
    return line, f"{blanks}if rank == 0:\n    {line}"


# name: (edits, certain, what is said, the line that is named)
SEEN = {
    "schedule on rank 0": (
        [alone("    scheduler.step()")],
        True,
        "the learning rates differ: [0.01",
        "scheduler.step()",
    ),
    "rate of the rank": (
        [("lr=0.1", "lr=0.1 * (rank + 1)")],
        True,
        "the learning rates differ: [0.1] and [0.2]",
        "optimizer.step()",
    ),
    "rate set by hand": (
        [(FORWARD, f'        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * rank\n{FORWARD}')],
        True,
        "the learning rates differ",
        "optimizer.step()",
    ),
    "weights changed on rank 0": (
        [
            (
                FORWARD,
                f"        if rank == 0:\n            net[0].weight.data += 1\n{FORWARD}",
            )
        ],
        True,
        "differs between the processes",
        "optimizer.step()",
    ),
    "step on rank 0": (
        [alone("        optimizer.step()")],
        True,
        "the processes make 8 and 0 steps",
        "optimizer.step()",
    ),
    "zero_grad on rank 0": (
        [alone("        optimizer.zero_grad()")],
        True,
        "rank 1 has not called zero_grad()",
        "optimizer.step()",
    ),
    "zero_grad of the model on rank 0, after the step": (
        [
            ("        optimizer.zero_grad()\n", ""),
            ("optimizer.step()\n", "optimizer.step()\n        rank or net.zero_grad()\n"),
        ],
        True,
        "rank 1 has not called zero_grad()",
        "optimizer.step()",
    ),
    "train on rank 0": (
        [alone("    net.train()"), DROPOUT],
        True,
        "rank 1 is not in training mode",
        "model(images)",
    ),
    "eval on rank 0": (
        [alone("    net.eval()"), DROPOUT],
        True,
        "rank 1 validates in training mode",
        "net(images)",
    ),
    "set_epoch on rank 0": (
        [alone("    sampler.set_epoch(epoch)")],
        True,
        "items are read by several processes: their samplers' epoch is 1 and 0",
        "sampler = Dist",
    ),
    "seeds of samplers": (
        [("data, drop_last=True)", "data, seed=rank, drop_last=True)")],
        True,
        "their samplers' seed is 0 and 1",
        "sampler = Dist",
    ),
    "own shuffles": (
        [
            (
                "loader = DataLoader(data, 8, sampler=sampler)",
                "part = torch.randperm(64)[rank::2].tolist()\n"
                "loader = DataLoader(data, 8, sampler=part)",
            ),
        ],
        False,
        "items are read by several processes",
        "loader = DataLoader",
    ),
    "counted on rank 0": (
        [alone("            correct += (net(images).argmax(1) == target).sum()")],
        False,
        "rank 1 validates items, and adds 0",
        "dist.all_reduce(correct)",
    ),
    "validated by rank 0": (
        [
            (
                "        for images, target in val_loader:",
                "        for images, target in val_loader if rank == 0 else []:",
            )
        ],
        True,
        "32 of 64 items are never validated",
        "in val_loader",
    ),
    "a part is validated": (
        [("sampler=range(rank, 64, 2))", "sampler=range(rank, 16, 2))")],
        False,  # it may be meant to look at no more
        "48 of 64 items are never validated",
        "in val_loader",
    ),
    "last batch dropped of a split by samplers": (
        [
            SPLIT[0],
            ("sampler=range(rank, 64, 2))", "sampler=range(48 + rank, 64, 2), drop_last=True)"),
        ]
        + [("data, 8, sampler=range", "data, 5, sampler=range")],
        True,
        "6 of 64 items are never validated: drop_last=True",
        "in val_loader",
    ),
    "last batch dropped": (
        [("sampler=range(rank, 64, 2))", "sampler=range(rank, 60, 2), drop_last=True)")],
        True,
        "16 of 64 items are never validated: drop_last=True",
        "in val_loader",
    ),
    "last batch dropped by a sampler of batches": (
        [
            (
                "val_loader = DataLoader(data, 8, sampler=range(rank, 64, 2))",
                "parts = torch.utils.data.BatchSampler(range(rank, 60, 2), 8, drop_last=True)\n"
                "val_loader = DataLoader(data, batch_sampler=parts)",
            )
        ],
        True,
        "16 of 64 items are never validated: drop_last=True",
        "in val_loader",
    ),
    "the training images once more": (
        [("        for images, target in val_loader:", "        for images, target in loader:")]
        + [("torch.randn(64", "torch.randn(66"), ("torch.arange(64)", "torch.arange(66)")]
        + [("loader = DataLoader(data, 8, sampler=sampler)", DROPS)],
        False,
        "2 of 66 items are never validated",
        "in loader:",
    ),
    "parts that overlap": (
        [
            ("range(rank, 64, 2)", "range(40 * rank, 40 * rank + 24 + 16 * (1 - rank))"),
            ("40 * rank, 40", "24 * rank, 40"),
        ],
        True,
        "validated items count several times",
        "val_loader = DataLoader",
    ),
    "a batch is left out": (
        [(FORWARD, f"        if rank and step == 1:\n            continue\n{FORWARD}")],
        True,
        "of 4 batches the processes train with 4 and 3",
        "in enumerate(loader)",
    ),
    "unequal gathers": (
        [
            (
                REDUCE,
                f"{REDUCE}\n    x = torch.zeros(3 + rank)\n    dist.all_gather([x, x], x)",
            )
        ],
        True,
        "all_gather is given tensors of shape [3] and [4]",
        "dist.all_gather(",
    ),
    "by hand, not broadcast": (
        [*BY_HAND, ("torch.manual_seed(0)\nnet", "net")],
        True,
        "the weights differ between the processes from the first step on: broadcast rank 0's",
        "optimizer.step()",
    ),
    "nothing is averaged": (
        [(WRAP, "model = net")],
        False,
        "no DDP, and no gradient is averaged",
        "optimizer.step()",
    ),
    "one of two optimizers by hand": (
        [
            (WRAP, "model = net"),
            ("del model\n", ""),
            ("SGD(net.parameters(), lr=0.1)", "SGD(net[0].parameters(), lr=0.1)\n" + LAST),
            ("        optimizer.zero_grad()", "        net.zero_grad()"),
            (
                "        optimizer.step()",
                AVERAGE.replace("net.", "net[2].")
                + "        optimizer.step()\n        last.step()",
            ),
        ],
        False,  # its weights may be each process's own
        "from here on: no gradient of this optimizer is averaged",
        "optimizer.step()",
    ),
    "averaged twice": (
        [
            (
                "        optimizer.step()",
                "        dist.all_reduce(net[0].weight.grad)\n        optimizer.step()",
            )
        ],
        False,
        "DDP has averaged these gradients already",
        "dist.all_reduce(net[0]",
    ),
    "another model is validated": (
        [
            (
                "for epoch in range(2):",
                "ema = copy.deepcopy(net)\nema[0].weight.data += rank\nfor epoch in range(2):",
            ),
            ("    net.eval()", "    ema.eval()"),
            ("net(images).argmax", "ema(images).argmax"),
        ],
        True,
        "0.weight of the model that is validated differs",
        "ema(images)",
    ),
    # After the last step no other can tell.
    "other weights are tested": (
        [("del model\n", "if rank == 0:\n    net[0].weight.data *= 0.5\n" + DONE + "del model\n")],
        True,
        "0.weight of the model that is validated differs",
        "net(images).argmax(1) == target",
    ),
    # DDP's other model makes the last step.
    "one of two models": (
        [
            (WRAP, WRAP + "\nother, = [DistributedDataParallel(copy.deepcopy(net))]"),
            ("lr=0.1)", "lr=0.1)\nof_other = []"),
            (
                "        optimizer.step()",
                "        optimizer.step()\n        net[0].weight.data += rank\n"
                "        of_other = of_other or [torch.optim.SGD(other.parameters(), lr=0.1)]\n"
                "        other(images).sum().backward()\n        of_other[0].step()",
            ),
        ],
        True,
        "from here on 0.weight differs",
        "optimizer.step()",
    ),
    # A group that nothing uses: all else is as it was.
    "weights, beside a group of rank 0": (
        [
            ("rank = dist.get_rank()", "rank = dist.get_rank()\nalone = dist.new_group([0])"),
            (FORWARD, f"        net[0].weight.data += rank\n{FORWARD}"),
        ],
        True,
        "differs between the processes",
        "optimizer.step()",
    ),
    "no set_epoch, beside a collective of rank 0 alone": (
        [
            ("rank = dist.get_rank()", "rank = dist.get_rank()\nalone = dist.new_group([0])"),
            ("    sampler.set_epoch(epoch)\n", "    dist.barrier(group=alone)\n"),
        ],
        True,
        "the order is that of the epoch before",
        "in enumerate(loader)",
    ),
    "eval on rank 0, beside a mesh of one row": (
        [
            alone("    net.eval()"),
            DROPOUT,
            ("rank = dist.get_rank()", "rank = dist.get_rank()\ndist.init_device_mesh" + MESH),
        ],
        True,
        "rank 1 validates in training mode",
        "net(images)",
    ),
    "no set_epoch for one of two zipped loaders": (
        ZIPPED,
        True,
        "the order is that of the epoch before",
        "in enumerate(zip(",
    ),
    "rates of FSDP": (
        [
            (WRAP, "model = net"),
            ("torch.manual_seed(rank)\nopt", "torch.distributed.fsdp.fully_shard(net)\nopt"),
            ("import random\n", "import random\nimport torch.distributed.fsdp\n"),
            ("lr=0.1)", "lr=0.1 + rank)"),
        ],
        True,
        "the learning rates differ: [0.1] and [1.1]",
        "optimizer.step()",
    ),
    "rank 1 reads before wait": (
        [
            (
                REDUCE,
                "    work = dist.all_reduce(correct, async_op=True)\n"
                "    if rank == 1:\n        print(correct.item())\n    work.wait()",
            )
        ],
        True,
        "the result is read before wait() was called",
        "dist.all_reduce(correct, async_op=True)",
    ),
    "read before wait": (
        [(REDUCE, "    work = dist.all_reduce(correct, async_op=True)")],
        True,
        "the result is read before wait() was called",
        "dist.all_reduce(correct, async_op=True)",
    ),
    "a gathered number is read before wait": (
        [
            (
                REDUCE,
                f"{PARTS}, async_op=True)\n    correct += parts[0].item()\n    work.wait()",
            )
        ],
        True,
        "the result is read before wait() was called",
        "dist.all_gather(parts",
    ),
    "loaded after a message that is sent too early": (
        [
            (
                SEEDED,
                f"flag = torch.zeros(1)\nif rank == 0:\n    dist.send(flag, 1)\n{SAVES}pass\n"
                f"else:\n    dist.recv(flag, 0)\n    time.sleep(4)\n    {LOADS}",
            ),
            ("import random\n", "import random\nimport time\n"),
        ],
        True,
        "it may be read before another process has saved it",
        "torch.load",
    ),
    "loaded after a file that is polled": (  # a right one: that it waits is not seen
        [
            (
                SEEDED,
                f"{SAVES}open('saved', 'w').close()\nelse:\n"
                f"    while not os.path.exists('saved'):\n        time.sleep(0.1)\n    {LOADS}",
            ),
            ("import random\n", "import os\nimport random\nimport time\n"),
        ],
        False,
        "it may be read before another process has saved it",
        "torch.load",
    ),
    "loaded after another word of the store": (
        [
            (
                SEEDED,
                f"{STORE}store.set(f'here{{rank}}', '1')\nstore.wait(['here0', 'here1'])\n"
                f"{SAVES}pass\nelse:\n    time.sleep(4)\n    {LOADS}",
            ),
            ("import random\n", "import random\nimport time\n"),
        ],
        True,
        "it may be read before another process has saved it",
        "torch.load",
    ),
    "a schedule in Join": (
        [
            *JOIN,
            ("    scheduler.step()\n    net.eval", "    net.eval"),
            (
                "            optimizer.step()",
                "            optimizer.step()\n            scheduler.step()",
            ),
            ("StepLR(optimizer, 1)", "StepLR(optimizer, 4)"),
        ],
        True,
        "the learning rates differ",
        "scheduler.step()",
    ),
    "step on rank 0 beside Join": (
        [*JOIN, ("    net.eval()", "    if rank == 0:\n        optimizer.step()\n    net.eval()")],
        True,
        "the processes make 2 and 0 steps",
        "optimizer.step()",
    ),
    "saved by turns": (
        [
            (
                REDUCE,
                f"{REDUCE}\n    if rank == epoch % 2:\n        {SAVE}\n    dist.barrier()",
            )
        ],
        False,
        "2 processes write last.pth",
        "torch.save(",
    ),
    "saved by turns without a barrier": (
        [
            (
                REDUCE,
                f"{REDUCE}\n    for i in range(2):\n        if rank == i:\n            {SAVE}",
            )
        ],
        True,
        "2 processes write last.pth",
        "torch.save(",
    ),
    "the whole stream": (
        STREAM,
        True,
        "each process reads the whole stream",
        "loader = DataLoader(Stream(), 8)",
    ),
    "a part of each batch of a stream": (
        [*STREAM, ("(images), target)", "(images[rank::2]), target[rank::2])")],
        False,
        "each process reads the whole stream",
        "loader = DataLoader(Stream(), 8)",
    ),
    "a step of several parts is left out": (
        [
            *MICRO,
            (
                "        for i, ",
                "        if rank and step == 1:\n            continue\n        for i, ",
            ),
        ],
        True,
        "of 4 batches the processes train with 16 and 12",
        "in enumerate(loader)",
    ),
    "a model of each process": (
        FOLDS,
        False,
        "64 items that one process validates, another trains with",
        "val_loader = ",
    ),
    "a split of each process": (
        FOLDS[:3],
        True,
        "64 items that one process validates, another trains with",
        "val_loader = ",
    ),
    "the order of a set": (
        [(REDUCE, f"{SUMS}    for name in {{*sums}}:\n        dist.all_reduce(sums[name])")],
        False,  # these processes are forks of one
        "the order of this set may be another in each process, and it calls all_reduce()",
        "for name in {*sums}",
    ),
    "the order of a set that a function gets": (
        [
            (
                REDUCE,
                f"{SUMS}    def add_up(x):\n        dist.all_reduce(x)\n"
                "    names = set(sums)\n    [add_up(sums[name]) for name in names]",
            )
        ],
        False,  # these processes are forks of one
        "the order of this set may be another in each process, and it calls all_reduce()",
        "for name in names]",
    ),
    "the same random numbers": (
        [("torch.manual_seed(rank)\noptimizer", "optimizer"), DROPOUT],
        False,
        "all processes draw the same random numbers",
        "torch.manual_seed(0)",
    ),
    "Python's random numbers": (
        [
            (FORWARD, f"        images = images * random.random()\n{FORWARD}"),
            ("seeded = ", "random.seed(0)\nseeded = "),
        ],
        False,
        "all processes draw the same random numbers of Python's random",
        "torch.manual_seed(rank)",
    ),
}


def seen_in(folder, edits=()):
    """[(certain, text, what stands in the line)], and the output."""
    script = folder / "train.py"
    script.write_text(edited(RIGHT, edits))
    _, found, output = looked_at(script)
    return [(one.certain, one.text, line) for one, line in found], output


RIGHT_TOO = {
    "as it is": [],
    # The loader is read with gradients, a plain model validates without, in each process a part.
    "no_grad around the model alone": [
        ("    with torch.no_grad():\n", "    if True:\n"),
        ("correct += (net(images)", "correct += (torch.no_grad()(net)(images)"),
    ],
    "rank 0 looks at some samples first": [
        (
            WRAP,
            f"{WRAP}\nif rank == 0:\n    with torch.no_grad():\n        net(data[:4][0])",
        )
    ],
    "two zipped loaders, and a look at the first batch": [
        *ZIPPED,
        (
            "    sampler.set_epoch(epoch)\n",
            "    look = next(iter(other))\n"
            "    sampler.set_epoch(epoch)\n    also.set_epoch(epoch)\n",
        ),
    ],
    # One line trains and validates, and ranks have 5 and 3 batches to validate.
    "parts of unlike length": [
        ("sampler=range(rank, 64, 2))", "sampler=range(0, 40) if rank == 0 else range(40, 64))"),
        (WRAP, f"{WRAP}\ndef forward(images):\n    return model(images)"),
        ("cross_entropy(model(images)", "cross_entropy(forward(images)"),
        ("(net(images)", "(forward(images)"),
    ],
    # One data set, divided into training and validation.
    "split by samplers": SPLIT,
    "split by samplers of images that are changed for training": [
        *SPLIT,
        (
            "torch.manual_seed(0)\nnet",
            "data = TensorDataset(data[:][0] + 1, data[:][1])\n"
            "loader = DataLoader(data, 8, sampler=sampler)\ntorch.manual_seed(0)\nnet",
        ),
    ],
    "a part is validated first, later all": [
        (
            "torch.manual_seed(0)\nnet",
            "part = DataLoader(data, 8, sampler=range(rank, 16, 2))\ntorch.manual_seed(0)\nnet",
        ),
        ("in val_loader:", "in val_loader if epoch else part:"),
    ],
    "what is gathered and sent is read before wait": [
        (
            REDUCE,
            f"{PARTS}, async_op=True)\n    print(correct.item())\n    work.wait()\n"
            "    correct = sum(parts)\n    work = dist.broadcast(correct, src=0, async_op=True)\n"
            "    if rank == 0:\n        print(correct.item())\n    work.wait()",
        ),
    ],
    "a future's wait": [
        (REDUCE, "    dist.all_reduce(correct, async_op=True).get_future().wait()"),
    ],
    "completed without wait": [
        (
            REDUCE,
            "    work = dist.all_reduce(correct, async_op=True)\n"
            "    while not work.is_completed():\n        pass\n    print(correct.item())",
        ),
    ],
    "loaded after a message": [
        (
            SEEDED,
            f"flag = torch.zeros(1)\n{SAVES}dist.send(flag, 1)\n"
            f"else:\n    dist.recv(flag, src=0)\n    {LOADS}",
        )
    ],
    "loaded after a word of the store": [
        (
            SEEDED,
            f"{STORE}{SAVES}store.set('saved', '1')\nelse:\n    store.wait(['saved'])\n    {LOADS}",
        )
    ],
    "loaded after a number of the store": [
        (
            SEEDED,
            f"{STORE}{SAVES}store.add('saved', 1)\n"
            f"else:\n    while store.add('saved', 0) < 1:\n        pass\n    {LOADS}",
        )
    ],
    "more batches in Join": JOIN,
    "the order of one name": [
        (
            REDUCE,
            f"{SUMS}    for name in {{'right'}}:\n        dist.all_reduce(sums[name])\n"
            "    del sums['all']\n    [dist.all_reduce(sums[name]) for name in {*sums}]\n"
            "    for name in set(sums):\n        dist.all_reduce(sums[name])\n    correct /= 4",
        ),
    ],
    "the order of numbers": [
        (
            REDUCE,
            "    def add_up(numbers):\n        [dist.all_reduce(correct) for number in numbers]\n"
            f"    add_up({{3, 7}})\n    correct /= 4\n{REDUCE}",
        ),
    ],
    "saved to no file": [
        (
            REDUCE,
            f"{REDUCE}\n    with open('/dev/null', 'wb') as null:\n"
            "        torch.save(optimizer.state_dict(), null)\n    torch.save(data, null.name)",
        ),
    ],
    "parts of a step of another number": [
        *MICRO,
        ("enumerate(parts)", "enumerate(parts[-1:] if rank == 0 else parts)"),
        ("target.split(2))], 3", "target.split(2))], 3 * rank"),
    ],
    "an optimizer without a rate": [
        (
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
            """class Own(torch.optim.Optimizer):
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight.data -= 0.1 * weight.grad


optimizer = Own(net.parameters(), {})""",
        ),
        ("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n", ""),
        ("    scheduler.step()\n", ""),
    ],
    "the order of a sorted set": [
        (REDUCE, f"{SUMS}    for name in sorted({{*sums}}):\n        dist.all_reduce(sums[name])"),
    ],
}


@pytest.mark.parametrize("name", each(RIGHT_TOO, [*RIGHT_TOO][::3]))
def test_the_right_script_is_clean(name, tmp_path):
    found, output = seen_in(tmp_path, RIGHT_TOO[name])
    assert not found and "Error" not in output, output


@pytest.mark.parametrize("name", each(SEEN, [*SEEN][::3]))
def test_what_was_seen_is_told(name, tmp_path):
    edits, certain, said, line = SEEN[name]
    found, output = seen_in(tmp_path, edits)
    right = [one for one in found if one[0] == certain and said in one[1] and line in one[2]]
    assert right, (found, output)
