"""torch.distributed as a transport: NCCL for GPU tensors, gloo for host tensors."""

import re
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bigbatch.comm.backends.base import CommError, Group, InFlight, PeerLostError
from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue
from bigbatch.comm.environ import ProcessEnv, prefer_loopback

ROLL_CALL_SECONDS = 5.0
LINGER_SECONDS = 2.0
"""How much longer the rank that holds the rendezvous lives after a failure, so that the others can still read it."""

_FAILED = "bigbatch/failed"

# torch 2.14 renamed both; the old names warn there, the new ones do not exist before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchDistributedBackend:
    """A default process group over a rendezvous that listens no wider than the job needs.

    Collective: every rank constructs it. library is "nccl" or "gloo"; timeout_seconds bounds every wait.
    Raises: CommError where the ranks cannot meet, or this process has met them already.
    """

    def __init__(self, env: ProcessEnv, *, library: str, device: torch.device, timeout_seconds: float) -> None:
        if dist.is_initialized():
            raise CommError("this process is connected already: use the communicator that it has, or close it first")
        self.name = library
        self.rank = env.rank
        self.world_size = env.world_size
        self.world = Group(tuple(range(env.world_size)))
        if env.is_one_host:
            prefer_loopback()
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store = _rendezvous(env, self._timeout)
        self._store.set(f"bigbatch/host/{self.rank}", env.host)
        self._store_holder = "torchrun" if env.master_runs else "rank 0"
        try:
            dist.init_process_group(
                library,
                store=self._store,
                rank=env.rank,
                world_size=env.world_size,
                timeout=self._timeout,
                device_id=device if library == "nccl" else None,
            )
        except (RuntimeError, dist.DistError) as error:
            raise CommError(
                f"rank {env.rank} on {env.host}: {library} could not connect {env.world_size} ranks: "
                f"{first_line(error)}; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface "
                "that all nodes share"
            ) from error
        self._texts = 0
        self._queue = (
            StreamQueue(device) if library == "nccl" else ThreadQueue(self._explain, while_waiting=self._heed_others)
        )

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Make one process group per family; torch.distributed wants every rank to make all of them."""
        mine: Group | None = None
        for ranks in families:
            handle = None if tuple(ranks) == self.world.ranks else dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                mine = Group(tuple(ranks), handle)
        assert mine is not None, "families must cover the world"
        return mine

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """The library's own all-reduce."""
        dist.all_reduce(tensor_N, group=group.handle)

    def reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Sum into the first rank of the group."""
        if len(group.ranks) > 1:
            dist.reduce(tensor_N, dst=group.ranks[0], group=group.handle)

    def broadcast_(self, tensor_N: Tensor, group: Group) -> None:
        """Copy from the first rank of the group."""
        if len(group.ranks) > 1:
            dist.broadcast(tensor_N, src=group.ranks[0], group=group.handle)

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        """Sum, then keep this rank's part."""
        _reduce_scatter(shard_M, tensor_N, group=group.handle)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        """Collect all parts."""
        _all_gather(tensor_N, shard_M, group=group.handle)

    def exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        """Send and receive at once, so that neither side waits for the other."""
        hops = [dist.P2POp(dist.isend, send, to), dist.P2POp(dist.irecv, receive, source)]
        for work in dist.batch_isend_irecv(hops):
            work.wait()

    def all_gather_text(self, text: str) -> list[str]:
        """Over the rendezvous store: rank 0 collects and publishes, so the cost is linear in ranks.

        Rank 0, which may hold the store, returns last: it can fail next without taking the answer with it.
        """
        self._texts += 1
        key = f"bigbatch/text/{self._texts}"
        start = time.monotonic()
        try:
            self._store.set(f"{key}/{self.rank}", text)
            if self.rank == 0:
                all_texts = [self._store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]
                self._store.set(key, "\0".join(all_texts))
                self._store.wait([f"{key}/read/{rank}" for rank in range(1, self.world_size)])
                return all_texts
            all_texts = self._store.get(key).decode().split("\0")
            self._store.set(f"{key}/read/{self.rank}", "1")
            return all_texts
        except RuntimeError as error:
            raise self._explain("comparison of a text over all ranks", time.monotonic() - start, error) from error

    def submit(self, operation: Callable[[], None], *, label: str) -> InFlight:
        """Start the operation beside backward: on a thread for gloo, on a stream for NCCL."""
        return self._queue.submit(operation, label=label)

    def close(self) -> None:
        """Wait for all ranks, then tear down, so that no rank closes a connection another still uses.

        The second time, do nothing.
        """
        if self._queue.is_closed:
            return
        self._queue.close()
        start = time.monotonic()
        try:
            dist.barrier()
        except RuntimeError as error:
            raise self._explain("the last barrier", time.monotonic() - start, error) from error
        dist.destroy_process_group()

    def _heed_others(self, label: str, seconds: float) -> None:
        """While waiting: another rank's failure ends the wait, so that nobody takes this rank for lost."""
        try:
            has_failed = self._store.check([_FAILED])
        except RuntimeError:
            return  # the operation itself is about to fail, and knows more
        if has_failed:
            cause = RuntimeError("another rank reports a failure")
            raise self._explain(label, seconds, cause) from cause

    def _explain(self, label: str, seconds: float, error: Exception) -> CommError:
        who = self._roll_call()
        if self._store_holder == f"rank {self.rank}":
            time.sleep(LINGER_SECONDS)
        return PeerLostError(
            f"rank {self.rank}: {label} failed after {seconds:.1f} s; {who} ({self.name}: {first_line(error)})"
        )

    def _roll_call(self) -> str:
        """Which ranks do not report, after a failure, that they live. Takes at most ROLL_CALL_SECONDS."""
        try:
            self._store.set(f"bigbatch/alive/{self.rank}", "1")
            self._store.set(_FAILED, "1")
            deadline = time.monotonic() + ROLL_CALL_SECONDS
            missing = list(range(self.world_size))
            while missing and time.monotonic() < deadline:
                missing = [r for r in missing if not self._store.check([f"bigbatch/alive/{r}"])]
                time.sleep(0.1)
            places = [f"{rank} on {self._store.get(f'bigbatch/host/{rank}').decode()}" for rank in missing]
        except RuntimeError:
            return f"no answer from {self._store_holder}, which holds the rendezvous"
        return f"no answer from rank {', '.join(places)}" if places else "all ranks still answer"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the place in the C++ sources where it was raised."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\.\w+:\d+\]\s*", "", text.splitlines()[0])


