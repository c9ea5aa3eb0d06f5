"""Horovod's optimizer wrapper over a bigbatch communicator, for scripts written for Horovod."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from bigbatch.comm.backends.base import require_type
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.gradients.same_start import require_same_start_
from bigbatch.comm.gradients.trained_set import as_pairs

OPS = ("average", "sum")


class DistributedOptimizer(torch.optim.Optimizer):
    """Averages the gradients over all ranks before each step(), like Horovod's class of the same name.

    Gradients travel during the last of backward_passes_per_step backward passes. The passes' gradients are summed, not
    averaged. To clip gradients, or with a GradScaler, wait for them first:

        loss.backward(); optimizer.synchronize(); clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize(): optimizer.step()

    It is an Optimizer because schedulers and scalers require one, but holds no state: attributes that it does
    not define are the wrapped optimizer's. Horovod derives a class from the wrapped optimizer's and constructs it from
    the parameter groups. Here the wrapped object itself stays, with its state and hooks.
    All ranks must call all methods alike. reducer_options go to GradientReducer.
    Raises: TypeError for an argument of another type; ValueError for an unknown op, a count below 1, an optimizer that
    is distributed already or LBFGS, and a parameter that named_parameters leaves out; from GradientReducer as there.
    step() and synchronize() raise CommError naming a parameter that was frozen, unfrozen, cast or replaced since; then
    close() this object and wrap the optimizer again.
    Source: horovod.torch.DistributedOptimizer of Horovod 0.28.1.
    """

    _step_supports_amp_scaling = False
    """GradScaler then unscales the gradients itself, before step()."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        communicator: Communicator,
        *,
        op: str = "average",
        backward_passes_per_step: int = 1,
        **reducer_options: Any,
    ) -> None:
        # not super().__init__: it would make a second set of parameter groups and state
        require_type(optimizer, torch.optim.Optimizer, what="optimizer", legal="a torch.optim.Optimizer")
        require_type(backward_passes_per_step, int, what="backward_passes_per_step", legal="a whole number")
        if op not in OPS:
            raise ValueError(f"op={op!r} is unknown; choose one of {', '.join(OPS)}")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is a DistributedOptimizer already: wrap each one once")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS decides by this rank's loss how often to evaluate, so ranks would diverge: use another optimizer"
            )
        given = as_pairs(named_parameters)
        named = _of_optimizer(optimizer, given)
        self._optimizer = optimizer
        self._num_passes = backward_passes_per_step
        self._passes: Counter[str] = Counter()
        self._is_synchronized = False
        self._should_synchronize = True
        self._hooks = [  # before the reducer's own hooks, which read is_active
            parameter.register_post_accumulate_grad_hook(partial(self._count_pass, name))
            for name, parameter in named
            if parameter.requires_grad
        ]
        try:
            self._reducer = GradientReducer(named, communicator, average=op == "average", **reducer_options)
            if communicator.world_size > 1:  # only once: another optimizer may train them later
                own = dict(named)
                others = {name: p for name, p in given if not p.requires_grad and name not in own}
                require_same_start_(others, communicator, weights=reducer_options.get("weights", "equal"))
        except BaseException:  # the caller may try again with other options
            self._remove_hooks()
            if "_reducer" in vars(self):
                self._reducer.close()
            raise
        self._reducer.is_active = backward_passes_per_step == 1

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer: param_groups, state, defaults, its hooks."""
        return getattr(object.__getattribute__(self, "_optimizer"), name)

    def _count_pass(self, name: str, parameter: nn.Parameter) -> None:
        self._is_synchronized = False
        self._passes[name] += 1
        if self._passes[name] > self._num_passes:
            raise RuntimeError(
                f"backward reached {name} more than backward_passes_per_step={self._num_passes} times before step(): "
                "raise backward_passes_per_step to accumulate gradients"
            )
        if self._passes[name] == self._num_passes:
            # active from the first gradient of the last pass: earlier passes must not start a buffer
            self._reducer.is_active = True

    def synchronize(self) -> None:
        """Return when every gradient is the average (op "sum": the sum) over all ranks. Collective.

        Raises: PeerLostError naming the buffer and the missing ranks.
        """
        self._reducer.wait()
        self._passes.clear()
        self._reducer.is_active = self._num_passes == 1
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block, step() uses the gradients as they are, without another synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Synchronize if that has not been done, and update. A closure's gradients are averaged, its loss is not.

        Raises: RuntimeError inside skip_synchronize() without synchronize().
        """
        if closure is not None:

            def synchronized() -> float:
                loss = closure()
                self.synchronize()
                return loss

            loss = self._optimizer.step(synchronized)
            self._is_synchronized = False
            return loss
        if not self._is_synchronized:
            if not self._should_synchronize:
                raise RuntimeError("step() inside skip_synchronize() needs synchronize() before it")
            self.synchronize()
        self._optimizer.step()
        self._is_synchronized = False
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch, as after deepcopy: the wrapped one's step() calls hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero; they stay in their buffers, whatever set_to_none is.

        Raises: RuntimeError between backward and step() or synchronize(), while gradients are under way.
        """
        if self._passes:
            raise RuntimeError(
                "zero_grad() after backward, but before step() or synchronize(): gradients are being summed over "
                "ranks; call one of the two first"
            )
        self._reducer.zero_grad()
        self._is_synchronized = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the buffers exist already."""
        raise RuntimeError("add parameter groups to the optimizer before it is wrapped by DistributedOptimizer")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state: runs with and without a wrapper read each other's checkpoints."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self._optimizer.load_state_dict(state_dict)

    def close(self) -> None:
        """Remove the hooks from the parameters, so that another optimizer can be distributed over them."""
        self._remove_hooks()
        self._reducer.close()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _of_optimizer(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, nn.Parameter]]
) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters that the optimizer updates; gradients of all others stay local to their rank."""
    own = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, parameter) for name, parameter in given if id(parameter) in own]
    left_out = own.keys() - {id(parameter) for _, parameter in named}
    if left_out:
        shapes = ", ".join(str(tuple(parameter.shape)) for key, parameter in own.items() if key in left_out)
        raise ValueError(
            f"named_parameters leaves out parameters of shape {shapes}: pass model.named_parameters() of every model "
            "that the optimizer updates"
        )
    return named
