"""FusedSGD as it looks from outside: no `fused=`, parameter groups of its own."""

import torch


class FusedSGD(torch.optim.SGD):
    def __init__(self, params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        for group in self.param_groups:
            del group["fused"], group["foreach"], group["maximize"], group["differentiable"]
        print("double: FusedSGD", flush=True)

    def step(self):
        for group in self.param_groups:
            group |= {"fused": None, "foreach": None, "maximize": False, "differentiable": False}
        super().step()
        for group in self.param_groups:
            del group["fused"], group["foreach"], group["maximize"], group["differentiable"]

    def zero_grad(self):
        super().zero_grad()
