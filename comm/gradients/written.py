"""Detect that a script changes gradients after backward, while they are summed over the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
