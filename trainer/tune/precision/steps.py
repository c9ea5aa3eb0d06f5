"""A few steps of a config's own training, in which gradients are counted, or a choice is tried. Collective."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.build.few_steps import few_steps
from bigbatch.trainer.config.schema import Config, with_values
from bigbatch.trainer.step.masters import grads_of
from bigbatch.trainer.step.precision import halved
from bigbatch.trainer.step.stop_request import Stopped
from bigbatch.trainer.tune.precision.choices import Gradients
from bigbatch.trainer.tune.precision.magnitudes import Magnitudes, measure, of_all_ranks

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
class Counted:
    """Holds what the steps have shown, each of them and all together."""

    weights: list[Magnitudes] = field(default_factory=list)
    activations: list[Magnitudes] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_N: Tensor | None = None
    """Of the last step: of all weights that half precision would round, flat."""

    @property
    def gradients(self) -> Gradients:
        """Return all steps together."""
        return Gradients(sum(self.weights, Magnitudes()), sum(self.activations, Magnitudes()))


@dataclass
class Tried:
    """Holds the reports of a choice's steps."""

    losses: list[float] = field(default_factory=list)
    underflow: list[float] = field(default_factory=list)
    overflow_steps: int = 0
    loss_scale: float = 1.0

    def add(self, record: dict[str, Any]) -> None:
        """Take a report of the loop."""
        self.losses.append(record["loss"])
        if record["underflow_fraction"] is not None:
            self.underflow.append(record["underflow_fraction"])
        self.overflow_steps, self.loss_scale = record["overflow_steps"], record["loss_scale"]


def exact(config: Config) -> Config:
    """Return the config as it is measured: fp32, nothing compiled, gradients whole and as they are on every wire."""
    return with_values(config, EXACT)


def count_gradients(
    config: Config, communicator: Communicator, *, num_steps: int, say: Callable[[str], None]
) -> Counted:
    """Train some steps in fp32 and count their gradients: sums over ranks, and those of all ranks' activations."""
    counted = Counted()
    with few_steps(exact(config), communicator, num_steps=num_steps, say=say) as (parts, run):
        names = halved(parts.model).keys()
        in_step = Magnitudes()

        def count(gradient: Tensor) -> None:
            nonlocal in_step
            # one that is not finite makes the sums so, on which all ranks agree
            in_step += measure([gradient], must_be_finite=False)

        hooks = [module.register_forward_hook(_with_gradient(count)) for module in _roundings(parts.model)]

        def after_step(done: int) -> None:
            nonlocal in_step
            grads = grads_of(master for name, master in parts.precision.masters.items() if name in names)
            counted.weights.append(measure(grads))
            counted.activations.append(in_step)
            in_step = Magnitudes()
            if done == num_steps:
                counted.gradient_N = torch.cat([grad.detach().flatten() for grad in grads])
            say(f"step {done} of {num_steps}: the largest gradient of a weight is {counted.weights[-1].largest:.2e}")

        _require_all(run(lambda record: counted.losses.append(record["loss"]), after_step))
        for hook in hooks:
            hook.remove()
    counted.activations = of_all_ranks(counted.activations, communicator)
    return counted


def try_choice(config: Config, communicator: Communicator, *, num_steps: int, say: Callable[[str], None]) -> Tried:
    """Train as many steps as the choice says. Raises: TrainingDiverged where no step does without overflow."""
    tried = Tried()
    with few_steps(config, communicator, num_steps=num_steps, say=say) as (_, run):
        _require_all(run(tried.add))
    return tried


def _roundings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose output is of half precision in such a run."""
    yield from (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))


def _with_gradient(count: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(count)

    return hook


def _require_all(stopped_by: str | None) -> None:
    if stopped_by:
        raise Stopped(stopped_by)
