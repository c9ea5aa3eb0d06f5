"""torch.distributed as a transport: NCCL for GPU tensors, gloo for host tensors."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.awake import awake_seconds
from bigbatch.comm.backends.base import Capabilities, Group, InFlight
from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue, behind_kernels, give_up_together
from bigbatch.comm.backends.operation_tags import OperationTags, require_same_operation
from bigbatch.comm.backends.process_groups import ProcessGroups
from bigbatch.comm.backends.registered_memory import RegisteredMemory
from bigbatch.comm.rendezvous.bounded_store import wait_until
from bigbatch.comm.rendezvous.control import OperationFacts, Pending
from bigbatch.comm.rendezvous.environ import ProcessEnv, enable_flight_recorder, prefer_interface
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.limits import GONE_SECONDS, PEER_CHECK_SECONDS
from bigbatch.errors import CommError, PeerLostError, first_line

# torch 2.14 renamed both; the old names warn there, the new ones do not exist before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchDistributedBackend:
    """Runs collectives and messages of torch.distributed over groups of NCCL or gloo (see ProcessGroups).

    Collective: every rank constructs it. library: "nccl" or "gloo". The control's timeout_seconds bounds every wait.
    heals: the run continues after a rank is lost, so NCCL must not block the calling thread or end the process: another
    thread waits for the GPU, and abort() ends that wait. It costs a wait of the host in each step.
    Raises: CommError if the library cannot connect the ranks.
    """

    def __init__(
        self, env: ProcessEnv, control: JobControl, *, library: str, device: torch.device, heals: bool = False
    ) -> None:
        self.name = library
        self.rank = env.rank
        self.world_size = env.world_size
        is_nccl = library == "nccl"
        self.capabilities = Capabilities(("cuda",) if is_nccl else ("cpu",), in_place=is_nccl, sums_half_in_fp32=False)
        self._control, detector = control, control.detector
        self._gpus = [device.index] if is_nccl else None
        self._registered: list[RegisteredMemory] = []
        self._groups = ProcessGroups(env, control, gpu=device if is_nccl else None)
        prefer_interface(env.interface, is_one_host=env.is_one_host)
        if is_nccl:
            enable_flight_recorder()
        start = awake_seconds()
        try:
            self.world = self._groups.make_world()
            if is_nccl:
                self._barrier()  # a group's first operation must be one of all its ranks
        except (RuntimeError, dist.DistError) as error:
            if not is_nccl:  # a group formed after a rank failure makes its own groups
                self._groups.destroy()
            if isinstance(error, PeerLostError):
                raise
            # gloo's error comes before the store counts a rank as gone
            if not is_nccl and wait_until(lambda: bool(self._vanished()), 2 * GONE_SECONDS):
                seconds = awake_seconds() - start
                raise detector.make_error_and_stop_requests(f"connection by {library}", seconds, error) from error
            raise CommError(
                f"rank {env.rank} on {env.host}: {library} could not connect {env.world_size} ranks: "
                f"{first_line(error)}; {_remedy(error)}"
            ) from error
        self._stream: torch.cuda.Stream | None = None
        """Where the queue's thread enqueues NCCL's operations, if the run heals."""
        self._queue: StreamQueue | ThreadQueue
        if is_nccl and heals:
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._queue = ThreadQueue(self._explain_and_abort, while_waiting=self._abort_if_lost)
        elif is_nccl:
            self._queue = StreamQueue(device)
        else:
            same = partial(require_same_operation, self, tags=OperationTags(env.rank))
            self._queue = ThreadQueue(
                detector.make_error_and_stop_requests, while_waiting=detector.check_peers, begin=same
            )

    def oldest(self) -> Pending | None:
        return self._queue.oldest()

    def _abort_if_lost(self, label: str, seconds: float) -> None:
        """End NCCL's operations if a rank is lost or late: until then any wait for the GPU may hang."""
        try:
            self._control.detector.raise_if_failed_or_store_lost(label, seconds)
        except PeerLostError as error:
            self._queue.give_up(error, end=self._groups.abort)
            raise

    def _explain_and_abort(self, label: str, seconds: float, error: Exception) -> CommError:
        failure = self._control.detector.make_error_and_stop_requests(label, seconds, error)
        self._groups.abort()
        return failure

    def limit(self, seconds: float | None) -> None:
        """Limit waits. Over NCCL the host waits then; the first sum of a group connects it without a limit."""
        self._queue.limit_seconds = seconds

    def num_submitted(self) -> int:
        return self._queue.number

    def restart(self, *, num_missed: int) -> None:
        """Connect again; see Restartable. Raises: CommError as abort()."""
        give_up_together(self._queue, self._control, end=self._groups.abort)
        self._groups.require_aborted()
        self._groups.destroy_own()
        self.world = self._groups.make_world()
        if self._gpus:
            self._barrier()  # a group's first operation must be one of all its ranks
        self._queue = self._queue.successor(num_missed=num_missed)

    def _vanished(self) -> frozenset[int]:
        """Ask the store; return the ranks whose processes have ended without the event "ended" or "crashed"."""
        log = self._control.detector.log
        with suppress(RuntimeError):
            log.read(self._control.store.within(PEER_CHECK_SECONDS))
        return log.state.vanished

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        return self._groups.make(families)

    def register(self, device: torch.device, *, is_symmetric: bool) -> RegisteredMemory:
        """Return memory registered with the group of all ranks until close(). Collective, NCCL only."""
        memory = RegisteredMemory(self.world.handle or dist.group.WORLD, device, is_symmetric=is_symmetric)
        self._registered.append(memory)
        return memory

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        dist.all_reduce(tensor_N, group=group.handle)

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        if len(group.ranks) > 1:
            dist.reduce(tensor_N, dst=root, group=group.handle)

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        if len(group.ranks) > 1:
            dist.broadcast(tensor_N, src=root, group=group.handle)

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        _reduce_scatter(shard_M, tensor_N, group=group.handle)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        _all_gather(tensor_N, shard_M, group=group.handle)

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        """Send by isend.

        NCCL runs one message after another: ranks that all send before they receive would deadlock, so they must use
        start_exchange.
        """
        return self._batch(dist.P2POp(dist.isend, tensor_N, to, self.world.handle))

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        return self._batch(dist.P2POp(dist.irecv, tensor_N, source, self.world.handle))

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Send and receive in one batch, so that neither side waits for the other."""
        return self._batch(
            dist.P2POp(dist.isend, send, to, self.world.handle),
            dist.P2POp(dist.irecv, receive, source, self.world.handle),
        )

    def _batch(self, *hops: dist.P2POp) -> InFlight:
        # a tensor with fewer elements than ranks has empty parts, which both sides of a hop leave out
        some = [hop for hop in hops if hop.tensor.numel()]
        return InFlight(*(work.wait for work in dist.batch_isend_irecv(some))) if some else InFlight()

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        """Start the operation during backward: on a thread for gloo, on a stream for NCCL. Raises: PeerLostError."""
        if self._stream is not None:
            operation = behind_kernels(operation, self._stream.device, stream=self._stream)
        start = awake_seconds()
        try:
            return self._queue.submit(operation, **facts)
        except dist.DistError as error:  # NCCL's operations are started here, on the calling thread
            label, seconds = facts["label"], awake_seconds() - start
            raise self._control.detector.make_error_and_stop_requests(label, seconds, error) from error

    def close(self) -> None:
        """Wait for all ranks, then destroy the groups, so that no rank closes a connection that another still uses.

        A second call does nothing.
        """
        if self._queue.is_closed:
            return
        for memory in self._registered:
            memory.close()
        self.submit(self._barrier, label="the last barrier").wait()
        self._queue.close()
        self._groups.destroy()

    def _barrier(self) -> None:
        # if a group is bound to no GPU, NCCL's barrier would use the current one, which the script may have changed
        dist.barrier(group=self.world.handle, device_ids=self._gpus)

    def abandon(self) -> None:
        """Stop the queue and destroy the process groups, so that another connection can make new ones."""
        self._queue.close()
        self._groups.destroy()

    def abort(self) -> None:
        """End all operations, without the other ranks, and destroy the process groups. Only if the run heals.

        Raises: CommError if NCCL's groups cannot be aborted.
        """
        assert isinstance(self._queue, ThreadQueue)
        self._queue.give_up(CommError("the connection was aborted"), end=self._groups.abort)
        self._groups.require_aborted()
        self._groups.destroy()


def _remedy(error: BaseException) -> str:
    """Return what to do about ranks that cannot connect. NCCL's ranks of a node share memory in /dev/shm."""
    if "/dev/shm" in str(error):
        return "/dev/shm is too small or full: free some, or start the container with a larger one (--shm-size 1g)"
    return "set comm.interface to the network interface that all nodes share"
