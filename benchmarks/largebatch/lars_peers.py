"""LARS steps beside ours, and plain SGD as the floor. A missing package raises ImportError."""

from collections.abc import Callable
from typing import Any

import torch

from bigbatch.trainer.optim.lars import LARS

Groups = list[dict[str, Any]]
"""Like param_groups: decaying and adapting, then neither."""

LR, MOMENTUM, TRUST = 0.1, 0.9, 0.001


class LoopLARS(torch.optim.Optimizer):
    """LARS in the usual way: a Python loop with some ten kernels for each tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter, in place, with the learning rate in the momentum (lr_inside)."""
        for group in self.param_groups:
            for w in group["params"]:
                update = w.grad + group["weight_decay"] * w
                if group["adapt"]:
                    w_norm, g_norm = w.norm(), w.grad.norm()
                    ratio = TRUST * w_norm / (g_norm + group["weight_decay"] * w_norm)
                    update *= torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
                if w not in self.state:
                    self.state[w]["momentum_buffer"] = torch.zeros_like(w)
                buffer = self.state[w]["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(update, alpha=group["lr"])
                w.sub_(buffer)


def timm_lars(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    """Make timm's Lars; foreach defaults to timm's own choice."""
    from timm.optim.lars import Lars

    return Lars(groups, lr=LR, momentum=MOMENTUM, trust_coeff=TRUST, **settings)


def torch_optimizer_lars(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    """Make LARS of the package torch-optimizer, which took it from lightning-bolts."""
    from torch_optimizer import LARS as Peer

    return Peer(groups, lr=LR, momentum=MOMENTUM, trust_coefficient=TRUST, **settings)


def apex_larc(groups: Groups) -> torch.optim.Optimizer:
    """Make apex's LARC, as before its removal in May 2025; it adapts bias and batch norm, too."""
    from apex.optimizers import FusedSGD
    from apex.parallel.LARC import LARC

    return LARC(FusedSGD(groups, lr=LR, momentum=MOMENTUM), trust_coefficient=TRUST, clip=False)


def sgd(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    """Make SGD, without norms and ratios: the floor."""
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, **settings)


MAKERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "bigbatch": lambda groups: LARS(groups, lr=LR),
    "timm": timm_lars,
    "timm_foreach": lambda groups: timm_lars(groups, foreach=True),
    "torch_optimizer": torch_optimizer_lars,
    "loop": lambda groups: LoopLARS(groups, {"lr": LR, "momentum": MOMENTUM}),
    "apex_larc": apex_larc,
    "sgd_fused": lambda groups: sgd(groups, fused=True),
    "sgd_foreach": lambda groups: sgd(groups, foreach=True),
}
