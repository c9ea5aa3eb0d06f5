"""Table of all checks of a single host, which docs/preflight.md shows. Pure.

A finding makes a job fail, or slow for certain; a remark also occurs on healthy hosts.
"""

from collections import Counter
from collections.abc import Iterator

from bigbatch.trainer.preflight.check import Check, Host
from bigbatch.trainer.preflight.gpu_checks import GPU_CHECKS
from bigbatch.trainer.preflight.network_checks import NETWORK_CHECKS

LEAST_OPEN_FILES = 1024
"""Open files for connections, shards and libraries: Linux's default limit."""
FILES_PER_RANK = 4
"""Open files per rank of the store process, to which all ranks connect; it raises its own limit as far as allowed."""
LEAST_TASKS = 256
"""Least tasks of a rank: threads of NCCL, the loader and libraries."""
LEAST_MEMORY_BYTES = 1e9
"""Least memory of a rank: PyTorch alone."""


def _open_files(host: Host) -> Iterator[str]:
    most = LEAST_OPEN_FILES + FILES_PER_RANK * host.world_size
    if host.limits.open_files < LEAST_OPEN_FILES:
        yield f"a rank may open {host.limits.open_files:,.0f} files, below {LEAST_OPEN_FILES:,}"
    elif host.limits.most_open_files < most:
        yield f"{host.limits.most_open_files:,.0f} open files at most, below {most:,} for {host.world_size:,} ranks"


def _tasks(host: Host) -> Iterator[str]:
    if host.limits.tasks < LEAST_TASKS * host.num_ranks:
        yield f"{host.limits.tasks:,.0f} more threads may start, below {LEAST_TASKS} for each of {host.num_ranks} ranks"


def _memory(host: Host) -> Iterator[str]:
    least = LEAST_MEMORY_BYTES * host.num_ranks
    if host.limits.memory_bytes < least:
        left = host.limits.memory_bytes / 1e9
        yield f"{left:,.1f} GB of memory left, below {least / 1e9:g} for {host.num_ranks} ranks"


def _cores(host: Host) -> Iterator[str]:
    if host.limits.cores < host.num_ranks:
        yield f"{host.limits.cores:g} cores for {host.num_ranks} ranks"


LIMIT_CHECKS = (
    Check(
        "open files",
        "files that a rank may open",
        f"below {LEAST_OPEN_FILES:,}; at most below {LEAST_OPEN_FILES:,} and {FILES_PER_RANK} for each rank of the job",
        "raise it (ulimit -n; LimitNOFILE of slurmd; --ulimit nofile=16384)",
        _open_files,
        is_finding=False,
    ),
    Check(
        "threads",
        "threads that the control group still allows",
        f"below {LEAST_TASKS} for each rank",
        "raise pids.max of the job (--pids-limit of a container)",
        _tasks,
        is_finding=False,
    ),
    Check(
        "memory",
        "memory that the control group leaves",
        f"below {LEAST_MEMORY_BYTES / 1e9:g} GB for each rank",
        "ask for more (--mem of Slurm, --memory of a container)",
        _memory,
        is_finding=False,
    ),
    Check(
        "cores",
        "cores that the control group leaves",
        "fewer than ranks",
        "ask for more (--cpus-per-rank)",
        _cores,
        is_finding=False,
    ),
)
CHECKS = (*GPU_CHECKS, *NETWORK_CHECKS, *LIMIT_CHECKS)
"""All checks, in the order of the report."""


def find_troubles(host: Host) -> dict[str, list[str]]:
    """Apply all checks; return name -> faults, for checks that found any."""
    found = {check.name: list(check.find(host)) for check in CHECKS}
    return {name: texts for name, texts in found.items() if texts}


def links_are_broken(host: Host) -> bool:
    """Tell whether measuring links would fail for certain."""
    return any(True for check in CHECKS if check.breaks_links for _ in check.find(host))


def describe_hardware(host: Host) -> dict[str, str]:
    """Return the facts that must be equal on all hosts."""
    shown = {}
    if host.on_gpus:
        rates = Counter(port.gbit_per_second for port in host.usable_ports)
        shown["RDMA ports"] = ", ".join(f"{count} of {rate:g} Gbit/s" for rate, count in sorted(rates.items()))
        # not how many: a node may have fewer ranks than others
        widths = {row["pcie.link.width.current"] for uuid, row in host.driver.health.items() if uuid in host.own_gpus}
        shown["PCIe lanes"] = ", ".join(sorted(widths))
        shown["NVLinks"] = ", ".join(map(str, sorted({links.active for links in host.driver.links.values()})))
    return {name: text for name, text in shown.items() if text}
