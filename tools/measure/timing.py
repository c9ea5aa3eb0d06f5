"""Time all-reduces and messages between the ranks of a running job. All functions here are collective."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.comm.algorithms.hybrid import MeasuredTimes
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.tools.measure.hangs import exchange, sum_label
from bigbatch.trainer.machine.host import wait_for

MIN_REPETITIONS = 2
REPETITIONS_IN_A_ROW = 5
"""Repetitions of one algorithm in a row; rounds of all algorithms alternate, so that a drift affects all equally."""
LOOP_SECONDS, MAX_LOOPS = 0.02, 20
"""Seconds of one repetition of several sums in a row, and the most sums; its time is divided by their number."""
MESSAGE_BYTES = (8, 4096, 65_536, 1 << 20, 8 << 20)
"""Sizes of messages that are timed; each a multiple of 4."""
PERIOD = 1021
"""Elements after which the numbers repeat: a prime, so that a part in a wrong place is detected."""
LARGEST_NUMBER = 63
"""Largest number in the pattern, even if larger ones would fit."""


@dataclass(frozen=True)
class TimeBudget:
    """Limits of a measurement: repetitions and seconds, whichever is reached first; at least two repetitions."""

    repetitions: int
    seconds: float
    contender_ratio: float = float("inf")
    """If time is short, an algorithm is not repeated if its first time exceeds the best one's by this factor."""

    def repetitions_of(self, seconds: float) -> int:
        """Return how often to repeat an operation that takes that many seconds."""
        return max(MIN_REPETITIONS, min(self.repetitions, int(self.seconds / max(seconds, 1e-9))))


@dataclass(frozen=True)
class AllReduceTimes:
    """For one algorithm and size: the slowest rank's time of each repetition, and the count of wrong elements."""

    measured: MeasuredTimes
    num_wrong: int


def time_sums(
    tensor_N: Tensor, communicators: Mapping[str, Communicator], *, budget: TimeBudget, label: str = "measurement"
) -> dict[str, AllReduceTimes]:
    """Time the all-reduce of tensor_N by each algorithm, in place; its content is lost.

    As in training, no barrier precedes a repetition. The recorded time of a repetition is that of the slowest rank.
    Short sums are repeated in a row, as in nccl-tests: a single one would measure the scheduling of its ranks. Each
    algorithm first sums whole numbers, and every rank compares every element with the closed form. The timed
    repetitions sum zeros, which must stay zeros. The budget is shared between the algorithms. Call it inside limited().
    Raises: HungError; PeerLostError.
    """
    connection = next(iter(communicators.values())).connection
    wrong: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    loops = 1

    def repeat(name: str, count: int) -> None:
        # zeros stay zeros however often they are summed: no overflow, and any other value is an error
        tensor_N.zero_()
        for _ in range(count):
            wait_for(tensor_N.device)
            start = time.perf_counter()
            for _ in range(loops):
                communicators[name].sum_(tensor_N, label=sum_label(label, name))
            wait_for(tensor_N.device)
            seconds[name].append((time.perf_counter() - start) / loops)
        wrong[name] += int(torch.count_nonzero(tensor_N))

    def first_times() -> dict[str, float]:
        """Repeat each algorithm once, as its first repetition; return the slowest rank's seconds."""
        for name in communicators:
            seconds[name] = []
            repeat(name, 1)
        return dict(zip(seconds, slowest([each for (each,) in seconds.values()], connection), strict=True))

    for name, communicator in communicators.items():
        wrong[name] = _count_wrong_sums(tensor_N, communicator, label=sum_label(f"check of {label}", name))
    first_seconds = first_times()
    # no more than the time allows: if one algorithm is quick, others may be a hundred times slower
    affordable = int(budget.seconds / MIN_REPETITIONS / max(sum(first_seconds.values()), 1e-9))
    loops = max(1, min(loops_of(min(first_seconds.values())), affordable))
    if loops > 1:  # a single short sum is no repetition, and does not show which algorithm is fast
        first_seconds = first_times()
    # first_seconds are of one sum, but a repetition makes loops of them
    is_short = budget.repetitions * loops * sum(first_seconds.values()) > budget.seconds
    limit = budget.contender_ratio * min(first_seconds.values())
    chosen = [name for name, each in first_seconds.items() if each <= limit or not is_short]
    left = budget.repetitions_of(loops * sum(first_seconds[name] for name in chosen)) - 1
    while left > 0:
        for name in chosen:
            repeat(name, min(left, REPETITIONS_IN_A_ROW))
        left -= REPETITIONS_IN_A_ROW
    # together, as an exchange between thousands of ranks takes longer than a sum
    mine = {name: [wrong[name], *seconds[name]] for name in communicators}
    found = exchange(mine, connection, reduce=_over_ranks)
    return {name: AllReduceTimes(MeasuredTimes(tuple(times)), count) for name, (count, *times) in found.items()}


