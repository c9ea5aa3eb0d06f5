"""Train a config for a few fp32 steps, and count its gradients by size. Collective."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.errors import TuneError
from bigbatch.trainer.build.few_steps import few_steps
from bigbatch.trainer.config.schema import Config, with_values
from bigbatch.trainer.step.masters import grads_of
from bigbatch.trainer.step.precision import halved
from bigbatch.trainer.step.stop_request import Stopped
from bigbatch.trainer.tune.precision.magnitudes import Magnitudes, measure, sum_over_ranks

EXACT = {
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
    """Counts the gradients of all steps, and holds the loss of each step."""

    weights: Magnitudes = field(default_factory=Magnitudes)
    """Gradients, summed over ranks, of the weights that half precision rounds."""
    activations: Magnitudes = field(default_factory=Magnitudes)
    """Magnitudes of the outputs of convolutions and linear layers, on all ranks."""
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

    with few_steps(with_values(config, EXACT), communicator, num_steps=num_steps, say=say) as (parts, run):
        names = halved(parts.model).keys()
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
    found.activations = sum_over_ranks(found.activations, communicator)
    return found
