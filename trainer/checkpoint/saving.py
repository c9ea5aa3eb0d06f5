"""Save a run: collect the state, check it on all ranks, write a copy during training, report when it is on disk."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.awake import awake_seconds, wait_awake
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.limits import LEAVE_SECONDS
from bigbatch.errors import LOST, CheckpointError, NotFinite
from bigbatch.parts import load
from bigbatch.trainer.checkpoint import class_names
from bigbatch.trainer.checkpoint.checkpoint import checkpoint_path, save_checkpoint
from bigbatch.trainer.checkpoint.sums import describe_sums
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.folder.owner import Owner
from bigbatch.trainer.folder.ownership import write_on_first
from bigbatch.trainer.machine.host import is_out_of_memory
from bigbatch.trainer.step.plan import Parts


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
    """Return the copy, or a CheckpointError if there is no memory for it."""
    try:
        return copy_to_host(state)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return CheckpointError(
            f"cannot copy the state for {name}: the host that writes it needs as much memory as it takes on disk"
        )


class BackgroundWrite:
    """Copies a state, and writes the copy on a daemon thread: the end of the process does not wait for it.

    write(copy, require_wanted) must call require_wanted before it renames the written files to their final name: that
    raises RuntimeError after abandon(). Without memory for the copy, error is a CheckpointError.
    """

    def __init__(
        self, state: Any, write: Callable[[Any, Callable[[], None]], object], *, name: str, started: float
    ) -> None:
        """Start the write. name: names the state in messages. started: awake_seconds() from which the time counts."""
        self.started, self.seconds = started, 0.0
        """Duration, once the write has ended."""
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
        except BaseException as error:  # collect() raises it
            self.error = error
        self.seconds = awake_seconds() - self.started

    def ends_within(self, seconds: float) -> bool:
        """Wait at most this long for the write; return whether it has ended."""

        def joined(left: float) -> bool:
            self._thread.join(left)
            return not self._thread.is_alive()

        return wait_awake(joined, max(0.0, seconds))

    def abandon(self) -> None:
        """Abandon the write: its thread removes the files, if the process lives long enough."""
        self._is_wanted = False

    @property
    def is_awaited(self) -> bool:
        return self._is_wanted and self._thread.is_alive()


REPLY_SECONDS = 5.0
"""After a checkpoint's time limit, rank 0 has this long to tell the other ranks that it timed out."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and the seconds since the call that started it."""

    step: int
    path: Path
    seconds: float


