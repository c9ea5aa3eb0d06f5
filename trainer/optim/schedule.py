"""Learning rate as a pure function of the step: it has no state, so a resumed run computes the same rates.

Steps count from 0. In a warm-up of W steps, step s has base_lr * (s + 1) / W: MLPerf's linear warm-up from 0
(base_lr * global_step / W) without its first update, which has learning rate 0 and changes nothing.
After it, a schedule over T steps has gone the fraction (s + 1 - W) / (T - W), so that step W - 1 has base_lr
and the last step, T - 1, has end_lr. (MLPerf's decay also starts from 1 but divides by T - W + 1, and so
stops just short of end_lr.) Steps before the first or after the last take its value.
Source: mlcommons/training, retired_benchmarks/resnet-tf1/official/resnet/resnet_run_loop.py, poly_rate_fn.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def polynomial(
    *, base_lr: float, warmup_steps: int, total_steps: int, power: float = 2.0, end_lr: float = 1e-4
) -> Schedule:
    """Return end_lr + (base_lr - end_lr) * (1 - fraction) ** power; MLPerf's rules for LARS fix these defaults."""
    return _warmup_then_decay(
        lambda fraction: (1 - fraction) ** power,
        base_lr=base_lr,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        end_lr=end_lr,
    )


def cosine(*, base_lr: float, warmup_steps: int, total_steps: int, end_lr: float = 0.0) -> Schedule:
    """Return half a cosine from base_lr to end_lr (Loshchilov and Hutter 2017, arXiv 1608.03983), no restarts."""
    return _warmup_then_decay(
        lambda fraction: 0.5 * (1 + math.cos(math.pi * fraction)),
        base_lr=base_lr,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        end_lr=end_lr,
    )


def one_cycle(*, base_lr: float, warmup_steps: int, total_steps: int, end_lr: float = 0.0) -> Schedule:
    """Return a linear rise to the peak base_lr and a linear fall to end_lr, as Page's ResNet-9 and FFCV use.

    It differs from torch's OneCycleLR, which by default follows cosines, starts above 0 and cycles the momentum too, as
    mirrored_momentum does.
    """
    return polynomial(base_lr=base_lr, warmup_steps=warmup_steps, total_steps=total_steps, power=1.0, end_lr=end_lr)


def cyclic(*, base_lr: float, cycle_steps: float, end_lr: float = 0.0, cycle_factor: float = 1.0) -> Schedule:
    """Return linear cycles from end_lr to base_lr and back, each with cycle_factor times the height of the one before.

    Smith 2017, arXiv 1506.01186: triangular with cycle_factor 1, triangular2 with 0.5. At step s, (s + 1) / cycle_steps
    cycles are done, so that the last step of a cycle has end_lr, and the first step of the run a higher rate.
    """
    if not cycle_steps >= 2:
        raise ValueError(f"a cycle must have at least 2 steps, not {cycle_steps}")

    def schedule(step: int) -> float:
        number, place = divmod((max(step, 0) + 1) / cycle_steps, 1.0)
        return end_lr + (base_lr - end_lr) * (1 - abs(2 * place - 1)) * cycle_factor**number

    return schedule


def mirrored_momentum(rate: Schedule, *, base_lr: float, high: float, low: float, lowest_lr: float = 0.0) -> Schedule:
    """Return a momentum that falls from high to low in proportion as the rate rises from lowest_lr to base_lr.

    Smith 2018, arXiv 1803.09820: large rates want a small momentum.
    """
    return lambda step: high - (high - low) * (rate(step) - lowest_lr) / (base_lr - lowest_lr)


def step_decay(*, base_lr: float, warmup_steps: int, milestone_steps: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Return base_lr * gamma ** (number of milestones reached); a milestone is the first step of the lower rate."""
    if list(milestone_steps) != sorted({m for m in milestone_steps if m >= warmup_steps}):
        raise ValueError(f"milestones must rise from warmup_steps {warmup_steps} on, not {list(milestone_steps)}")

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return base_lr * (max(step, 0) + 1) / warmup_steps
        return base_lr * gamma ** bisect_right(milestone_steps, step)

    return schedule


def _warmup_then_decay(
    shape: Callable[[float], float], *, base_lr: float, warmup_steps: int, total_steps: int, end_lr: float
) -> Schedule:
    """Warm up, then follow shape, which falls from 1 at fraction 0 to 0 at fraction 1."""
    if total_steps < 1 or warmup_steps > total_steps:
        raise ValueError(f"total_steps must be at least 1 and warmup_steps {warmup_steps}, not {total_steps}")

    def schedule(step: int) -> float:
        num_done = min(max(step, 0), total_steps - 1) + 1
        if num_done <= warmup_steps:
            return base_lr * num_done / warmup_steps
        return end_lr + (base_lr - end_lr) * shape((num_done - warmup_steps) / (total_steps - warmup_steps))

    return schedule
