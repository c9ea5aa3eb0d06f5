"""Compare the simulator's all-reduce with published tables of NCCL's own tests, by size.

busbw of P devices: 2 (P - 1) / P * bytes / seconds. Links have the published rates and latencies of
benchmarks/twin/hardware.py. The rate of PCIe depends on the host: it is that of the table's 128 MiB (of 64 MiB in the
pull request), as a cluster file states it, and that row is not compared.

    python -m benchmarks.twin.nccl_tests --out benchmarks/results/simulate-single-sums.json
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.record import conditions, write_record
from benchmarks.twin.hardware import across_bytes_per_second, across_latency_seconds, inside_bytes_per_second
from bigbatch.tools.simulate.constants import DEFAULTS
from bigbatch.tools.simulate.network import Network

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Published:
    """A published table: MiB -> busbw in GB/s."""

    name: str
    network: Network
    rows: dict[float, float]


def _network(
    num_nodes: int, link: str, *, devices_per_node: int = 8, across: str = "", gbit_per_s: float | None = None
) -> Network:
    constants = replace(DEFAULTS, across_latency_seconds=across_latency_seconds(across, DEFAULTS))
    rate = across_bytes_per_second(gbit_per_s, devices_per_node=devices_per_node, constants=constants)
    return Network(num_nodes, devices_per_node, inside_bytes_per_second(link), rate, constants=constants)


def _pcie(num_devices: int, gbyte_per_s: float) -> Network:
    return Network(1, num_devices, gbyte_per_s * 1e9, 1e9)


TABLES = (
    Published(  # stas00/ml-engineering, network/benchmarks/results, August 2026; by PyTorch
        "8 H200, NVLink 4",
        _network(1, "NVLink 4"),
        {1: 39.9, 2: 64.5, 4: 107, 8: 155.5, 16: 219.9, 32: 275.8, 64: 346.5, 128: 401.9, 256: 436.2, 1024: 463.6},
    ),
    Published(  # NVIDIA/dgxc-benchmarking, NCCL
        "8 H100, NVLink 4",
        _network(1, "NVLink 4"),
        {1: 67.0, 2: 86.9, 4: 135.4, 8: 176.8, 16: 237.2, 32: 294.7, 64: 361.7, 128: 400.5, 256: 422.3, 1024: 466.3},
    ),
    Published(  # oracle-quickstart/oci-hpc-oke
        "2 nodes of 8 A100, RoCE 16 x 100 Gbit/s, rails",
        _network(2, "NVLink 3", gbit_per_s=1600),
        {1: 23.0, 2: 39.6, 4: 61.9, 8: 90.3, 16: 111.3, 32: 139.1, 64: 153.1, 128: 163.2, 256: 165.4, 1024: 219.1},
    ),
    Published(  # eth-cscs/cscs-docs, NCCL
        "2 nodes of 4 GH200, Slingshot 4 x 200 Gbit/s",
        _network(2, "NVLink 4", devices_per_node=4, across="Slingshot", gbit_per_s=800),
        {1: 11.2, 2: 20.2, 4: 25.1, 8: 42.6, 16: 63.6, 32: 85.5, 64: 107.7, 128: 122.6},
    ),
    Published(  # stas00/ml-engineering, network/README.md, August 2026
        "4 nodes of 8 B200, EFA 8 x 400 Gbit/s",
        _network(4, "NVLink", across="EFA", gbit_per_s=3200),
        {1: 5.37, 8: 35.1, 16: 64.4, 32: 91.2, 64: 156.7, 128: 197.9, 512: 326.9, 1024: 362},
    ),
    Published(  # yumibyte/CS244C-Research, phase1-baseline/nvidial40s_4gpu_results/iteration_2
        "4 L40S, PCIe 4 of two sockets",
        _pcie(4, 15.13),
        {1: 12.29, 2: 14.41, 4: 15.24, 8: 14.93, 16: 14.66, 32: 14.89, 64: 14.96},
    ),
    Published(  # tinygrad/open-gpu-kernel-modules, pull request 22
        "4 RTX 4090, PCIe 4, peer to peer",
        _pcie(4, 12.76),
        {1: 10.30, 2: 11.58, 4: 12.32, 8: 12.57, 16: 12.63, 32: 12.69},
    ),
    Published(  # kalavai-net/kalavai-client, scripts/README.md
        "4 RTX 4090, through the host's memory",
        _pcie(4, 2.57),
        {1: 2.45, 2: 2.51, 4: 2.54, 8: 2.58, 16: 2.57, 32: 2.58, 64: 2.57, 256: 2.57, 1024: 2.58},
    ),
    Published(  # Anthony-Hoo/Anthony-Hoo.github.io, posts/AutoDL_Multi-GPU_Interconnection_Test.md
        "2 RTX 2080 Ti, PCIe 3, through the host's memory",
        _pcie(2, 4.0),
        {1: 3.75, 2: 3.89, 4: 3.94, 8: 3.97, 16: 3.99, 32: 3.99, 64: 3.99, 256: 4.0, 1024: 4.0},
    ),
)


def errors_of(table: Published) -> dict[float, float]:
    """Return simulated over published seconds, less 1, by MiB."""
    P = table.network.num_devices
    measured = {size: 2 * (P - 1) / P * size * MEBIBYTE / (rate * 1e9) for size, rate in table.rows.items()}
    return {size: table.network.seconds(size * MEBIBYTE) / seconds - 1 for size, seconds in measured.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the errors")
    options = parser.parse_args(argv)
    rows, lines = [], []
    for table in TABLES:
        print(f"\n{table.name}\n{'MiB':>8} {'published':>10} {'simulated':>10}  GB/s on the bus; error of the time")
        errors = errors_of(table)
        for size, error in errors.items():
            rate = table.rows[size]
            print(f"{size:8g} {rate:10.1f} {rate / (1 + error):10.1f}  {error:+.0%}")
        sizes = [abs(error) for error in errors.values()]
        middle, largest = median(sizes), max(sizes)
        rows.append({"table": table.name, "rows": len(sizes), "median": middle, "largest": largest})
        lines.append(f"{table.name}: median error of the time {middle:.0%}, largest {largest:.0%}, n = {len(sizes)}")
    print("", *lines, sep="\n")
    if options.out:
        write_record(options.out, {"conditions": conditions(options), "tables": rows})


if __name__ == "__main__":
    main()
