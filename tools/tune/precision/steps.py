"""Train a config for a few fp32 steps, and count its gradients by power of two. Collective.

One histogram gives underflow and overflow in fp16 at every loss scale: v times 2^s is below 2^p exactly if v is below
2^(p - s).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.errors import TuneError
from bigbatch.tools.tune.few_steps import few_steps
from bigbatch.trainer.config.schema import Config, with_values
from bigbatch.trainer.step.precision import grads_of, half_precision_parameters
from bigbatch.trainer.step.stop_request import Stopped

FP16_LEAST, FP16_NORMAL, FP16_OVERFLOW = -24, -14, 16
"""Exponents of fp16's smallest number, of its smallest normal number, and of the first power that overflows it."""
FP32_LEAST, FP32_OVERFLOW = -149, 128
NUM_BINS = FP32_OVERFLOW - FP32_LEAST + 2


@dataclass(frozen=True)
class Magnitudes:
    """Counts values v: first those that are 0, then 2^p <= |v| < 2^(p + 1) for each p of fp32, last inf and NaN."""

    counts: tuple[int, ...] = (0,) * NUM_BINS

    def __add__(self, other: "Magnitudes") -> "Magnitudes":
        return Magnitudes(tuple(map(add, self.counts, other.counts)))

    def underflow(self, *, scale_power: int) -> float:
        """Return the share of values that fp16 holds as 0 or as subnormal: underflow_fraction in a report."""
        return self._share_below(FP16_NORMAL - scale_power)

    def lost(self, *, scale_power: int) -> float:
        """Return the share of values that are below fp16's smallest number at this scale, but not 0 in fp32."""
        return self._share_below(FP16_LEAST - scale_power) - self._share_below(FP32_LEAST)

    def overflow(self, *, scale_power: int) -> float:
        """Return the share of values that are infinite in fp16 at this scale."""
        return 1.0 - self._share_below(FP16_OVERFLOW - scale_power) if any(self.counts) else 0.0

    def headroom(self, *, scale_power: int) -> int:
        """Return how many times all values may double before fp16 overflows; negative if it does."""
        largest = max((power for power, count in enumerate(self.counts[1:], FP32_LEAST) if count), default=FP32_LEAST)
        return FP16_OVERFLOW - scale_power - largest - 1

    def _share_below(self, power: int) -> float:
        return sum(self.counts[: power - FP32_LEAST + 1]) / max(1, sum(self.counts))


def sum_over_ranks(mine: Magnitudes, connection: Connection) -> Magnitudes:
    """Add up the counts of all ranks. Collective; the result is the same on all ranks."""
    return sum((Magnitudes(tuple(counts)) for counts in connection.gather(mine.counts)), Magnitudes())


def measure(tensors: Iterable[Tensor]) -> Magnitudes:
    """Count the values of fp32 tensors. Waits for the device."""
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)
    for tensor in tensors:
        sizes = tensor.detach().abs().flatten()
        bins = torch.frexp(sizes).exponent.long() - FP32_LEAST  # its fraction is at least 0.5: one power more than p
        bins = bins.masked_fill(sizes == 0, 0).masked_fill(~sizes.isfinite(), NUM_BINS - 1)
        counts += torch.bincount(bins, minlength=NUM_BINS).cpu()
    return Magnitudes(tuple(counts.tolist()))


FP32_VALUES = {
    "optimizer.precision": "fp32",
    "optimizer.loss_scale": None,
    "optimizer.loss_scale_growth_steps": None,
    "optimizer.sharded": False,
    "compute.compile": None,
    "compute.cuda_graph": False,
    "comm.wire_dtype": None,
    "comm.predivide": 1.0,
    "run.divergence_steps": None,
}


@dataclass
class Gradients:
    """Holds the counts of the gradients of all steps, and the loss of each step."""

    weights: Magnitudes = field(default_factory=Magnitudes)
    """Gradients, summed over ranks, of the weights that half precision rounds."""
    activations: Magnitudes = field(default_factory=Magnitudes)
    """Gradients of the outputs of convolutions and linear layers, on all ranks."""
    losses: list[float] = field(default_factory=list)


def count_gradients(
    config: Config, communicator: Communicator, *, num_steps: int, say: Callable[[str], None]
) -> Gradients:
    """Train for num_steps in fp32 and count the gradients. Raises: TuneError if one is not finite; Stopped."""
    found = Gradients()

    def count_activations(gradient: Tensor) -> None:
        found.activations += measure([gradient])

    def watch_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(count_activations)

    with few_steps(with_values(config, FP32_VALUES), communicator, num_steps=num_steps, say=say) as (parts, run):
        names = half_precision_parameters(parts.model).keys()
        for module in parts.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(watch_output)

        def after_step(done: int) -> None:
            masters = parts.precision.masters
            found.weights += measure(grads_of(masters[name] for name in masters if name in names))
            if found.weights.counts[-1]:  # inf or NaN; on all ranks alike: these are sums over ranks
                raise TuneError(f"a gradient of step {done} is not finite in fp32: lower schedule.base_lr")
            say(f"step {done} of {num_steps}")

        stopped_by = run(lambda record: found.losses.append(record["loss"]), after_step)
    if stopped_by:
        raise Stopped(stopped_by)
    found.activations = sum_over_ranks(found.activations, communicator.connection)
    return found
