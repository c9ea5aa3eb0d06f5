"""`bigbatch comm bench --verify`: sums compared with exact ones, repeated, and compared between ranks."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.tools.measure.figures import show_bytes
from bigbatch.tools.measure.hangs import HungError, exchange, limited, sum_label
from bigbatch.tools.measure.report import BenchReport, Columns
from bigbatch.words import name_ranks

WORKING_COPIES = 12
"""Memory as a multiple of the tensor: the numbers, the tensor, twice as much for algorithms, and four of float64."""
COLUMNS: Columns = (
    ("size", "(B)", 12, lambda row: row.size),
    ("count", "(elements)", 12, lambda row: row.count),
    ("algorithm", "", 14, lambda row: row.algorithm),
    (
        "largest error",
        "(of |terms|)",
        15,
        lambda row: "inf" if row.largest_error is None else f"{row.largest_error:.2e}",
    ),
    ("of bound", "(%)", 10, lambda row: "inf" if row.bound_share is None else f"{100 * row.bound_share:.3g}"),
    ("repeated", "", 10, lambda row: f"{row.num_repeated}/{row.repetitions}"),
    ("ranks", "", 8, lambda row: "same" if row.ranks_agree else "DIFFER"),
)
LEGEND = (
    "largest error: difference from the exact sum, over the sum of magnitudes",
    "of bound: of what one rounding per rank may come to, and one more per rank on a narrow wire",
)


@dataclass(frozen=True)
class VerifyRow:
    """Figures of one algorithm at one size, over all ranks and repetitions."""

    size: int
    """Bytes on each rank."""
    count: int
    """Elements."""
    algorithm: str
    largest_error: float | None
    """Largest error of an element over the sum of its terms' magnitudes; None if it is not finite."""
    bound_share: float | None
    """largest_error over its bound."""
    repetitions: int
    num_repeated: int
    """Number of repetitions, the first included, in which every rank got the bits of its first sum."""
    ranks_agree: bool
    findings: tuple[str, ...]
    """Descriptions of errors, a sentence each; empty for a good sum."""


def factor_of(rank: int) -> float:
    """Return what this rank multiplies the drawn numbers by: from 2**-7 to 2 in size, in 7 bits, of either sign."""
    return (1 + 37 * rank % 64 / 64) / 2 ** (5 * rank % 8) * (-1 if rank % 3 == 1 else 1)


def draw(count: int, *, seed: int, device: torch.device) -> Tensor:
    """Return random numbers, equal on all ranks: from 1 to 2 in size, in 17 bits, of either sign, in fp32.

    So products with factor_of() are exact in fp32, and fp32 rounds their sums; float64 adds those of thousands of
    ranks without rounding.
    """
    words_N = torch.randint(-65536, 65536, (count,), generator=torch.Generator().manual_seed(seed)).to(device)
    return torch.where(words_N < 0, words_N - 65536, words_N + 65536).float() / 65536


def bound(num_ranks: int, *, wire_dtype: torch.dtype | None) -> float:
    """Return the largest error of a sum over the sum of magnitudes: a rounding per rank, each of at most half an eps.

    A narrower wire rounds once more per rank, and its packing takes three roundings in fp32.
    """
    own = math.log1p(torch.finfo(torch.float32).eps / 2)
    narrow = 0.0 if wire_dtype is None else num_ranks * math.log1p(torch.finfo(wire_dtype).eps / 2) + 3 * own
    return math.expm1(num_ranks * own + narrow)


