"""Write checkpoints beside training: a copy of the state, and a thread that writes it."""

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.awake import awake_seconds, wait_awake
from bigbatch.errors import CheckpointError
from bigbatch.trainer.machine.memory import is_out_of_memory


def copy_to_host(state: Any) -> Any:
    """Return a copy of a state of dicts, lists and tensors in host memory.

    Tensors that share memory also share it in the copy, so both take the same memory. Synchronizes with a GPU.
    """
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def host_copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in storages:
            storages[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.empty(0, dtype=tensor.dtype).set_(storages[key], *place)

    def copied(value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            return host_copy(value.detach())
        if type(value) is dict:
            return {key: copied(each) for key, each in value.items()}
        if type(value) is list:
            return [copied(each) for each in value]
        # other values of foreign optimizers
        return copy.deepcopy(value)

    return copied(state)


def _copied(state: Any, *, name: str) -> Any:
    """Return the copy, or the CheckpointError that says that there is no memory for it."""
    try:
        return copy_to_host(state)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return CheckpointError(
            f"cannot copy the state for {name}: the host that writes it needs as much memory as it takes on disk"
        )


class BackgroundWrite:
    """Copies a state, and writes the copy on a thread of its own. The process may end before it does.

    write is called with the copy, and with a function that it asks before what it wrote gets its name: that raises
    RuntimeError if nothing waits for the write any more. Without memory for the copy, error is a CheckpointError.
    """

    def __init__(
        self, state: Any, write: Callable[[Any, Callable[[], None]], object], *, name: str, started: float
    ) -> None:
        """Begin. name: what is written. started: since when seconds count, by awake_seconds()."""
        self.started, self.seconds = started, 0.0
        """Duration after the end."""
        self.error: BaseException | None = None
        self._is_wanted = True
        self._thread = Thread(target=self._run, args=(_copied(state, name=name), write), name=name, daemon=True)
        self._thread.start()

    def _run(self, copied: Any, write: Callable[[Any, Callable[[], None]], object]) -> None:
        def require_wanted() -> None:
            if not self._is_wanted:
                raise RuntimeError("the run has ended meanwhile")

        try:
            if isinstance(copied, CheckpointError):
                raise copied
            write(copied, require_wanted)
        except BaseException as error:  # settle() raises it
            self.error = error
        self.seconds = awake_seconds() - self.started

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long; return whether it has ended."""

        def joined(left: float) -> bool:
            self._thread.join(left)
            return not self._thread.is_alive()

        return wait_awake(joined, max(0.0, seconds))

    def abandon(self) -> None:
        """Abandon the write: its files are removed, if the process lives long enough."""
        self._is_wanted = False

    @property
    def is_awaited(self) -> bool:
        """Return whether it is still running and not abandoned."""
        return self._is_wanted and self._thread.is_alive()
