"""Figures of all-reduces by size, as in nccl-tests, and their share of the links' limit; their table and plot."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bigbatch.colours import COLOURS, new_figure
from bigbatch.comm.algorithms.by_name import travelling_dtype
from bigbatch.comm.backends.base import dtype_name
from bigbatch.comm.communicator import Communicator
from bigbatch.errors import CommError
from bigbatch.files import replacing_named
from bigbatch.tools.measure.cost_model import lower_bound_seconds
from bigbatch.tools.measure.report import Columns
from bigbatch.tools.measure.timing import AllReduceTimes
from bigbatch.words import NumberError

ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Read '25M' as 26214400: K, M and G are powers of 1024, as in nccl-tests. Raises: NumberError, also for 0."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise NumberError(f"{text!r} is not a size; give bytes, or for example 4K, 25M or 1G (powers of 1024)")
    return int(match[1]) * _UNITS[match[2].upper()]


def show_bytes(num_bytes: int) -> str:
    """Return the shortest text that parse_bytes reads back."""
    for unit in ("G", "M", "K"):
        if num_bytes >= _UNITS[unit] and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return str(num_bytes)


def sweep_counts(min_bytes: int, max_bytes: int, *, factor: int, dtype: str) -> tuple[int, ...]:
    """Return numbers of elements for sizes from min_bytes to max_bytes, each factor (at least 2) times the one before.

    Raises: CommError for a range without sizes, or sizes below one element.
    """
    if min_bytes > max_bytes:
        raise CommError(
            f"--min-bytes {show_bytes(min_bytes)} exceeds --max-bytes {show_bytes(max_bytes)}: there is no size between"
        )
    if min_bytes < ELEMENT_BYTES[dtype]:
        raise CommError(f"--min-bytes {min_bytes} holds no {dtype} element; give at least {ELEMENT_BYTES[dtype]}")
    sizes = [min_bytes]
    while sizes[-1] * factor <= max_bytes:
        sizes.append(sizes[-1] * factor)
    return tuple(size // ELEMENT_BYTES[dtype] for size in sizes)


def choose_algorithms(text: str, *, available: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the names in 'all' or 'ring,native', if available here. Raises: CommError naming the legal ones."""
    if text == "all":
        return tuple(available)
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name == "hybrid" and "hybrid" not in available:
            raise CommError("--algorithms hybrid needs --table: bigbatch comm tune makes one for this cluster")
        if name not in available:
            raise CommError(
                f"--algorithms: {name!r} is not available {where}; choose among {', '.join(available)}, or all"
            )
    return names


@dataclass(frozen=True)
class Limit:
    """Limit of the links between nodes."""

    num_nodes: int
    bytes_per_second: float
    """Bandwidth of one node's link in each direction."""
    source: str
    """Origin of the bandwidth."""
    wire_bytes_per_byte: float = 1.0
    """Below 1 if values travel in fewer bytes than they have in memory, and 2 if half precision travels in fp32."""

    def seconds(self, num_bytes: int) -> float:
        """Return the least seconds of an all-reduce over m nodes: 2(m-1)/m * bytes / bandwidth."""
        wire_bytes = num_bytes * self.wire_bytes_per_byte
        return lower_bound_seconds(wire_bytes, num_nodes=self.num_nodes, bytes_per_second=self.bytes_per_second)


@dataclass(frozen=True)
class BenchRow:
    """Figures of one algorithm at one size. GB are 1e9 bytes."""

    size: int
    """Bytes of the tensor on each rank."""
    count: int
    """Elements."""
    type: str
    redop: str
    algorithm: str
    time_us: float
    """Median over repetitions of the slowest rank's time."""
    min_us: float
    max_us: float
    algbw_gb_per_s: float
    """size / time."""
    busbw_gb_per_s: float
    """algbw * 2(n-1)/n for n ranks: comparable with a link's bandwidth for any number of ranks."""
    num_wrong: int
    """Elements, over all ranks, that differ from the exact sum."""
    limit_share: float | None
    """Time that the limit allows / time; None without a limit."""
    repetitions_us: tuple[float, ...]
    """Each repetition, in the order of measuring."""


def make_row(sums: AllReduceTimes, tensor_N: Tensor, communicator: Communicator, *, limit: Limit | None) -> BenchRow:
    """Return the figures of the timed sums of a tensor by the communicator's algorithm.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md (algbw, busbw).
    """
    size, seconds, median = tensor_N.nbytes, sums.measured.seconds, sums.measured.median
    share, n = wire_share(communicator, tensor_N), communicator.world_size
    return BenchRow(
        size=size,
        count=len(tensor_N),
        type=dtype_name(tensor_N.dtype),
        redop="sum",
        algorithm=communicator.algorithm,
        time_us=median * 1e6,
        min_us=min(seconds) * 1e6,
        max_us=max(seconds) * 1e6,
        algbw_gb_per_s=size / median / 1e9,
        busbw_gb_per_s=size / median / 1e9 * 2 * (n - 1) / n,
        num_wrong=sums.num_wrong,
        limit_share=replace(limit, wire_bytes_per_byte=share).seconds(size) / median if limit else None,
        repetitions_us=tuple(each * 1e6 for each in seconds),
    )


