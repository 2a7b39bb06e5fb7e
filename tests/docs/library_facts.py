"""What a library does without being told, beside a loop by hand; rank 0 writes it as JSON.

$ torchrun --standalone --nproc-per-node=2 library_facts.py (hand|accelerate) FILE
$ python library_facts.py (fabric|ray) FILE
"""

import gc
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Hand:
    """torch alone, as in minimal/distributed.py; the libraries below replace parts of it."""

    wrap = staticmethod(DistributedDataParallel)
    seed = staticmethod(torch.manual_seed)
    more = staticmethod(dict)  # what only one of them has

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def loader(self, count, batch_size, shuffle=False, **more):
        sampler = DistributedSampler(range(count), shuffle=shuffle, drop_last=shuffle)
        if not shuffle:
            sampler = range(self.rank, count, self.world_size)
        return DataLoader(range(count), batch_size // self.world_size, sampler=sampler, **more)

    def set_epoch(self, loader, epoch):
        loader.sampler.set_epoch(epoch)

    def prepare(self, optimizer, scheduler):
        return optimizer, scheduler

    def backward_of_one_of_four_parts(self, loss):
        loss.backward()

    def seed_each(self):
        self.seed(self.rank)

    def reduce(self, tensor):
        """By the library's own call, with its defaults."""
        dist.all_reduce(tensor)
        return tensor


class Accelerate(Hand):
    def __init__(self):
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        self.alone = Accelerator().num_processes == 1
        self.start()
        self.rank, self.seed = self.library.process_index, set_seed

    def start(self, **settings):
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        config = DataLoaderConfiguration(**settings)
        self.library = Accelerator(cpu=True, dataloader_config=config)
        self.wrap = self.prepare = self.library.prepare
        self.reduce = self.library.reduce

    def loader(self, count, batch_size, **more):
        return self.library.prepare(DataLoader(range(count), batch_size, **more))

    def set_epoch(self, loader, epoch):
        loader.set_epoch(epoch)

    def backward_of_one_of_four_parts(self, loss):
        self.library.gradient_accumulation_steps = 4
        self.library.backward(loss)

    def seed_each(self):
        self.seed(0, device_specific=True)

    def more(self):
        trimmed = [self.library.gather_for_metrics(batch) for batch in self.loader(37, 8)]
        found = {"alone": self.alone, "trimmed": len(torch.cat(trimmed))}
        self.seed(0)
        loader = self.loader(100, 8, shuffle=True)
        orders = [items(loader), items(loader)]
        self.library.save_state("state")
        self.library.wait_for_everyone()  # the first process writes
        self.library._dataloaders.clear()  # as in a new process
        self.seed(0)
        loader = self.loader(100, 8, shuffle=True)
        self.library.load_state("state")
        found["load_state"] = orders.index(items(loader))
        self.start(use_seedable_sampler=True)
        found["seedable"] = epoch_after_a_resume(self)
        self.start(split_batches=True)
        found["split"] = everywhere(next(iter(self.loader(100, 8))).tolist())
        found["split_schedule"] = steps_of_a_schedule(self)
        return found


class Fabric(Hand):
    def __init__(self):
        import lightning_fabric

        self.library = lightning_fabric.Fabric(accelerator="cpu", devices=2)
        self.library.launch()
        self.rank, self.reduce = self.library.global_rank, self.library.all_reduce
        self.wrap, self.seed = self.library.setup, self.library.seed_everything

    def loader(self, count, batch_size, **more):
        return self.library.setup_dataloaders(DataLoader(range(count), batch_size, **more))

    def more(self):
        del os.environ["PL_GLOBAL_SEED"]
        found = {"manual_seed_counts": seed_counts(self, torch.manual_seed)}
        self.set_epoch = lambda loader, epoch: setattr(loader, "_num_iter_calls", epoch)
        return found | {"counted": epoch_after_a_resume(self)}


class Ray(Hand):
    def __init__(self):
        from ray.train.torch import prepare_model

        self.rank, self.wrap = dist.get_rank(), prepare_model

    def loader(self, count, batch_size, **more):
        from ray.train.torch import prepare_data_loader

        return prepare_data_loader(DataLoader(range(count), batch_size, **more))

    def more(self):
        return {"in_rays_folder": "/artifacts/" in os.getcwd()}


def items(loader):
    return torch.cat([batch.flatten() for batch in loader]).tolist()


def everywhere(value):
    """What each process has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def steps_of_a_schedule(library):
    """After one scheduler.step(): how far it has come."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for part in library.prepare(optimizer, scheduler):
        part.step()
    return scheduler.last_epoch


def epoch_after_a_resume(library):
    """Which epoch's images a new loader yields that is told to go on with epoch 1.

    Here epochs 0 and 1 are the first two times that one loader is used; or, where both are the
    same, what set_epoch makes of it.
    """
    library.seed(0)
    loader = library.loader(100, 8, shuffle=True, drop_last=True)
    orders = [items(loader), items(loader)]
    if orders[0] == orders[1]:
        library.set_epoch(loader, 1)
        orders[1] = items(loader)
    library.seed(0)
    loader = library.loader(100, 8, shuffle=True, drop_last=True)
    library.set_epoch(loader, 1)
    return orders.index(items(loader))


def seed_counts(library, seed):
    """Whether two seeds give two orders."""
    orders = []
    for number in (0, 1):
        seed(number)
        orders.append(items(library.loader(100, 8, shuffle=True)))
    return orders[0] != orders[1]


def facts(library):
    found = {}
    loader = library.loader(100, 8, shuffle=True, drop_last=True)
    found["batch"], found["steps"] = len(next(iter(loader))), len(loader)
    found["schedule"] = steps_of_a_schedule(library)
    one, other = everywhere(items(library.loader(37, 8)))
    found["validated"], found["validates_all"] = len(one + other), {*one, *other} == {*range(37)}
    one, other = everywhere(items(library.loader(100, 8, shuffle=True)))
    found["trained"] = len(one + other)
    loader = library.loader(100, 8, shuffle=True)
    found["new_order"] = items(loader) != items(loader)
    found["resumed"] = epoch_after_a_resume(library)
    found["seed_counts"] = seed_counts(library, library.seed)
    library.seed(0)
    one, other = everywhere(torch.rand(1).item())
    found["random_differs"] = one != other
    library.seed_each()
    one, other = everywhere(torch.rand(1).item())
    found["own_random_differs"] = one != other
    one, other = everywhere(items(library.loader(100, 8, shuffle=True, drop_last=True)))
    found["own_seeds_share_images"] = bool({*one} & {*other})
    found["reduced"] = library.reduce(torch.tensor(float(library.rank))).item()

    net = nn.BatchNorm1d(1)
    model = library.wrap(net)
    found["prefix"] = all(key.startswith("module.") for key in model.state_dict())
    model.train()(torch.full((2, 1), float(library.rank)) + torch.tensor([[0.0], [1.0]]))
    one, other = everywhere(net.running_mean.item())
    found["own_mean"] = one != other
    model.eval()(torch.zeros(2, 1))
    found["sent_mean"] = everywhere(net.running_mean.item()) == [one, one]

    net = nn.Linear(1, 1, bias=False)
    library.backward_of_one_of_four_parts(library.wrap(net)(torch.ones(1, 1)).sum())
    found["gradient"] = net.weight.grad.item()
    return found | library.more()


def main(config):
    libraries = {"hand": Hand, "accelerate": Accelerate, "fabric": Fabric, "ray": Ray}
    library = libraries[config["name"]]()
    found = facts(library)
    if library.rank == 0:
        with open(config["file"], "w") as file:
            json.dump(found, file)
    dist.barrier()


if __name__ == "__main__":
    config = {"name": sys.argv[1], "file": os.path.abspath(sys.argv[2])}
    if config["name"] == "ray":
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer

        scaling = ScalingConfig(num_workers=2)
        TorchTrainer(main, train_loop_config=config, scaling_config=scaling).fit()
    else:
        main(config)
        gc.collect()  # ends DDP's threads: else gloo may abort when Python ends
        dist.destroy_process_group()
