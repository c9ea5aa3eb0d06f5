"""torch.distributed as a transport: NCCL for GPU tensors, gloo for host tensors."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.comm.backends.base import AllOf, Capabilities, Group, InFlight
from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue
from bigbatch.comm.rendezvous.control import LINGER_SECONDS, ROLL_CALL_SECONDS, Control, first_line
from bigbatch.comm.rendezvous.environ import ProcessEnv, prefer_interface
from bigbatch.comm.rendezvous.stall import Pending
from bigbatch.errors import CommError

# torch 2.14 renamed both; the old names warn there, the new ones do not exist before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchDistributedBackend:
    """Wraps a process group of NCCL or gloo; the default one, unless the script has made that already.

    Collective: every rank constructs it. library is "nccl" or "gloo"; timeout_seconds bounds every wait.
    Raises: CommError where the library cannot connect the ranks.
    """

    def __init__(
        self, env: ProcessEnv, control: Control, *, library: str, device: torch.device, interface: str | None = None
    ) -> None:
        self.name = library
        self.rank = env.rank
        self.world_size = env.world_size
        self.capabilities = Capabilities(("cuda",) if library == "nccl" else ("cpu",))
        self._control = control
        self._gpus = [device.index] if library == "nccl" else None
        # NCCL's own watchdog comes after our verdict, which takes a roll call
        grace = ROLL_CALL_SECONDS + LINGER_SECONDS if library == "nccl" else 0.0
        self._timeout = timedelta(seconds=control.timeout_seconds + grace)
        self._owns_default = not dist.is_initialized()
        prefer_interface(interface, is_one_host=env.is_one_host)
        everyone = tuple(range(env.world_size))
        try:
            if self._owns_default:
                dist.init_process_group(
                    library,
                    store=control.store,
                    rank=env.rank,
                    world_size=env.world_size,
                    timeout=self._timeout,
                    device_id=device if library == "nccl" else None,
                )
            shares_default = self._owns_default and library == "nccl"  # gloo's must not mix with a script's, or DDP's
            handle = None if shares_default else dist.new_group(list(everyone), backend=library, timeout=self._timeout)
            self.world = Group(everyone, handle)
            if library == "nccl":
                self._barrier()  # a group's first operation must be one of all its ranks
        except (RuntimeError, dist.DistError) as error:
            raise CommError(
                f"rank {env.rank} on {env.host}: {library} could not connect {env.world_size} ranks: "
                f"{first_line(error)}; {_remedy(error)}"
            ) from error
        self._queue = (
            StreamQueue(device)
            if library == "nccl"
            else ThreadQueue(control.explain, while_waiting=control.heed_others)
        )

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Make one process group per family; torch.distributed wants every rank to make all of them."""
        mine: Group | None = None
        for ranks in families:
            is_world = tuple(ranks) == self.world.ranks
            handle = (
                self.world.handle if is_world else dist.new_group(list(ranks), backend=self.name, timeout=self._timeout)
            )
            if self.rank in ranks:
                mine = Group(tuple(ranks), handle)
        assert mine is not None, "families must cover the world"
        return mine

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Sum by the library's own all-reduce."""
        dist.all_reduce(tensor_N, group=group.handle)

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Sum into one rank of the group."""
        if len(group.ranks) > 1:
            dist.reduce(tensor_N, dst=root, group=group.handle)

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Copy from one rank of the group."""
        if len(group.ranks) > 1:
            dist.broadcast(tensor_N, src=root, group=group.handle)

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        """Sum, then keep this rank's part."""
        _reduce_scatter(shard_M, tensor_N, group=group.handle)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        """Collect all parts."""
        _all_gather(tensor_N, shard_M, group=group.handle)

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        """Send by isend."""
        return self._batch(dist.P2POp(dist.isend, tensor_N, to, self.world.handle))

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        """Receive by irecv."""
        return self._batch(dist.P2POp(dist.irecv, tensor_N, source, self.world.handle))

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Send and receive in one batch, so that neither side waits for the other."""
        return self._batch(
            dist.P2POp(dist.isend, send, to, self.world.handle),
            dist.P2POp(dist.irecv, receive, source, self.world.handle),
        )

    def _batch(self, *hops: dist.P2POp) -> InFlight:
        # a tensor shorter than the ranks has empty parts, and both sides of a hop leave them out
        some = [hop for hop in hops if hop.tensor.numel()]
        return AllOf(tuple(dist.batch_isend_irecv(some)) if some else ())  # type: ignore[arg-type]

    def submit(self, operation: Callable[[], None], *, label: str, ranks: tuple[int, ...] | None = None) -> InFlight:
        """Start the operation beside backward: on a thread for gloo, on a stream for NCCL."""
        return self._queue.submit(operation, label=label, ranks=ranks)

    def oldest(self) -> Pending | None:
        """Return what the queue is at."""
        return self._queue.oldest()

    def close(self) -> None:
        """Wait for all ranks, then tear down, so that no rank closes a connection another still uses.

        The second time, do nothing.
        """
        if self._queue.is_closed:
            return
        self._queue.close()
        start = time.monotonic()
        try:
            self._barrier()
        except RuntimeError as error:
            raise self._control.explain("the last barrier", time.monotonic() - start, error) from error
        self._destroy()

    def _barrier(self) -> None:
        # in a group that is bound to no GPU NCCL's would be on the current one, whichever the script has left there
        dist.barrier(group=self.world.handle, device_ids=self._gpus)

    def abandon(self) -> None:
        """Stop the thread and give up the process group, so that another connection can make one."""
        self._queue.close()
        self._destroy()

    def _destroy(self) -> None:
        if self._owns_default:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(self.world.handle)


def _remedy(error: BaseException) -> str:
    """Say what to do about ranks that cannot connect. NCCL's ranks of a node share memory in /dev/shm."""
    if "/dev/shm" in str(error):
        return "/dev/shm is too small or full: free some, or start the container with a larger one (--shm-size 1g)"
    return "set comm.interface to the network interface that all nodes share"
