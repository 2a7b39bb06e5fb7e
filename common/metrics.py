"""AverageMeter, the accuracy of a batch, and reduce_mean over all processes."""

import torch
import torch.distributed as dist


class AverageMeter:
    """The latest value of something and its running mean."""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, val, n=1):
        """Take in n observations whose mean is `val`."""
        self.add(float(val) * n, n)

    def add(self, total, n):
        """Take in n observations whose sum is `total`: without the rounding of a mean."""
        self.val = float(total) / n if n else self.val
        self.sum += float(total)
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.val:.3f} ({self.avg:.3f})"


@torch.no_grad()
def accuracy(output, target, topk=(1, 5)):
    """For each k, the percentage of rows whose target is among the k highest scores.

    output: scores [n, classes]; target: int64 [n], or float probabilities [n, classes] as mixup
    makes them, of which the most probable class counts. Returns a float64 scalar tensor for each k,
    on their device. With fewer than k classes it is top-`classes`. Raises ValueError for other
    shapes and, on CPUs, for float targets that are no probabilities; on GPUs each step would have
    to wait for that.
    """
    if output.ndim != 2 or target.ndim != 1 + target.is_floating_point():
        raise ValueError("scores [n, classes] and targets [n] are needed")
    if target.is_floating_point():
        if target.device.type == "cpu" and (target.sum(dim=1) - 1).abs().max() > 0.01:
            raise ValueError(
                "rows of float targets must sum to 1; several classes an image need "
                "BCEWithLogitsLoss and another score"
            )
        target = target.argmax(dim=1)
    k = min(max(topk), output.shape[1])
    hits = output.topk(k, dim=1).indices.eq(target.unsqueeze(1))
    return [hits[:, :k].sum(dtype=torch.float64) * 100 / len(target) for k in topk]


def reduce_mean(tensor, world_size):
    """The mean of a tensor over all processes. All of them must call it, not only rank 0.

    It passes no gradient. Of float64 and integers it is float64, of all else float32.
    """
    exact = tensor.dtype == torch.float64 or not tensor.is_floating_point()
    tensor = tensor.detach().to(torch.float64 if exact else torch.float32, copy=True)
    dist.all_reduce(tensor)
    return tensor / world_size
