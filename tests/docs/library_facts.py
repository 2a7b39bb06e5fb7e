"""What a library does without being told, beside a loop by hand; each process writes its JSON.

$ torchrun --standalone --nproc-per-node=2 library_facts.py (hand|accelerate) FOLDER
$ python library_facts.py (fabric|ray) FOLDER
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def items(loader):
    return torch.cat([batch.flatten() for batch in loader]).tolist()


class Hand:
    """torch alone, as in minimal/distributed.py; the libraries below replace parts of it."""

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

    def wrap(self, net):
        return DistributedDataParallel(net)

    def seed(self, number):
        torch.manual_seed(number)

    def seed_each(self):
        torch.manual_seed(self.rank)

    def sum(self, number):
        """By the library's own call, with its defaults."""
        tensor = torch.tensor(float(number))
        dist.all_reduce(tensor)
        return tensor.item()

    def steps_of_a_schedule(self):
        """After one scheduler.step(); how far it has come."""
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.step_schedule(optimizer, scheduler)
        return scheduler.last_epoch

    def step_schedule(self, optimizer, scheduler):
        optimizer.step()
        scheduler.step()

    def gradient_of_a_part(self):
        """Of a loss of 1 * weight, which is one of four parts of a batch."""
        net = nn.Linear(1, 1, bias=False)
        self.wrap(net)(torch.ones(1, 1)).sum().backward()
        return net.weight.grad.item()

    def more(self):
        """What only one of them has."""
        return {}


class Accelerate(Hand):
    def __init__(self):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        self.alone = Accelerator().num_processes
        AcceleratorState._reset_state(True)
        self.library = Accelerator(cpu=True)
        self.rank, self.world_size = self.library.process_index, self.library.num_processes

    def loader(self, count, batch_size, **more):
        return self.library.prepare(DataLoader(range(count), batch_size, **more))

    def set_epoch(self, loader, epoch):
        loader.set_epoch(epoch)

    def wrap(self, net):
        return self.library.prepare(net)

    def seed(self, number):
        from accelerate.utils import set_seed

        set_seed(number)

    def seed_each(self):
        from accelerate.utils import set_seed

        set_seed(0, device_specific=True)

    def sum(self, number):
        return self.library.reduce(torch.tensor(float(number))).item()

    def step_schedule(self, optimizer, scheduler):
        optimizer, scheduler = self.library.prepare(optimizer, scheduler)
        optimizer.step()
        scheduler.step()

    def gradient_of_a_part(self):
        self.library.gradient_accumulation_steps = 4
        net = nn.Linear(1, 1, bias=False)
        self.library.backward(self.wrap(net)(torch.ones(1, 1)).sum())
        self.library.gradient_accumulation_steps = 1
        return net.weight.grad.item()

    def more(self):
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState

        trimmed = [self.library.gather_for_metrics(batch) for batch in self.loader(37, 8)]
        self.seed(0)
        loader = self.loader(100, 8, shuffle=True)
        zero, one = items(loader), items(loader)
        self.library.save_state("state")
        self.library.wait_for_everyone()  # the first process writes
        self.library._dataloaders.clear()  # as in a new process
        self.seed(0)
        loader = self.loader(100, 8, shuffle=True)
        self.library.load_state("state")
        found = {"alone": self.alone, "trimmed": len(torch.cat(trimmed))}
        found["load_state"] = [zero, one].index(items(loader))

        def again(**settings):
            AcceleratorState._reset_state(True)
            config = DataLoaderConfiguration(**settings)
            self.library = Accelerator(cpu=True, dataloader_config=config)

        again(use_seedable_sampler=True)
        found["seedable"] = resumed(self)
        again(split_batches=True)
        found["split"] = next(iter(self.loader(100, 8))).tolist()
        found["split_schedule"] = self.steps_of_a_schedule()
        return found


class Fabric(Hand):
    def __init__(self):
        import lightning_fabric

        self.library = lightning_fabric.Fabric(accelerator="cpu", devices=2)
        self.library.launch()
        self.rank, self.world_size = self.library.global_rank, self.library.world_size

    def loader(self, count, batch_size, **more):
        return self.library.setup_dataloaders(DataLoader(range(count), batch_size, **more))

    def wrap(self, net):
        return self.library.setup(net)

    def seed(self, number):
        self.library.seed_everything(number)

    def seed_each(self):
        self.library.seed_everything(self.rank)

    def sum(self, number):
        return self.library.all_reduce(torch.tensor(float(number))).item()

    def more(self):
        del os.environ["PL_GLOBAL_SEED"]
        orders = []
        for seed in (0, 1):  # this one does not reach the sampler
            torch.manual_seed(seed)
            orders.append(items(self.loader(100, 8, shuffle=True)))
        self.seed(0)
        self.set_epoch = lambda loader, epoch: setattr(loader, "_num_iter_calls", epoch)
        return {"manual_seed": orders[0] == orders[1], "counted": resumed(self)}


class Ray(Hand):
    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def loader(self, count, batch_size, **more):
        from ray.train.torch import prepare_data_loader

        return prepare_data_loader(DataLoader(range(count), batch_size, **more))

    def wrap(self, net):
        from ray.train.torch import prepare_model

        return prepare_model(net)

    def more(self):
        return {"folder": os.getcwd()}


def resumed(library):
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


def facts(library):
    found = {}
    loader = library.loader(100, 8, shuffle=True, drop_last=True)
    found["batch"], found["steps"] = len(next(iter(loader))), len(loader)
    found["schedule"] = library.steps_of_a_schedule()
    found["gradient"] = library.gradient_of_a_part()
    found["validated"] = items(library.loader(37, 8))
    found["trained"] = items(library.loader(100, 8, shuffle=True))
    loader = library.loader(100, 8, shuffle=True)
    found["new_order"] = items(loader) != items(loader)
    found["resumed"] = resumed(library)
    orders = []
    for number in (0, 1):
        library.seed(number)
        orders.append(items(library.loader(100, 8, shuffle=True)))
    found["seed_counts"] = orders[0] != orders[1]
    library.seed(0)
    found["random"] = torch.rand(1).item()
    library.seed_each()
    found["own_random"] = torch.rand(1).item()
    found["own_part"] = items(library.loader(100, 8, shuffle=True, drop_last=True))
    found["sum"] = library.sum(library.rank)

    net = nn.BatchNorm1d(1)
    model = library.wrap(net)
    found["keys"] = sorted(model.state_dict())
    model.train()(torch.full((2, 1), float(library.rank)) + torch.tensor([[0.0], [1.0]]))
    found["trained_mean"] = net.running_mean.item()
    model.eval()(torch.zeros(2, 1))
    found["validated_mean"] = net.running_mean.item()
    return found | library.more()


def main(config):
    library = {"hand": Hand, "accelerate": Accelerate, "fabric": Fabric, "ray": Ray}
    library = library[config["name"]]()
    found = facts(library)
    with open(f"{config['folder']}/{library.rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()


if __name__ == "__main__":
    config = dict(zip(("name", "folder"), sys.argv[1:], strict=True))
    config["folder"] = os.path.abspath(config["folder"])
    if config["name"] == "ray":
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer

        scaling = ScalingConfig(num_workers=2)
        TorchTrainer(main, train_loop_config=config, scaling_config=scaling).fit()
    else:
        main(config)
        dist.destroy_process_group()