def _rendezvous(env: ProcessEnv, timeout: timedelta) -> Store:
    """The key-value store through which the ranks find each other, bound to one address by rank 0."""
    if env.master is None:
        raise CommError(
            f"{env.launcher} tells ranks no meeting point: install mpi4py (pip install 'bigbatch[mpi]'), or set "
            "MASTER_ADDR and MASTER_PORT for all ranks"
        )
    address, port = env.master
    try:
        if env.master_runs:  # it outlives the ranks: those of a restart must not read what the last ones left
            return PrefixStore(f"attempt/{env.attempt}", TCPStore(address, port, is_master=False, timeout=timeout))
        if env.rank != 0:
            return TCPStore(address, port, is_master=False, timeout=timeout)
        listener = listen(address, port, is_one_host=env.is_one_host)
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"rank {env.rank} on {env.host}: no rendezvous at {address}:{port}: {first_line(error)}; check that "
            "rank 0 runs, and that MASTER_ADDR and MASTER_PORT are an address and free port of its host"
        ) from error


def listen(address: str, port: int, *, is_one_host: bool = True) -> socket.socket:
    """A socket that listens on this address alone, not on every interface.

    Except on a host of several whose name leads to its own loopback interface, as Debian and Ubuntu set it up:
    the other hosts know it by another address.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_name = address not in (where[0], "localhost")
    if is_name and not is_one_host and ip_address(where[0]).is_loopback:
        where = ("", port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(where)
    listener.listen(4096)
    return listener
