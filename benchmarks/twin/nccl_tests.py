"""Compare the simulator's all-reduce with published tables of NCCL's own tests, by size.

Bandwidths on the bus: 2 (P - 1) / P * bytes / seconds of P devices. Nothing is fitted to these tables; a link's
bandwidth is one constant, set between that of a model's buffers and the highest.

    python -m benchmarks.twin.nccl_tests
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.twin.hardware import across_bytes_per_second, inside_bytes_per_second
from bigbatch.launch.simulate.constants import DEFAULTS
from bigbatch.launch.simulate.network import Network


@dataclass(frozen=True)
class Published:
    """A table: GB/s on the bus by megabytes (10^6)."""

    name: str
    network: Network
    rows: dict[float, float]


def _network(num_nodes: int, link: str, *, gbit_per_s: float | None = None) -> Network:
    across = across_bytes_per_second(gbit_per_s, devices_per_node=8, constants=DEFAULTS)
    return Network(num_nodes, 8, inside_bytes_per_second(link), across)


TABLES = (
    # source of the first three: stas00/ml-engineering, network/README.md, August 2026
    Published(
        "8 H200, NVLink 4",
        _network(1, "NVLink 4"),
        {0.032: 1.44, 0.256: 11.7, 1: 39.9, 4: 107, 8: 155.5, 16: 219.9, 32: 275.8, 64: 346.5, 128: 401.9, 1000: 463.6},
    ),
    Published(
        "4 nodes of 8 B200, EFA 8 x 400 Gbit/s",
        _network(4, "NVLink", gbit_per_s=3200),
        {1: 5.37, 8: 35.1, 16: 64.4, 32: 91.2, 64: 156.7, 128: 197.9, 512: 326.9, 1000: 362},
    ),
    Published("8 A100, NVLink 3", _network(1, "NVLink 3"), {16000: 234.9}),
)


def errors_of(table: Published) -> dict[float, float]:
    """Return simulated over published seconds, less 1, by megabytes."""
    P = table.network.num_devices
    measured = {size: 2 * (P - 1) / P * size * 1e6 / (rate * 1e9) for size, rate in table.rows.items()}
    return {size: table.network.seconds(size * 1e6) / seconds - 1 for size, seconds in measured.items()}


def print_table(table: Published) -> None:
    """Print a line for each size."""
    P, errors = table.network.num_devices, errors_of(table)
    print(f"\n{table.name}\n{'MB':>8} {'published':>10} {'simulated':>10}  GB/s on the bus; error of the time")
    for size, rate in table.rows.items():
        simulated = 2 * (P - 1) / P * size * 1e6 / table.network.seconds(size * 1e6) / 1e9
        print(f"{size:8g} {rate:10.1f} {simulated:10.1f}  {errors[size]:+.0%}")


def main(tables: Sequence[Published] = TABLES) -> None:
    """Print all tables, and the median error of sizes that a model's gradients have."""
    for table in tables:
        print_table(table)
    for table in tables:
        sizes = {size: abs(error) for size, error in errors_of(table).items() if 1 <= size <= 128}
        if sizes:
            print(f"{table.name}: 1 to 128 MB: median error of the time {median(sizes.values()):.0%}, n = {len(sizes)}")


if __name__ == "__main__":
    main()
