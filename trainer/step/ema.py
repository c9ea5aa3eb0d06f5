"""Moving average of the weights; evaluation uses it in place of the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def bounded_decay(decay: float, num_steps: int) -> float:
    """Return the decay of an average's n-th step: at most (1 + n) / (10 + n), a window of about n / 9 steps.

    So a short run is not evaluated with its first weights. Depends on n alone, so that a resumed run continues it.
    Source: num_updates of TensorFlow's tf.train.ExponentialMovingAverage.
    """
    return min(decay, (1 + num_steps) / (10 + num_steps))


class MovingAverage:
    """Computes average = decay * average + (1 - decay) * weights every every_steps; the first is a copy of the weights.

    decay: the upper limit, see bounded_decay; without warms_up the decay of each step. tensors: fp32 weights and
    running statistics of batch norm, by name; on_change is called after each exchange of their values. The average is
    updated even if the step before it was skipped for an overflow.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        decay: float,
        every_steps: int,
        on_change: Callable[[], None],
        warms_up: bool = True,
    ) -> None:
        self._names = list(tensors)
        self._tensors = list(tensors.values())
        self._average = [tensor.clone() for tensor in self._tensors]
        self._decay, self._warms_up = decay, warms_up
        self._every_steps = every_steps
        self._on_change = on_change

    @torch.no_grad()
    def update_(self, done: int, *, skip_1: Tensor) -> None:
        """Update the average after step done, if one is due; not if skip_1 (bool) is true. No host sync."""
        if done % self._every_steps:
            return
        if done == self._every_steps:  # also if skip_1 is true: the run uses nothing of a step that does not count
            torch._foreach_copy_(self._average, self._tensors)
            return
        decay = bounded_decay(self._decay, done // self._every_steps) if self._warms_up else self._decay
        share = torch.where(skip_1, 0.0, 1 - decay).view(())
        # a + share * (w - a): share is on the device, so that the host need not look at skip_1
        differences = torch._foreach_sub(self._tensors, self._average)
        torch._foreach_mul_(differences, share)
        torch._foreach_add_(self._average, differences)

    @contextmanager
    def in_place_of_weights(self, done: int) -> Iterator[None]:
        """Put the average into the model for the block; restore the bits of its own weights afterwards."""
        if done < self._every_steps:
            yield
            return
        own = [tensor.clone() for tensor in self._tensors]
        self._put_in_place(self._average)
        try:
            yield
        finally:
            self._put_in_place(own)

    @torch.no_grad()
    def _put_in_place(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._tensors, values)
        self._on_change()

    def state_dict(self, done: int) -> dict[str, Tensor]:
        """Return the average after step done, by name; empty before its first step."""
        return {} if done < self._every_steps else dict(zip(self._names, self._average, strict=True))

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what state_dict gave; if it is empty, start from the model's weights. Raises: ValueError."""
        if saved and saved.keys() != set(self._names):
            raise ValueError("its average has other weights than the model")
        values = [saved[name] for name in self._names] if saved else self._tensors
        for average, value in zip(self._average, values, strict=True):
            average.copy_(value)
