"""Hugging Face's Trainer: it has the loop; torchrun starts it, and DDP is its own.

$ torchrun --standalone --nproc-per-node=2 minimal/libraries/with_trainer.py
"""

import os

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

EPOCHS = 5
BATCH_SIZE = 64  # images in a step, over all processes: a multiple of their number


def build_net():  # takes images, float32 [n, 1, 8, 8]; gives a score for each digit, [n, 10]
    conv = nn.Sequential(nn.Conv2d(1, 64, kernel_size=3), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(64 * 6 * 6, 10))


class WithLoss(nn.Module):  # Trainer asks the model for the loss
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images, labels):
        output = self.net(images)
        return nn.functional.cross_entropy(output, labels), output


class Report(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, model, **kwargs):
        if state.is_world_process_zero:
            print(f"epoch {state.epoch - 1:.0f}: {100 * metrics['eval_correct']:.1f} % correct")
            torch.save(model.net.state_dict(), "digits.pth")


def collate(items):
    images, target = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(target)}


def correct(found):  # of all processes, without repeated images
    return {"correct": (found.predictions.argmax(axis=1) == found.label_ids).mean()}


def main():
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    if BATCH_SIZE % world_size:
        raise SystemExit(f"BATCH_SIZE {BATCH_SIZE} must be a multiple of {world_size} (processes)")

    digits = load_digits()  # 1797 images, values from 0 to 16; every fifth is for validation
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train_set = Subset(dataset, [i for i in range(1797) if i % 5 < 4])
    val_set = Subset(dataset, range(4, 1797, 5))
    if len(train_set) < BATCH_SIZE:
        raise SystemExit(f"{len(train_set)} images, BATCH_SIZE {BATCH_SIZE}: no step in an epoch")

    torch.manual_seed(0)
    net = WithLoss(build_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    args = TrainingArguments(
        "trainer",  # the folder of its checkpoints
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE // world_size,
        per_device_eval_batch_size=BATCH_SIZE,
        lr_scheduler_type="constant",  # by default it falls to 0
        max_grad_norm=0,  # by default gradients are clipped to 1
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        net,
        args,
        data_collator=collate,
        train_dataset=train_set,
        eval_dataset=val_set,
        compute_metrics=correct,
        callbacks=[Report()],
        optimizers=(optimizer, None),
    )
    trainer.train()


if __name__ == "__main__":
    main()
