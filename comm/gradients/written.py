"""Guards of sums over ranks: gradients that a script changes while they are summed, and torch.compile's tracing."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from bigbatch.errors import CommError

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Decorate a function that torch.compile must not trace: it would compile in the first step's version counters.

    Without the compiler, a slow import, nothing traces.
    """
    known: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not known and "torch._dynamo" in sys.modules:
            known.append(torch.compiler.disable(function, reason="it sums over ranks: compile the model alone"))
        return (known[0] if known else function)(*args, **options)

    return call  # type: ignore[return-value]


class WrittenVersions:
    """Versions of fusion buffers as backward left them. A later change races with the sum, even if that ended before.

    torch counts the changes of a tensor and its views, so gradients count for their buffer. Not noticed: changes
    through .data or NumPy.
    """

    def __init__(self) -> None:
        self._versions: list[int] | None = None
        self._backward = -1
        self._changed: dict[int, None] = {}

    def start_over(self) -> None:
        """Forget this step: until the next backward the script may change gradients."""
        self._versions, self._backward, self._changed = None, -1, {}

    def note_backward(self, index: int, buffers: Sequence[Tensor]) -> None:
        """Note that backward has written a buffer; a new backward also accepts what was changed before it."""
        backward = torch._C._current_graph_task_id()
        if self._versions is None or backward != self._backward:
            self._versions, self._backward = versions(buffers), backward
        self._versions[index] = buffers[index]._version

    def note_own(self, index: int, buffer_N: Tensor) -> None:
        """Note that the reducer itself has written a buffer."""
        if self._versions is not None:
            self._versions[index] = buffer_N._version

    def changed(self, buffers: Sequence[Tensor]) -> list[int]:
        """Return the indices of all buffers that the script has changed in this step."""
        for index, buffer_N in enumerate(buffers):
            self.check(index, buffer_N)
        return [*self._changed]

    def check(self, index: int, buffer_N: Tensor) -> None:
        """Note whether the script has changed a buffer; called before the reducer writes it."""
        if self._versions is not None and self._versions[index] != buffer_N._version:
            self._changed[index] = None


def versions(buffers: Sequence[Tensor]) -> list[int]:
    """Return how often each buffer was changed."""
    return [buffer_N._version for buffer_N in buffers]


def was_written(lost: Sequence[str], changed: Sequence[str]) -> CommError:
    """Return the error for gradients that the script has replaced since backward, or changed in a buffer."""
    what = f"gradient {lost[0]} was replaced" if lost else f"gradients of {changed[0]} were changed"
    return CommError(
        f"{what} between backward and wait() or synchronize(), which sum them over the ranks: clip, unscale or "
        "change gradients after it, or set is_active = False before backward"
    )
