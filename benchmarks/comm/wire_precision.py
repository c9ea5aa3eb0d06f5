"""What the precision between ranks does to a sum: relative error against float64, by wire and predivide factor.

    bigbatch launch emulate run --nodes 4 --ranks-per-node 2 --link none --launcher plain --python -- \
        -m benchmarks.comm.wire_precision --out benchmarks/results/wire-precision.json

Gradients are drawn from a normal distribution, one million per rank: "small", all with a standard deviation of 1e-3;
"spread", with magnitudes over six decades, from 1 down to 1e-6, as layers differ; "large", with a standard deviation of
3e4, near fp16's largest number, so that sums overflow unless predivided. Partial sums are rounded at each hop
(comm.reduce_dtype: wire; benchmarks/comm/rounding.py has both). Prints the relative error of the whole sum
(2-norm, without what overflowed), the share of sums that are zero, and of those that overflowed.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.comm.job import run_rank
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect, make_wire
from bigbatch.comm.tuning.conditions import gather_conditions

NUM_VALUES = 1_000_000
KINDS = ("small", "spread", "large")
WIRES = ((None, 1.0), ("float16", 1.0), ("float16", None), ("bfloat16", 1.0))
"""None as predivide: the number of ranks."""


def draw(kind: str, *, rank: int) -> Tensor:
    """Draw a rank's gradients in fp32; any rank can draw any other's."""
    generator = torch.Generator().manual_seed(rank + 1)
    values_N = torch.randn(NUM_VALUES, generator=generator)
    if kind == "large":
        return 3e4 * values_N
    if kind == "spread":
        return values_N * 10 ** (-6 * torch.rand(NUM_VALUES, generator=torch.Generator().manual_seed(0)))
    return 1e-3 * values_N


def measure(
    communicator: Communicator, kind: str, algorithm: str, wire: str | None, predivide: float
) -> dict[str, object]:
    """Sum once and compare. Collective."""
    other = communicator.with_algorithm(algorithm, wire=make_wire(wire, predivide, "wire"))
    sum_N = communicator.allocate(NUM_VALUES, torch.float32)
    sum_N.copy_(draw(kind, rank=communicator.rank))
    other.sum_(sum_N, label=f"{kind} {algorithm} {wire}")
    exact_N = torch.zeros(NUM_VALUES, dtype=torch.float64)
    for rank in range(communicator.world_size):
        exact_N += draw(kind, rank=rank)
    is_finite_N = sum_N.isfinite()
    error_N = torch.where(is_finite_N, sum_N.double() - exact_N, 0.0)
    communicator.release(sum_N)
    return {
        "values": kind,
        "algorithm": algorithm,
        "wire": wire or "float32",
        "predivide": predivide,
        "relative_error": float(error_N.norm() / exact_N.norm()),
        "share_zero": float((sum_N == 0).float().mean()),
        "share_overflowed": float(1 - is_finite_N.float().mean()),
    }


def main() -> None:
    """Measure all, print and write a table on rank 0."""
    run_rank(partial(run, parse()))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Sum all kinds of values by all algorithms and wires. Collective. Raises: CommError."""
    torch.set_num_threads(1)
    communicator = connect(backend=options.backend)
    rows = []
    for kind in KINDS:
        for algorithm in communicator.algorithms:
            for wire, factor in WIRES:
                rows.append(measure(communicator, kind, algorithm, wire, factor or float(communicator.world_size)))
                if communicator.rank == 0:
                    print(
                        "  ".join(
                            f"{value:.3g}" if isinstance(value, float) else f"{value:12}" for value in rows[-1].values()
                        )
                    )
    conditions = asdict(gather_conditions(communicator))
    communicator.close()
    if communicator.rank == 0 and options.out:
        options.out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
