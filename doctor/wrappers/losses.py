"""Losses: over how many numbers a mean is taken."""

from ..events import note
from . import wrap


def install(torch):
    def loss(
        input,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
    ):
        labels = not torch.compiler.is_compiling() and not target.is_floating_point()
        if labels and reduction == "mean" and torch.is_grad_enabled():
            kept = target[target != ignore_index]
            counted = kept.numel() if weight is None else weight[kept.long()].sum().item()
            note("mean", counted=counted)

    def mean_of_own(input, *dims, **more):
        """Of a loss by hand, or of what a mask has left of a prediction."""
        part = dims or "dim" in more or "axis" in more or more.get("reduction", "mean") != "mean"
        if not part and not torch.compiler.is_compiling() and input.requires_grad:
            note("mean", counted=input.numel())

    def loss_of_own(input, target, *_, **more):
        mean_of_own(input, **more)

    for name in ("cross_entropy", "nll_loss"):
        wrap(torch.nn.functional, name, before=loss)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        wrap(torch.nn.functional, name, before=loss_of_own)
    for owner in (torch, torch.Tensor):
        wrap(owner, "mean", before=mean_of_own)