class CheckpointSaver:
    """Saves a run's checkpoints: rank 0 writes them during training, one at a time.

    owner: of the run folder, on rank 0. digests: of the splits, by key of the state. classes: names by label, if any.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        communicator: Communicator,
        *,
        owner: Owner | None,
        digests: Mapping[str, str | None],
        classes: Sequence[str] | None = None,
    ) -> None:
        self._config, self._parts, self._communicator = config, parts, communicator
        self._config_text = dump_config(config)
        self._owner, self._digests, self._classes = owner, digests, classes
        self._checkpoints = RunDir(Path(config.run.directory)).checkpoints
        is_alone = communicator.world_size == 1
        self._is_comparing = not is_alone and config.run.compare_every_steps > 0
        self._is_agreed = is_alone or self._is_comparing
        self._step: int | None = None
        """Step of the checkpoint being written, equal on all ranks; None if all are on disk."""
        self._write: BackgroundWrite | None = None

    def compare(self, *, done: int) -> None:
        """Compare the replicas of all ranks, if configured. Collective. Raises: ReplicasDiffer."""
        if self._is_comparing:
            load("bigbatch.trainer.observe.replicas.compare")(self._parts, self._communicator, done=done)

    def start(
        self, *, done: int, top1: float | None, evaluations: list[dict[str, Any]], skipped: dict[str, str]
    ) -> None:
        """Start to write the checkpoint after so many steps; collect() reports when it is on disk. Collective.

        The previous one must be collected. Rank 0 copies the state to host memory first.
        Raises: NotFinite if weights, optimizer state or running statistics are not finite; ReplicasDiffer.
        """
        assert self._step is None
        started = awake_seconds()
        self._require_sound(done=done)
        with self._state(done=done, evaluations=evaluations, skipped=skipped) as state:
            self._step = done
            if self._communicator.rank == 0:
                name = f"checkpoint {checkpoint_path(self._checkpoints, step=done)}"
                save = partial(self._save, step=done, top1=top1)
                self._write = BackgroundWrite(state, save, name=name, started=started)

    def _require_sound(self, *, done: int) -> None:
        """Check that the state is finite, and equal on all ranks if configured. Collective. Raises: as start."""
        parts = self._parts
        if not parts.precision.all_finite([parts.precision.masters]):  # equal bits on all ranks give equal results
            raise NotFinite(
                f"the update of step {done} left weights that are not finite, which are not saved: lower "
                "schedule.base_lr or lengthen schedule.warmup_epochs"
            )
        self.compare(done=done)
        if not parts.precision.all_finite(parts.optimizer.state.values()):
            # with an infinite mean of squares all further updates are 0, while the loss looks normal
            raise NotFinite(
                f"the updates up to step {done} left state of the optimizer that is not finite, which is not saved: "
                "gradients overflowed; lower schedule.base_lr, lengthen schedule.warmup_epochs, or set "
                "optimizer.clip_norm"
            )
        if not bool(parts.statistics.running_N.isfinite().all()):  # equal on all ranks
            raise NotFinite(
                f"the forwards up to step {done} left running statistics of batch norm that are not finite, which are "
                "not saved: activations overflowed; lower schedule.base_lr or lengthen schedule.warmup_epochs"
            )

    def copy_state(self, *, done: int, evaluations: list[dict[str, Any]], skipped: dict[str, str]) -> dict[str, Any]:
        """Return a copy of the state after so many steps, in host memory. Collective only if the update is sharded."""
        with self._state(done=done, evaluations=evaluations, skipped=skipped) as state:
            copied: dict[str, Any] = copy_to_host(state)
        return copied

    @contextmanager
    def _state(
        self, *, done: int, evaluations: list[dict[str, Any]], skipped: dict[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the complete state; the caller copies it. Collective only if the update is sharded."""
        parts, is_sharded = self._parts, self._config.optimizer.sharded
        with parts.evaluation_weights() as in_training:
            yield {
                "step": done,
                "config": self._config_text,
                "model": parts.precision.model_state(),
                "in_training": in_training,
                "optimizer": parts.optimizer.state_dict(),
                "precision": parts.precision.state_dict(),
                "average": parts.average_state(done),
                "evaluations": evaluations,
                "gradient_order": "\n".join(parts.reducer.order),
                "sums": describe_sums(self._communicator, parts.reducer.plan, is_sharded=is_sharded),
                **self._digests,
                class_names.KEPT_AS: class_names.to_keep(self._classes),
                "skipped": dict(skipped),
            }

    def collect(self, *, wait: bool) -> Saved | None:
        """Return the started checkpoint once it is on disk; None if it is still being written or none was started.

        Collective. wait: wait for it. All ranks fail if it takes longer than run.checkpoint_timeout_seconds.
        Raises: as write_on_first; CheckpointError.
        """
        if self._step is None:
            return None
        step = self._step
        seconds = write_on_first(
            lambda: self._say(wait=wait),
            self._communicator.connection.control,
            what=f"checkpoint of step {step}",
            timeout_seconds=self._config.run.checkpoint_timeout_seconds + REPLY_SECONDS,
        )
        if not seconds:
            return None
        self._step = self._write = None
        return Saved(step, checkpoint_path(self._checkpoints, step=step), float(seconds))

    def close(self, exit_code: int) -> None:
        """After a failure, wait at most LEAVE_SECONDS for the checkpoint being written. Not collective.

        If the job heals, wait at most half of comm.timeout_seconds, because the other ranks wait meanwhile.
        """
        if self._write and self._write.is_awaited:
            communicator, seconds = self._communicator, LEAVE_SECONDS
            if exit_code == LOST and communicator.connection.endpoints is not None:  # healing releases the connection
                seconds = min(seconds, communicator.connection.control.timeout_seconds / 2)
            else:
                communicator.connection.abort(exit_code)  # first: the other ranks must not wait for it
            if not self._write.ends_within(seconds):
                self._write.abandon()

    def _say(self, *, wait: bool) -> str:
        """Return, on rank 0, how long the write took; "" if it has not ended. Raises: the write's error."""
        write, limit = self._write, self._config.run.checkpoint_timeout_seconds
        assert write is not None
        assert self._step is not None
        left = limit - (awake_seconds() - write.started)
        if not write.ends_within(left if wait else 0.0):
            if not wait and left > 0:
                return ""
            write.abandon()
            path = checkpoint_path(self._checkpoints, step=self._step)
            raise CheckpointError(
                f"checkpoint {path} is not on disk after {limit:g} s: find out why the storage is so "
                "slow, or set run.checkpoint_timeout_seconds to more"
            )
        if write.error is not None:
            raise write.error
        return repr(write.seconds)

    def _save(
        self, state: dict[str, Any], require_wanted: Callable[[], None], *, step: int, top1: float | None
    ) -> None:
        def require() -> None:
            require_wanted()
            if self._owner:
                self._owner.require_ownership()

        require()
        save_checkpoint(
            self._checkpoints,
            state,
            step=step,
            top1=top1,
            keep=self._config.run.keep_checkpoints,
            is_agreed=self._is_agreed,
            before_naming=require,
        )
