"""TCP between hosts: bigbatch's own transport for host tensors."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.comm.backends.base import HALF, Capabilities, Group, InFlight
from bigbatch.comm.backends.in_flight import ThreadQueue, give_up_together
from bigbatch.comm.backends.links import Links
from bigbatch.comm.rendezvous.control import OperationFacts, Pending
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CommError


class TcpBackend:
    """Sends messages over TCP connections; in its collectives each rank sums one part of the tensor.

    Collective: every rank constructs it. Sums of half precision are made in fp32. Its own all-reduce sends 2 * nbytes *
    (n - 1) / n per rank in two hops, directly between all pairs of ranks, for short tensors.
    """

    name = "tcp"
    capabilities = Capabilities(("cpu",))

    def __init__(self, env: ProcessEnv, control: JobControl, **_: object) -> None:
        self.rank = env.rank
        self.world_size = env.world_size
        self.world = Group(tuple(range(env.world_size)))
        self._control = control
        self._make_links = partial(Links, env, control, while_waiting=self._give_up)
        self._links = self._make_links()
        self._queue = ThreadQueue(self._explain, while_waiting=control.detector.check_peers, begin=self._begin)

    def _begin(self, pending: Pending) -> None:
        self._links.tags.begin(pending)

    def _give_up(self, seconds: float) -> None:
        pending = self.oldest()
        self._control.detector.raise_if_failed(pending.label if pending else "connection", seconds)

    def oldest(self) -> Pending | None:
        return self._queue.oldest()

    def limit(self, seconds: float | None) -> None:
        self._queue.limit_seconds = seconds

    def num_submitted(self) -> int:
        return self._queue.number

    def restart(self, *, num_missed: int) -> None:
        links, queue = self._links, self._queue
        give_up_together(queue, self._control, end=links.shut_down)
        links.close()
        self._links = self._make_links()
        self._control.gather_text("", what="connection after a sum that hung")  # no rank reads an earlier address
        self._queue = queue.successor(num_missed=num_missed)

    def _explain(self, label: str, seconds: float, error: Exception) -> CommError:
        if isinstance(error, ConnectionError):
            self._links.shut_down()  # so that the waits of other ranks end at once, too
        return self._control.detector.make_error_and_stop_requests(label, seconds, error)

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Return this rank's group; it needs no set-up."""
        return Group(tuple(next(ranks for ranks in families if self.rank in ranks)))

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Sum: each rank sums one part and sends the sum to all others."""
        parts = tensor_N.tensor_split(len(group.ranks))
        place = group.ranks.index(self.rank)
        self._sum_part(parts[place], parts, group)
        self._spread(parts, parts[place], group)

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Sum on the root, which receives the others' tensors and adds them in the order of the group."""
        if self.rank == root:
            self._add_from(tensor_N, [rank for rank in group.ranks if rank != root])
        else:
            self.start_send(tensor_N, to=root).wait()

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        if self.rank == root:
            InFlight(*(self.start_send(tensor_N, to=rank).wait for rank in group.ranks if rank != root)).wait()
        else:
            self.start_receive(tensor_N, source=root).wait()

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        parts = tensor_N.tensor_split(len(group.ranks))
        shard_M.copy_(parts[group.ranks.index(self.rank)])
        self._sum_part(shard_M, parts, group)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        parts = tensor_N.tensor_split(len(group.ranks))
        parts[group.ranks.index(self.rank)].copy_(shard_M)
        self._spread(parts, shard_M, group)

    def _sum_part(self, sum_M: Tensor, parts: Sequence[Tensor], group: Group) -> None:
        others = [(rank, part) for rank, part in zip(group.ranks, parts, strict=True) if rank != self.rank]
        sends = InFlight(*(self.start_send(part, to=rank).wait for rank, part in others))
        self._add_from(sum_M, [rank for rank, _ in others])
        sends.wait()

    def _add_from(self, sum_M: Tensor, sources: Sequence[int]) -> None:
        received = [torch.empty_like(sum_M) for _ in sources]
        works = [
            self.start_receive(received_M, source=rank) for received_M, rank in zip(received, sources, strict=True)
        ]
        # round once at the end, not after each addend
        total_M = sum_M.float() if sum_M.dtype in HALF else sum_M
        # in the group's order, not of arrival: addition rounds, and runs must repeat
        for received_M, work in zip(received, works, strict=True):
            work.wait()
            total_M.add_(received_M)
        if total_M is not sum_M:
            sum_M.copy_(total_M)

    def _spread(self, parts: Sequence[Tensor], mine_M: Tensor, group: Group) -> None:
        others = [(rank, part) for rank, part in zip(group.ranks, parts, strict=True) if rank != self.rank]
        sends = [self.start_send(mine_M, to=rank) for rank, _ in others]
        receives = [self.start_receive(part, source=rank) for rank, part in others]
        InFlight(*(each.wait for each in (*receives, *sends))).wait()

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        return InFlight(self._links.send(as_bytes(tensor_N), to=to).wait)

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        return InFlight(self._links.receive(as_bytes(tensor_N), source=source).wait)

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        return InFlight(self.start_send(send, to=to).wait, self.start_receive(receive, source=source).wait)

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        return self._queue.submit(operation, **facts)

    def close(self) -> None:
        if self._queue.is_closed:
            return
        self._queue.close()
        # a rank that closes first would look like a lost peer to the others
        self._control.gather_text("", what="the last barrier")
        self._links.close()

    def abandon(self) -> None:
        self._queue.close()
        self._links.close()

    def abort(self) -> None:
        """End the operation under way and all connections, without the other ranks."""
        self._queue.give_up(CommError("the connection was aborted"), end=self._links.shut_down)
        self._links.close()


def as_bytes(tensor_N: Tensor) -> memoryview:
    """View a flat tensor's own memory. Raises: ValueError if it is not contiguous."""
    if not tensor_N.is_contiguous():
        raise ValueError("only a contiguous tensor can be sent or received")
    return memoryview(tensor_N.view(torch.uint8).numpy())  # type: ignore[arg-type]
