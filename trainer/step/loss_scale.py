"""Loss scale of fp16, against underflow of small gradients: stored and updated on the device.

Source: Micikevicius et al. 2018, arXiv 1710.03740.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.config.optimizer import LARGEST_SCALE, SMALLEST_SCALE, nearest_scale

MAX_OVERFLOWS_IN_A_ROW = 32
"""24 halve the largest scale to the smallest; 8 are a margin. A skipped update leaves the weights unchanged, so later
steps are not more likely to succeed. If half of all steps overflow by chance, 32 in a row have probability 2e-10."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Initial scale, and steps without overflow after which it doubles; None: a static scale."""

    initial: float
    growth_steps: int | None

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if not (self.initial > 0 and self.initial == nearest_scale(self.initial)):
            raise ValueError(
                f"initial={self.initial!r} must be a power of two from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}, "
                "so that scaling rounds nothing"
            )
        if self.growth_steps is not None and self.growth_steps < 1:
            raise ValueError(f"growth_steps={self.growth_steps} must be at least 1; None keeps the scale")

    def make(self, device: torch.device) -> "LossScale":
        """Return a loss scale on the device."""
        return LossScale(self, device=device)


@dataclass(frozen=True, kw_only=True)
class ScaleState:
    """Scalars on the device, which LossScale updates in place."""

    scale: Tensor
    clean_steps: Tensor
    """Steps without overflow since the last change of the scale or the last overflow."""
    overflow_steps: Tensor
    """Skipped updates of the whole run."""
    overflows_in_a_row: Tensor


class LossScale:
    """Keeps the scale: static, or doubled after growth_steps steps without overflow and halved at each overflow."""

    def __init__(self, scaling: Scaling, *, device: torch.device) -> None:
        self._scaling = scaling
        self._device = device
        self.state = self._make_state(scale=scaling.initial, clean_steps=0, overflow_steps=0, overflows_in_a_row=0)

    def _make_state(self, *, scale: float, **counts: int) -> ScaleState:
        count = {name: torch.full((), value, device=self._device) for name, value in counts.items()}
        return ScaleState(scale=torch.full((), float(scale), device=self._device), **count)

    @property
    def divisor(self) -> Tensor:
        """Return the divisor of this step's gradients: a copy, because judge_ sets the scale of the next step."""
        return self.state.scale.clone()

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.state.scale

    def judge_(self, norm: Tensor, *, failed: Tensor) -> Tensor:
        """Return whether to skip (bool) a step whose scaled gradients have this norm; set the scale of the next step.

        failed (bool): the step is skipped, and the scale and its counts stay unchanged.
        """
        state, overflow = self.state, ~norm.isfinite()
        scale, clean_steps = state.scale, torch.where(overflow, 0, state.clean_steps + 1)
        if self._scaling.growth_steps is not None:
            grows = clean_steps >= self._scaling.growth_steps
            scale = torch.where(overflow, scale / 2, torch.where(grows, scale * 2, scale))
            scale = scale.clamp(SMALLEST_SCALE, LARGEST_SCALE)
            clean_steps = torch.where(grows, 0, clean_steps)
        for value, new in (
            (state.scale, scale),
            (state.clean_steps, clean_steps),
            (state.overflow_steps, state.overflow_steps + overflow),
            (state.overflows_in_a_row, torch.where(overflow, state.overflows_in_a_row + 1, 0)),
        ):
            # in place, because a captured step reads and writes these tensors
            value.copy_(torch.where(failed, value, new))
        return overflow | failed

    def figures(self) -> dict[str, float | None]:
        """Return the figures of a report. Waits for the device."""
        return {"loss_scale": float(self.state.scale), "overflow_steps": int(self.state.overflow_steps)}

    def require_progress(self, done: int, *, is_last: bool) -> None:
        """Raise TrainingDiverged if the last MAX_OVERFLOWS_IN_A_ROW steps, or all steps of a run, overflowed.

        Waits for the device.
        """
        num = int(self.state.overflows_in_a_row)
        if num < MAX_OVERFLOWS_IN_A_ROW and not (is_last and num == done):
            return
        scale = float(self.state.scale)
        lower = "" if scale == SMALLEST_SCALE else f"set optimizer.loss_scale below {scale:g}, "
        raise TrainingDiverged(
            f"the fp16 gradients of all steps from {done - num + 1} to {done} overflowed, at a loss scale of {scale:g} "
            f"now: {lower}lower schedule.base_lr, or set optimizer.precision to bf16 or fp32"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers. Waits for the device."""
        return {name: tensor.item() for name, tensor in asdict(self.state).items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what state_dict returned, unless empty; a static scale is the config's. Raises: ValueError."""
        if not saved:
            return
        if saved.keys() != asdict(self.state).keys():
            raise ValueError(f"its loss scale is of another version of bigbatch and has {', '.join(sorted(saved))}")
        kept = saved if self._scaling.growth_steps is not None else {**saved, "scale": self._scaling.initial}
        self.state = self._make_state(**kept)


def underflow_fraction(grads_half: Sequence[Tensor], *, sum_parts: Callable[[Tensor], Tensor]) -> float:
    """Return the share of elements below the smallest normal number (fp16: 2**-14), 0 included.

    sum_parts: counts in this rank's gradients -> counts in the whole gradients.
    """
    smallest = torch.finfo(grads_half[0].dtype).tiny
    num_small = torch.stack([(grad.abs() < smallest).sum() for grad in grads_half]).sum()
    num_all = torch.full_like(num_small, sum(grad.numel() for grad in grads_half))
    # fp64 counts exactly up to 2**53, fp32 only up to 2**24
    small, total = sum_parts(torch.stack([num_small, num_all]).double()).tolist()
    return float(small / total)
