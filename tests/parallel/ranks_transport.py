"""The contract of a transport, on real ranks: part of ranks.py. Whole numbers, so that every sum is exact."""

from collections.abc import Callable

import pytest
import torch

from bigbatch.comm.backends.base import ALL_DTYPES, AllOf, Group, InFlight
from bigbatch.comm.communicator import Communicator
from bigbatch.errors import CommError


def check_transport(communicator: Communicator) -> None:
    """Identity, messages, and the collectives of the world and of smaller groups."""
    backend, n, rank = communicator.backend, communicator.world_size, communicator.rank
    assert (rank, n) == (communicator.env.rank, communicator.env.world_size)
    assert backend.world.ranks == tuple(range(n))
    families = [[[0], list(range(1, n))], [list(range(0, n, 2)), list(range(1, n, 2))]]
    groups = [backend.world, *(backend.new_group([*filter(None, each)]) for each in families)]
    for group in groups:
        assert rank in group.ranks
        on_its_thread(communicator, lambda group=group: check_group(communicator, group), "collectives of a group")
    if backend.capabilities.has_messages and n > 1:
        on_its_thread(communicator, lambda: check_order(communicator), "messages in order")
        on_its_thread(communicator, lambda: check_exchange(communicator), "an exchange around the ring")
        if backend.name != "nccl":  # where all that send before they receive wait for each other
            on_its_thread(communicator, lambda: check_all_to_all(communicator), "messages between all")
    if backend.name in ("tcp", "mpi"):
        on_its_thread(communicator, lambda: check_half_sums(communicator), "sums of half precision")
    check_texts(communicator)


def on_its_thread(communicator: Communicator, operation: Callable[[], None], label: str) -> None:
    """Run an operation on the backend's own thread."""
    communicator.backend.submit(operation, label=f"{communicator.backend.name}: {label}").wait()


def check_group(communicator: Communicator, group: Group) -> None:
    """Collectives, with every rank of the group as the root; lengths that the group divides and one it does not."""
    backend, k = communicator.backend, len(group.ranks)
    place = group.ranks.index(communicator.rank)
    total = float(k * (k + 1) / 2)
    for dtype in ALL_DTYPES:
        for length in (1, 2 * k, 2 * k + 1):
            mine_N = torch.full((length,), float(place + 1), dtype=dtype)
            for root in group.ranks:
                first_N = mine_N.clone()
                backend.reduce_(first_N, group, root=root)
                if communicator.rank == root:
                    assert first_N.tolist() == [total] * length
                sent_N = mine_N.clone()
                backend.broadcast_(sent_N, group, root=root)
                assert sent_N.tolist() == [float(group.ranks.index(root) + 1)] * length
            sum_N = mine_N.clone()
            backend.all_reduce_(sum_N, group)
            assert sum_N.tolist() == [total] * length
        shard_2 = torch.zeros(2, dtype=dtype)
        backend.reduce_scatter(shard_2, torch.arange(2 * k, dtype=dtype), group)
        assert shard_2.tolist() == [2.0 * place * k, (2.0 * place + 1) * k]
        whole_N = torch.zeros(2 * k, dtype=dtype)
        backend.all_gather(whole_N, torch.full((2,), float(place + 1), dtype=dtype), group)
        assert whole_N.tolist() == [float(r // 2 + 1) for r in range(2 * k)]


def check_half_sums(communicator: Communicator) -> None:
    """Made in fp32 and rounded once: at 2048 fp16 counts in steps of two, so that ones added one by one are lost."""
    n, rank = communicator.world_size, communicator.rank
    sum_N = torch.full((2 * n,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    communicator.backend.all_reduce_(sum_N, communicator.backend.world)
    assert torch.equal(sum_N, torch.full((2 * n,), 2048.0 + n - 1).half())


def check_order(communicator: Communicator) -> None:
    """Messages to one rank arrive in the order in which they were started, short behind long, an empty one between."""
    backend, n, rank = communicator.backend, communicator.world_size, communicator.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    lengths = (500_000, 1, 0, 7)
    received = [torch.zeros(length) for length in lengths]
    works: list[InFlight] = []

    def send() -> None:
        works.extend(backend.start_send(torch.full((m,), 10.0 * rank + k), to=right) for k, m in enumerate(lengths))

    def receive() -> None:
        works.extend(backend.start_receive(received_N, source=left) for received_N in received)

    # NCCL makes each message to its end before the next: not all ranks may send first
    for each in (receive, send) if backend.name == "nccl" and rank else (send, receive):
        each()
    for work in reversed(works):  # in any order, each once: gloo would wait forever for the second
        work.wait()
    for k, (received_N, length) in enumerate(zip(received, lengths, strict=True)):
        assert received_N.tolist() == [10.0 * left + k] * length


def check_exchange(communicator: Communicator) -> None:
    """All send at once, more than the kernel's buffers hold: no rank may wait for the other to receive first."""
    backend, n, rank = communicator.backend, communicator.world_size, communicator.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for dtype in (*ALL_DTYPES, torch.uint8):
        for length in (0, 1, 1_000_000):
            sent_N, received_N = torch.full((length,), rank, dtype=dtype), torch.zeros(length, dtype=dtype)
            backend.start_exchange(send=sent_N, to=right, receive=received_N, source=left).wait()
            assert torch.equal(received_N, torch.full((length,), left, dtype=dtype))


def check_all_to_all(communicator: Communicator) -> None:
    """A message of its own length from every rank to every other, all under way at once."""
    backend, rank = communicator.backend, communicator.rank
    others = [other for other in range(communicator.world_size) if other != rank]
    sends = [backend.start_send(torch.full((100 * rank + other,), rank), to=other) for other in others]
    received = {other: torch.zeros(100 * other + rank, dtype=torch.int64) for other in others}
    receives = [backend.start_receive(received_N, source=other) for other, received_N in received.items()]
    AllOf((*receives, *sends)).wait()
    for other, received_N in received.items():
        assert torch.equal(received_N, torch.full_like(received_N, other))


def check_texts(communicator: Communicator) -> None:
    """Texts of all ranks in rank order; equal ones pass; unequal ones name the odd rank and the line, on all ranks."""
    n, rank = communicator.world_size, communicator.rank
    assert communicator.gather_text(f"text of {rank}") == [f"text of {r}" for r in range(n)]
    assert communicator.gather_text("") == [""] * n
    assert communicator.control.host_of(n - 1) == communicator.gather_text(communicator.env.host)[-1]
    communicator.agree("the config", "seed: 1\nlr: 2")
    if n == 1:
        return
    with pytest.raises(CommError, match=r"rank 1 and rank 0 .*the config.*'lr: 3' .*'lr: 2'"):
        communicator.agree("the config", f"seed: 1\nlr: {3 if rank == 1 else 2}")
