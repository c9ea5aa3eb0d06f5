"""The parameters that a reducer sums: a change of what is trained is refused by name, or replicas would diverge."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from bigbatch.errors import CommError

FIELDS = ("requires_grad", "dtype", "shape", "device")
"""What must stay as it was when the reducer was made, in the order of _kind()."""
REMEDY = (
    "after a change of what is trained, close() the GradientReducer or DistributedOptimizer and make a new one, on all "
    "ranks alike"
)


class TrainedSet:
    """Holds the parameters that a reducer sums, by name, and the frozen ones that it was given with them.

    Raises: ValueError for two parameters of one name, one on another device than the ranks', or none to sum.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, device: torch.device) -> None:
        given = _by_name(named_parameters)
        self.parameters = {name: p for name, p in given.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError("there is no parameter to reduce: every one is frozen, or the iterator was used up")
        _require_device(self.parameters, device)
        self._kinds = {name: _kind(p) for name, p in self.parameters.items()}
        self._frozen = {name: p for name, p in given.items() if not p.requires_grad}
        _drop_gradients_of_frozen(given.values())

    def require_unchanged(self, names: Iterable[str] | None = None) -> None:
        """Compare host attributes of the parameters, or of those named: no collective, and no host sync.

        Raises: CommError naming a parameter that was frozen, unfrozen, cast, moved or resized since.
        """
        kinds = self._kinds
        changed = [name for name in names or kinds if _kind(self.parameters[name]) != kinds[name]]
        changed += [name for name, p in self._frozen.items() if p.requires_grad]
        if changed:
            raise CommError(f"{self._describe(changed)}: {REMEDY}")

    def _describe(self, changed: Sequence[str]) -> str:
        name = changed[0]
        if name in self._frozen:
            what = "requires_grad=True, which was False"
        else:
            pairs = zip(FIELDS, _kind(self.parameters[name]), self._kinds[name], strict=True)
            what = ", ".join(f"{field}={now}, which was {before}" for field, now, before in pairs if now != before)
        more = f" (and {len(changed) - 1} more changed)" if changed[1:] else ""
        return f"parameter {name} has {what} when its GradientReducer was made{more}"

    def close(self) -> None:
        """Drop the gradients of weights that are frozen by now."""
        _drop_gradients_of_frozen(self.parameters.values())


def _drop_gradients_of_frozen(parameters: Iterable[nn.Parameter]) -> None:
    """Optimizers skip parameters without a gradient; with one of zeros they go on by momentum and decay."""
    for parameter in parameters:
        if not parameter.requires_grad:
            parameter.grad = None


def _kind(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.requires_grad, parameter.dtype, parameter.shape, parameter.device


def _by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in named_parameters:
        if parameters.setdefault(name, parameter) is not parameter:
            raise ValueError(f"two parameters are named {name!r}; give each of several models a prefix of its own")
    return parameters


def _require_device(parameters: dict[str, nn.Parameter], device: torch.device) -> None:
    for name, p in parameters.items():
        if p.device != device:
            raise ValueError(
                f"parameter {name} is on {p.device}, but ranks communicate on {device}: call "
                "model.to(communicator.device) before making the reducer"
            )
