"""The process groups of torch.distributed that one connection makes and destroys; a script may have others."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bigbatch.comm.backends.base import Group
from bigbatch.comm.rendezvous.environ import ProcessEnv, without_torch_watchdog
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.limits import VERDICT_SECONDS
from bigbatch.errors import CommError, first_line

_own_defaults: set[Any] = set()
"""Default process groups that were made here."""
_default_users: "WeakKeyDictionary[ProcessGroups, Any]" = WeakKeyDictionary()
"""Open connections that use a default process group -> that group."""


class ProcessGroups:
    """Makes the groups of a connection, each once, over NCCL on a GPU, or over gloo (gpu: None).

    Over NCCL the world is the default group if the script has made none. Otherwise it is a new group: gloo's operations
    must not mix with those of a script or DDP. Collective: every rank makes the same groups in the same order.
    """

    def __init__(self, env: ProcessEnv, control: JobControl, *, gpu: torch.device | None) -> None:
        self._rank, self._everyone = env.rank, tuple(range(env.world_size))
        self._control, self._gpu, self._library = control, gpu, "gloo" if gpu is None else "nccl"
        # an error of torch's must come after bigbatch's
        self.timeout = timedelta(seconds=control.timeout_seconds + (0.0 if gpu is None else VERDICT_SECONDS))
        self._handles: dict[tuple[int, ...], Any] = {}
        self._num_inits = 0
        self._abort_lock = Lock()
        self._abort_error: RuntimeError | None = None

    def make_world(self) -> Group:
        """Make the group of all ranks."""
        if not dist.is_initialized():
            self._init_torch()
        self._handles[self._everyone] = _default_users.get(self) or self._make(self._everyone)
        return Group(self._everyone, self._handles[self._everyone])

    def make(self, families: Sequence[Sequence[int]]) -> Group:
        """Make the groups that do not exist; return this rank's. torch needs every rank to make all of them."""
        missing = [ranks for ranks in map(tuple, families) if ranks not in self._handles]
        if missing and self._library == "nccl" and _bound_gpu() is not None:
            self._handles |= dict.fromkeys(missing, self._split(missing))
        else:
            self._handles |= {ranks: self._make(ranks) for ranks in missing}
        mine = next((tuple(ranks) for ranks in families if self._rank in ranks), None)
        return Group(mine, self._handles[mine]) if mine else Group((self._rank,))

    def abort(self) -> None:
        """End the operations of all groups, without the other ranks. NCCL's groups are destroyed, too."""
        if self._library == "nccl":
            with self._abort_lock:
                own, default = self._own(), _default_users.get(self)
                self._handles.clear()
                if default is not None:
                    _default_users.clear()
                    _own_defaults.clear()
                # all in one call: NCCL may deadlock if one is aborted while another waits (pytorch 119797)
                for handle in own if default is None else (None,):
                    try:
                        dist.distributed_c10d._abort_process_group(handle)
                    except RuntimeError as error:
                        self._abort_error = error
            return
        for handle in self._own():
            with suppress(RuntimeError):
                handle.abort()

    def require_aborted(self) -> None:
        """Raise CommError if an abort has failed: torch then keeps groups, and NCCL's list of calls stays open."""
        if (error := self._abort_error) is not None:
            raise CommError(f"NCCL's groups cannot be aborted: {first_line(error)}") from error

    def destroy_own(self) -> None:
        """Destroy all groups but the default one, so that they can be made again."""
        for handle in reversed(self._own()):  # NCCL's parts before the whole
            dist.destroy_process_group(handle)
        self._handles.clear()

    def destroy(self) -> None:
        """Destroy all groups, and the default one unless a script or another connection uses it."""
        self.destroy_own()
        _default_users.pop(self, None)
        default = dist.group.WORLD
        # destroying the default group destroys all groups
        is_used = len(dist.distributed_c10d._world.pg_map) > 1 or default in _default_users.values()
        if default in _own_defaults and not is_used:
            _own_defaults.discard(default)
            dist.destroy_process_group()

    def _init_torch(self) -> None:
        # torch uses the same keys for each default group
        store = PrefixStore(f"init{self._num_inits}", self._control.store.torch_store)
        self._num_inits += 1
        job: dict[str, Any] = {"rank": self._rank, "world_size": len(self._everyone), "device_id": self._gpu}
        self._bounded(lambda: dist.init_process_group(store=store, **job, **self._options()))
        _own_defaults.add(dist.group.WORLD)
        if self._library == "nccl":
            _default_users[self] = dist.group.WORLD

    def _make(self, ranks: tuple[int, ...]) -> Any:
        return self._bounded(lambda: dist.new_group(list(ranks), **self._options()))

    def _split(self, families: Sequence[tuple[int, ...]]) -> Any:
        """Make the groups of all families in one split, in which all ranks take part; return this rank's group."""
        world = self._handles[self._everyone]
        with without_torch_watchdog():
            return dist.split_group(world, [list(ranks) for ranks in families], timeout=self.timeout)

    def _own(self) -> list[Any]:
        # for a group without this rank torch returns a number; older torch returns None, which means the default group
        groups = dict.fromkeys(each for each in self._handles.values() if isinstance(each, dist.ProcessGroup))
        return [each for each in groups if each is not _default_users.get(self)]

    def _options(self) -> dict[str, Any]:
        """Return the options of a new group; a split group has its parent's."""
        nccl = None
        if self._library == "nccl":
            nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # where messages run
            nccl._timeout = self.timeout
        return {"backend": self._library, "timeout": self.timeout, "pg_options": nccl}

    def _bounded(self, operation: Callable[[], Any]) -> Any:
        """Connect gloo within a time limit. NCCL needs the calling thread's GPU, so it runs here, under the Watch."""
        if self._library == "nccl":
            with without_torch_watchdog():
                return operation()
        return self._control.detector.bounded(f"connection of {len(self._everyone)} ranks by gloo", operation)


def _bound_gpu() -> torch.device | None:
    """Return the GPU to which the default group is bound, or None; then torch cannot split a group."""
    return getattr(dist.group.WORLD, "bound_device_id", None)
