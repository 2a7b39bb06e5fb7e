"""DataParallel: one process, and a thread per GPU.

$ python minimal/dataparallel.py
"""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset

EPOCHS = 5
BATCH_SIZE = 64  # images in a step


def build_net():  # takes images, float32 [n, 1, 8, 8]; gives a score for each digit, [n, 10]
    conv = nn.Sequential(nn.Conv2d(1, 64, kernel_size=3), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(64 * 6 * 6, 10))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    digits = load_digits()  # 1797 images, values from 0 to 16; every fifth is for validation
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train_set = Subset(dataset, [i for i in range(1797) if i % 5 < 4])
    val_set = Subset(dataset, range(4, 1797, 5))
    if len(train_set) < BATCH_SIZE:
        raise SystemExit(f"{len(train_set)} images, BATCH_SIZE {BATCH_SIZE}: no step in an epoch")
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE)

    net = build_net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = nn.DataParallel(net)  # each step copies net to all GPUs and splits the batch

    for epoch in range(EPOCHS):
        net.train()
        for images, target in train_loader:
            output = model(images.to(device))
            loss = nn.functional.cross_entropy(output, target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        net.eval()
        correct = torch.zeros(1, device=device)
        with torch.no_grad():
            for images, target in val_loader:
                output = net(images.to(device))
                correct += (output.argmax(dim=1) == target.to(device)).sum()
        print(f"epoch {epoch}: {100 * correct.item() / len(val_set):.1f} % correct")
        torch.save(net.state_dict(), "digits.pth")


if __name__ == "__main__":
    main()