def verify_sizes(
    counts: Sequence[int], contestants: Mapping[str, Communicator], report: BenchReport, *, repetitions: int, seed: int
) -> bool:
    """Verify the sums of each number of elements by each algorithm. Collective. Return whether all are right.

    An algorithm that hangs is a fault, and is left out from then on. Raises: PeerLostError.
    """
    communicator, wire = report.communicator, report.conditions.wire_dtype or "float32"
    report.open({}, (f"wire {wire}; seed {seed}", *LEGEND), columns=COLUMNS)
    numbers_N = draw(max(counts), seed=seed, device=communicator.device)
    memory_N, num_findings = communicator.allocate(max(counts), torch.float32), 0
    for count in counts:
        for name in list(contestants):
            report.working_on(f"{show_bytes(4 * count)} by {name}")
            try:
                with limited(communicator.connection):
                    row = verify(contestants[name], memory_N[:count], numbers_N[:count], repetitions=repetitions)
            except HungError as hung:
                num_findings += 1
                report.print(f"# FAILED: {hung}")
                contestants = hung.reconnect(contestants)
                memory_N = communicator.allocate(max(counts), torch.float32)  # the hung sum may use the old one
                continue
            report.rows([row])
            num_findings += len(row.findings)
            for finding in row.findings:
                report.print(f"# FAILED: {finding}")
    text = f"FAILED: {num_findings} finding(s), above; do not train with these sums before the cause is known"
    text = text if num_findings else "every sum repeats its own bits, on all ranks alike, within its bound"
    report.print(f"# {text}")
    report.write({"kind": "verdict", "failed": num_findings > 0, "text": text})
    return num_findings == 0


def verify(communicator: Communicator, memory_N: Tensor, numbers_N: Tensor, *, repetitions: int) -> VerifyRow:
    """Sum each rank's multiple of the numbers repeatedly, in memory_N; return the figures over all ranks. Collective.

    Call it inside limited(). Raises: HungError; PeerLostError.
    """
    factors = [factor_of(rank) for rank in range(communicator.world_size)]
    digests, largest, at = list[str](), 0.0, 0
    for repetition in range(repetitions):
        torch.mul(numbers_N, factors[communicator.rank], out=memory_N)
        communicator.sum_(memory_N, label=sum_label(f"verified sum {repetition}", communicator.algorithm))
        digests.append(hashlib.sha256(memory_N.cpu().numpy().data).hexdigest())
        if not repetition:
            exact_N, magnitude_N = numbers_N.double() * math.fsum(factors), numbers_N.double().abs()
            error_N = ((memory_N.double() - exact_N) / magnitude_N).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
            at = int(error_N.argmax())
            largest = float(error_N[at]) / math.fsum(map(abs, factors))
            element = f"element {at} is {memory_N[at].item():.9g}, the exact sum {exact_N[at].item():.9g}"
    limit = bound(communicator.world_size, wire_dtype=communicator.wire.dtype)

    def over_ranks(everyone: list[Any]) -> tuple[list[str], int, float, bool]:
        """Return the findings, the number of repetitions with the same bits, the largest error, and if ranks agree."""
        findings = [
            *(f"rank {rank}: {element}" for rank, (_, error, element) in enumerate(everyone) if not error <= limit),
            *_find_odd_bits([each[0] for each in everyone]),
        ]
        repeats = [all(of_rank[k] == of_rank[0] for of_rank, _, _ in everyone) for k in range(repetitions)]
        ranks_agree = len({of_rank[0] for of_rank, _, _ in everyone}) == 1
        return findings, sum(repeats), max(error for _, error, _ in everyone), ranks_agree

    mine = [digests, largest, element]
    findings, num_repeated, worst, ranks_agree = exchange(mine, communicator.connection, reduce=over_ranks)
    where = f"{communicator.algorithm}, {show_bytes(memory_N.nbytes)}"
    return VerifyRow(
        size=memory_N.nbytes,
        count=len(memory_N),
        algorithm=communicator.algorithm,
        largest_error=worst if math.isfinite(worst) else None,
        bound_share=worst / limit if math.isfinite(worst) else None,
        repetitions=repetitions,
        num_repeated=num_repeated,
        ranks_agree=ranks_agree,
        findings=tuple(f"{where}: {each}" for each in findings),
    )


def _find_odd_bits(digests: Sequence[Sequence[str]]) -> list[str]:
    """Return a sentence for ranks whose first sum has other bits, and for those whose later sums have. By rank."""
    usual = Counter(of_rank[0] for of_rank in digests).most_common(1)[0][0]
    odd = [rank for rank, of_rank in enumerate(digests) if of_rank[0] != usual]
    changed = [rank for rank, of_rank in enumerate(digests) if len({*of_rank}) > 1]
    return [
        *([f"{name_ranks(odd)} got other bits than the others"] if odd else []),
        *([f"repetitions gave other bits than the first sum on {name_ranks(changed)}"] if changed else []),
    ]
