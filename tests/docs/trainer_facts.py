"""What Hugging Face's Trainer does without being told; rank 0 writes it as JSON.

$ torchrun --standalone --nproc-per-node=2 trainer_facts.py FILE
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from transformers import Trainer, TrainerCallback, TrainingArguments

QUIET = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
QUIET |= {"disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 8}
QUIET |= {"per_device_eval_batch_size": 8, "num_train_epochs": 1}


class Net(nn.Module):
    """Its loss is its weight times 1; it notes what it was called with, and a random number."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.zeros(1)), nn.BatchNorm1d(1)
        self.trained, self.validated, self.random = [], [], []

    def forward(self, x, labels):
        (self.trained if self.training else self.validated).extend(x.tolist())
        self.norm(x[:, None].float() + int(os.environ["RANK"]))
        self.random.append(torch.rand(1).item())
        return self.weight.sum() * 1.0, x.float()


class Notes(TrainerCallback):
    """The orders of the epochs, and the gradient and the rate of each step."""

    def __init__(self):
        self.orders, self.gradients, self.rates = [], [], []

    def on_epoch_end(self, args, state, control, model, **_):
        self.orders.append(model.trained[:])
        model.trained.clear()

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **_):
        self.gradients.append(model.weight.grad.item())
        self.rates.append(optimizer.param_groups[0]["lr"])


def trainer(train=100, validate=37, net=None, **settings):
    net, notes, counted = net or Net(), Notes(), []
    data = [[{"x": i, "labels": i} for i in range(count)] for count in (train, validate)]
    made = Trainer(
        net,
        TrainingArguments("trainer", **{**QUIET, **settings}),
        train_dataset=data[0],
        eval_dataset=data[1],
        compute_metrics=lambda found: counted.append(len(found.label_ids)) or {},
        callbacks=[notes],
    )
    made.notes, made.counted = notes, counted
    return made


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def order_with(seed):
    made = trainer(seed=seed)
    made.train()
    return made.notes.orders[0]


def facts():
    found = {"alone": TrainingArguments("trainer").world_size == 1}
    made = trainer(num_train_epochs=2, save_strategy="epoch")
    loader = made.get_train_dataloader()
    found["batch"], found["steps"] = len(next(iter(loader))["x"]), len(loader)
    made.train()
    steps = made.state.global_step
    found["schedule"] = made.lr_scheduler.last_epoch / steps
    found["falls"] = made.notes.rates[-1] < 0.1 * made.notes.rates[0]
    one, other = everywhere(made.notes.orders)
    found["trained"] = len(one[0] + other[0])
    found["new_order"] = one[0] != one[1]
    found["random_differs"] = len({*everywhere(made.model.random[0])}) > 1
    found["own_mean"] = len({*everywhere(made.model.norm.running_mean.item())}) > 1
    again = trainer(num_train_epochs=2)
    again.train(resume_from_checkpoint=f"trainer/checkpoint-{steps // 2}")
    found["resumed"] = made.notes.orders.index(again.notes.orders[-1])
    found["seed_counts"] = order_with(0) != order_with(1)

    made = trainer(dataloader_drop_last=True)
    made.evaluate()
    found["dropped"] = made.counted[0]
    made = trainer()
    rank = float(os.environ["RANK"])
    made.model.norm.running_mean.fill_(rank)  # as after steps on other images
    made.evaluate()
    found["validated"] = made.counted[0]
    found["sent_mean"] = everywhere(made.model.norm.running_mean.item()) != [0, 1]
    seen = everywhere(made.model.validated)
    found["validates_all"] = {*seen[0], *seen[1]} == {*range(37)}

    made = trainer(train=64, gradient_accumulation_steps=4, max_grad_norm=0)
    made.train()
    assert made.state.global_step == 1
    found["gradient"] = made.notes.gradients[0] / 4  # of each part
    found["clips"] = TrainingArguments("trainer").max_grad_norm
    found["prefix"] = all(key.startswith("module.") for key in made.model.state_dict())
    return found


if __name__ == "__main__":
    path = os.path.abspath(sys.argv[1])
    found = facts()
    if os.environ["RANK"] == "0":
        with open(path, "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