def wire_share(communicator: Communicator, tensor_N: Tensor) -> float:
    """Return the bytes that travel per byte of this tensor."""
    algorithm = communicator.algorithm_for(tensor_N)
    dtype = travelling_dtype(algorithm, tensor_N, wire=communicator.wire, backend=communicator.transport.backend)
    return dtype.itemsize / tensor_N.dtype.itemsize


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.3f}" if gb_per_s >= 0.01 else f"{gb_per_s:.5f}"


COLUMNS: Columns = (
    # as nccl-tests names and orders them
    ("size", "(B)", 12, lambda row: row.size),
    ("count", "(elements)", 12, lambda row: row.count),
    ("type", "", 9, lambda row: row.type),
    ("redop", "", 6, lambda row: row.redop),
    ("algorithm", "", 14, lambda row: row.algorithm),
    ("time", "(us)", 11, lambda row: _us(row.time_us)),
    ("min", "(us)", 11, lambda row: _us(row.min_us)),
    ("max", "(us)", 11, lambda row: _us(row.max_us)),
    ("algbw", "(GB/s)", 9, lambda row: _rate(row.algbw_gb_per_s)),
    ("busbw", "(GB/s)", 9, lambda row: _rate(row.busbw_gb_per_s)),
    ("#wrong", "", 7, lambda row: row.num_wrong),
    ("n", "", 4, lambda row: len(row.repetitions_us)),
    ("of limit", "(%)", 10, lambda row: "-" if row.limit_share is None else f"{100 * row.limit_share:.1f}"),
)


def mark_fastest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows of one size as the table shows them: the fastest algorithm has a star."""
    best = min(rows, key=lambda row: row.time_us)
    return [replace(row, algorithm=row.algorithm + ("*" if row is best else " ")) for row in rows]


def explain_limit(limit: Limit | None, *, num_nodes: int, shares: Mapping[str, float]) -> str:
    """Return the line above the table that explains the last column.

    shares: wire_bytes_per_byte of each algorithm; limit has the least of them.
    """
    if num_nodes == 1:
        return "of limit: all ranks are on one node, so no link limits them; busbw is over ranks"
    if limit is None:
        return "of limit: unknown, because this backend sends no messages that could measure a link; give --link-gbit"
    least = limit.wire_bytes_per_byte
    wider = [f"{name} {share:g}" for name, share in shares.items() if share != least]
    narrow = (f" * {least:g}" if least != 1 or wider else "") + (f" ({', '.join(wider)})" if wider else "")
    return (
        f"of limit: least time / time; least time = 2(m-1)/m * size{narrow} / link, with m = {num_nodes} nodes "
        f"and {limit.bytes_per_second * 8 / 1e9:.4g} Gbit/s per link, {limit.source}"
    )


MARKERS = "osD^vPX"


def plot_sweep(rows: Sequence[BenchRow], path: Path, *, limit: Limit | None, title: str, caption: str) -> None:
    """Draw busbw (log size) and time (both log) of each algorithm; the links' limit dashed. Format by path's suffix."""
    figure, (busbw_axes, time_axes) = new_figure(12, 5.2, num_panels=2)
    time_axes.set(title="Time", ylabel="time (µs), median", yscale="log")
    sizes = sorted({row.size for row in rows})
    shown = sizes[:: max(1, -(-len(sizes) // 10))]
    for axes in (busbw_axes, time_axes):
        for i, algorithm in enumerate(dict.fromkeys(row.algorithm for row in rows)):
            mine = [row for row in rows if row.algorithm == algorithm]
            axes.plot(
                [row.size for row in mine],
                [row.busbw_gb_per_s if axes is busbw_axes else row.time_us for row in mine],
                marker=MARKERS[i % len(MARKERS)],
                color=COLOURS[i % len(COLOURS)],
                markersize=5,
                linewidth=1.8,
                label=algorithm,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, labels=[show_bytes(size) for size in shown])
        axes.minorticks_off()
        axes.set_xlabel("size of the tensor (bytes)")
        axes.spines[["top", "right"]].set_visible(False)
    if limit:
        min_us = [limit.seconds(size) * 1e6 for size in sizes]
        bus_factor = rows[0].busbw_gb_per_s / rows[0].algbw_gb_per_s
        busbw = [size / us / 1e3 * bus_factor for size, us in zip(sizes, min_us, strict=True)]
        for axes, values in ((time_axes, min_us), (busbw_axes, busbw)):
            axes.plot(sizes, values, "--", color="0.45", linewidth=1.2, label="limit of the links", zorder=1)
    busbw_axes.set(title="Bus bandwidth", ylabel="busbw (GB/s)", ylim=(0, None))
    time_axes.legend(frameon=False, loc="upper left")
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(caption, fontsize=8, color="0.35")
    with replacing_named(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None, dpi=150)