def _over_ranks(everyone: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return for each algorithm the sum of the ranks' first numbers, and the largest of each further one."""
    by_name = {name: zip(*(each[name] for each in everyone), strict=True) for name in everyone[0]}
    return {name: [sum(counts), *map(max, times)] for name, (counts, *times) in by_name.items()}


def loops_of(seconds: float) -> int:
    """Return how many sums in a row, of that many seconds each, are one repetition."""
    return max(1, min(MAX_LOOPS, int(LOOP_SECONDS / max(seconds, 1e-9))))


def slowest(seconds: Sequence[float], connection: Connection) -> list[float]:
    """Return the longest of each time over all ranks, the same on all of them."""
    return [*exchange(seconds, connection, reduce=lambda everyone: [*map(max, zip(*everyone, strict=True))])]


def _count_wrong_sums(tensor_N: Tensor, communicator: Communicator, *, label: str) -> int:
    """Sum numbers whose sum is known; return how many of this rank's elements differ from it."""
    limit = min(map(limit_of, (tensor_N.dtype, communicator.wire.of(tensor_N))))
    fill_(tensor_N, rank_pattern(communicator.rank, communicator.world_size, limit=limit))
    communicator.sum_(tensor_N, label=label)
    return count_different(tensor_N, expected_pattern(communicator.world_size, limit=limit))


def limit_of(dtype: torch.dtype) -> int:
    """Return the number up to which a floating-point dtype holds every whole number: 2**24 for float32."""
    return int(2 / torch.finfo(dtype).eps)


def rank_pattern(rank: int, world_size: int, *, limit: int) -> Tensor:
    """Return one period of the whole numbers that a rank adds to the sum, which stays within limit; int64.

    Any order of adding is exact, because every partial sum is a whole number within the limit. Ranks from the limit on
    add zeros.
    """
    largest, place_P = min(LARGEST_NUMBER, limit // min(world_size, limit)), torch.arange(PERIOD)
    return (17 * place_P + 31 * rank + place_P * rank) % (largest + 1) * (rank < limit)


def expected_pattern(world_size: int, *, limit: int) -> Tensor:
    """Return one period of the sum over all ranks."""
    ranks = range(min(world_size, limit))
    return torch.stack([rank_pattern(rank, world_size, limit=limit) for rank in ranks]).sum(0)


def fill_(tensor_N: Tensor, pattern_P: Tensor) -> None:
    """Repeat the pattern over the tensor, in place."""
    for rows_RP, same_P in _in_periods(tensor_N, pattern_P):
        rows_RP.copy_(same_P)


def count_different(tensor_N: Tensor, pattern_P: Tensor) -> int:
    """Count elements that differ from the repeated pattern; a value that is not finite differs."""
    return sum(int(torch.count_nonzero(rows_RP != same_P)) for rows_RP, same_P in _in_periods(tensor_N, pattern_P))


def _in_periods(tensor_N: Tensor, pattern_P: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensor in rows of one period, each piece with the pattern; last the rest, with the pattern's beginning.

    It yields pieces, because a comparison of all rows at once would need a mask as long as the tensor.
    """
    pattern_P, whole = pattern_P.to(tensor_N.device, tensor_N.dtype), tensor_N.numel() // PERIOD * PERIOD
    for rows_RP in tensor_N[:whole].view(-1, PERIOD).split(1 << 14):
        yield rows_RP, pattern_P
    yield tensor_N[whole:], pattern_P[: tensor_N.numel() - whole]


@dataclass(frozen=True)
class MessageTimes:
    """Repeated times of messages by their bytes, from the shortest to the longest."""

    times: tuple[tuple[int, MeasuredTimes], ...]

    @property
    def latency_seconds(self) -> float:
        """Return the median of the shortest messages."""
        return self.times[0][1].median

    @property
    def best_bytes_per_second(self) -> float:
        """Return the rate of the fastest of the longest messages: the link's rate when nothing delays the ranks.

        Shorter ones do not count: a shaped or buffered link passes them faster than its lasting rate.
        """
        num_bytes, measured = self.times[-1]
        return num_bytes / min(measured.seconds)


@dataclass(frozen=True)
class MeasuredLinks:
    """Times of messages inside nodes (None: one rank per node) and across (None: one node). No messages: both None."""

    inside: MessageTimes | None
    across: MessageTimes | None


def measure_links(communicator: Communicator, *, seconds: float) -> MeasuredLinks:
    """Time messages inside nodes and between them.

    As in a ring, every rank of a node (between nodes, every leader) sends to the next rank and receives from the
    previous one at once.
    """
    topology = communicator.connection.topology
    if not communicator.transport.backend.capabilities.has_messages:
        return MeasuredLinks(None, None)
    has_inside = topology.num_nodes < topology.world_size
    return MeasuredLinks(
        inside=_measure_hops(communicator, topology.node, seconds=seconds / 2) if has_inside else None,
        across=_measure_hops(communicator, topology.leaders, seconds=seconds / 2) if topology.num_nodes > 1 else None,
    )


def _measure_hops(communicator: Communicator, ring: Sequence[int], *, seconds: float) -> MessageTimes:
    """Time hops around a ring by size; half of the time is for the longest messages."""
    times = []
    for num_bytes in MESSAGE_BYTES:
        share = 0.5 if num_bytes == MESSAGE_BYTES[-1] else 0.5 / (len(MESSAGE_BYTES) - 1)
        budget = TimeBudget(repetitions=30, seconds=seconds * share)
        time_hops(communicator, ring, num_bytes, count=1)  # connections open
        first_times = time_hops(communicator, ring, num_bytes, count=2)
        count = budget.repetitions_of(min(first_times))
        times.append((num_bytes, MeasuredTimes(tuple(time_hops(communicator, ring, num_bytes, count=count)))))
    return MessageTimes(tuple(times))


def time_hops(communicator: Communicator, ring: Sequence[int], num_bytes: int, *, count: int) -> list[float]:
    """Return the slowest rank's seconds of each of count hops around a ring; ranks outside of it only wait."""
    backend, seconds = communicator.transport.backend, [0.0] * count
    send_N, receive_N = (torch.zeros(num_bytes // 4, device=communicator.transport.backend_device) for _ in range(2))

    def go_round() -> None:
        # submitted on all ranks, also outside of the ring, because all ranks must count the same operations
        if communicator.rank not in ring or len(ring) < 2:
            return
        place = ring.index(communicator.rank)
        left, right = ring[place - 1], ring[(place + 1) % len(ring)]
        for index in range(count):
            start = time.perf_counter()
            backend.start_exchange(send=send_N, to=right, receive=receive_N, source=left).wait()
            wait_for(communicator.device)
            seconds[index] = time.perf_counter() - start

    label = f"hops of {num_bytes} bytes around ranks {ring[0]} to {ring[-1]}"
    backend.submit(go_round, label=label, ranks=tuple(ring)).wait()
    return slowest(seconds, communicator.connection)
