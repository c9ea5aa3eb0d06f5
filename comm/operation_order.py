"""One order of operations on all ranks, whatever images a rank has: which sums go before an operation."""

import re
from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import ref
from zlib import crc32

import torch

from bigbatch.comm.backends.base import REMEDY
from bigbatch.comm.rendezvous.control import TensorSize
from bigbatch.errors import PeerLostError, add_note

NUM_COMPARED = 3
"""Steps of a reducer whose operations are always compared."""
MAX_LAST, MAX_AGREED = 100, 100
"""Names, and agreed orders, to remember."""
_STEP = re.compile(r" step \d+")
"""In a label, such as "report of step 20". Without it the same operations recur, and are compared once."""


class HoldsSums(Protocol):
    """A reducer: it starts sums during backward, at moments that depend on a rank's images."""

    def start_held(self) -> None:
        """Start the sums of this step that are not started, if backward has begun the step."""


class OperationOrder:
    """The open reducers of one connection, and the names of its operations since the last comparison.

    A reducer starts sums during backward only while it is the only one: with two, images that do not use one of them
    would change the order. Before any other operation it starts the sums that it holds, as other ranks did earlier.
    """

    def __init__(self, agree: Callable[..., None] | None = None) -> None:
        """agree: JobControl.agree, for a transport that does not notice other ranks' operations itself (NCCL)."""
        self._agree = agree
        self.is_compared = agree is not None
        self.has_one_reducer = False
        self._open: list[ref[HoldsSums]] = []
        """Reducers until close(). One that was forgotten counts: when it is freed may differ between ranks."""
        self._last: deque[str] = deque(maxlen=MAX_LAST)
        self._num_opened = self._num_names = self._hash = self._num_compared = 0
        self._agreed: dict[str, None] = {}

    def open(self, reducer: HoldsSums) -> str:
        """Return what its labels say after the buffer: reducers of equal models must have different labels."""
        self.start_held()
        self._open.append(ref(reducer))
        self.has_one_reducer = len(self._open) == 1
        self._num_opened += 1
        return f" of reducer {self._num_opened}" if self._num_opened > 1 else ""

    def close(self, reducer: HoldsSums) -> None:
        self._open = [each for each in self._open if each() is not reducer]
        self.has_one_reducer = len(self._open) == 1

    def start_held(self) -> None:
        """Start what the only reducer holds; not within backward, where other operations have their place."""
        if self.has_one_reducer and torch._C._current_graph_task_id() == -1 and (reducer := self._open[0]()):
            reducer.start_held()

    def note(self, label: str, size: TensorSize | None) -> None:
        """Note an operation of all ranks, for compare()."""
        if self._agree is not None:
            name = f"{_STEP.sub('', label)} {size}"
            self._last.append(name)
            self._num_names += 1
            self._hash = crc32(name.encode(), self._hash)

    def compare(self) -> None:
        """Compare the operations since the last call with those of the other ranks, in the first steps and if changed.

        Collective; only if is_compared: other transports compare each operation. Raises: CommError naming a rank.
        """
        assert self._agree is not None
        # the count last: the error shows the first line that differs
        text = "\n".join([*self._last, f"{self._num_names} operations, hash {self._hash:08x}"])
        self._last.clear()
        self._num_names = self._hash = 0
        if self._num_compared >= NUM_COMPARED and text in self._agreed:
            return
        try:
            self._agree("the operations of this step", text, remedy=REMEDY)
        except PeerLostError as error:  # perhaps the others started what they always start, and compare nothing
            add_note(error, f"this rank started operations that are new in a step: {REMEDY}")
            raise
        self._num_compared += 1
        self._agreed[text] = None
        if len(self._agreed) > MAX_AGREED:
            del self._agreed[list(self._agreed)[1]]
