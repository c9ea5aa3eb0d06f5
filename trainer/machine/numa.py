"""Choose a rank's cores: those next to its GPU's memory, or its part of the host's NUMA nodes.

An image that was decoded on the other socket crosses the link between the sockets on its way to the GPU. Memory follows
the cores: Linux puts a page on the node of the thread that first writes to it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.words import spans

if TYPE_CHECKING:
    import torch


def choose_cores(
    *, usable: Sequence[int], nodes: Mapping[int, Sequence[int]], gpu_node: int | None, local_rank: int, local_size: int
) -> list[int]:
    """Return this rank's choice among the usable cores (that a launcher, Slurm or a container left); sorted.

    nodes: cores of each NUMA node. With a GPU, a rank takes all cores of its node, which the ranks there share. Without
    one (None), the ranks of the host take the nodes in blocks: one each or, with more nodes than ranks, several.
    A rank takes all usable cores if they lie in one node already, if none lies in the GPU's, or if it has no GPU and
    they are not the whole host: a launcher may have given each rank other cores, which one rank cannot know.
    """
    within = {node: sorted(set(cores) & set(usable)) for node, cores in sorted(nodes.items())}
    filled = [node for node, cores in within.items() if cores]
    if gpu_node is None:
        if not set(usable) >= set().union(*nodes.values()):
            return sorted(usable)
        # blocks of equal size, if possible; with more ranks than nodes, an empty block takes the node it begins in
        first, end = (rank * len(filled) // local_size for rank in (local_rank, local_rank + 1))
        chosen = filled[first : max(end, first + 1)]
    else:
        chosen = [gpu_node] if gpu_node in filled else []
    if len(filled) < 2 or not chosen:
        return sorted(usable)
    return sorted(core for node in chosen for core in within[node])


def parse_cores(text: str) -> list[int]:
    """Read the kernel's list format: "0-3,8" is 0, 1, 2, 3, 8; a node without cores has an empty list."""
    ranges = [[int(end) for end in part.split("-")] for part in text.strip().split(",") if part]
    return [core for ends in ranges for core in range(ends[0], ends[-1] + 1)]


def read_nodes(sys_root: Path) -> dict[int, list[int]]:
    """Return the cores of each NUMA node; empty if unknown, as in some containers."""
    paths = sys_root.glob("devices/system/node/node[0-9]*/cpulist")
    return {int(path.parent.name.removeprefix("node")): parse_cores(path.read_text()) for path in paths}


def pci_node(address: str, *, sys_root: Path) -> int | None:
    """Return the NUMA node of the device at a PCI address such as 0000:3b:00.0; None if unknown."""
    try:
        node = int((sys_root / "bus/pci/devices" / address / "numa_node").read_text())
    except OSError:
        return None
    # the kernel writes -1 if the firmware does not state it
    return node if node >= 0 else None


def pci_address(device: "torch.device") -> str:
    """Return the address of a CUDA device, as the kernel writes it. Starts CUDA."""
    import torch

    facts: Any = torch.cuda.get_device_properties(device)  # its type does not name these
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


def bind(*, device: "torch.device", local_rank: int, local_size: int, sys_root: Path = Path("/sys")) -> str | None:
    """Bind this thread, and all threads that it starts later, to choose_cores' choice; return a line for the log.

    It does not bind threads that run already: call it before the loaders and the transport start theirs.
    None if there is nothing to do: one NUMA node, a rank that its launcher bound to one, a GPU of unknown node, an
    operating system without sched_setaffinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    gpu_node = None
    if device.type == "cuda":
        gpu_node = pci_node(pci_address(device), sys_root=sys_root)
        if gpu_node is None:
            return None
    usable, nodes = sorted(os.sched_getaffinity(0)), read_nodes(sys_root)
    if len(nodes) < 2:
        return None
    cores = choose_cores(usable=usable, nodes=nodes, gpu_node=gpu_node, local_rank=local_rank, local_size=local_size)
    if cores == usable:
        return None
    os.sched_setaffinity(0, cores)
    names = sorted(node for node, members in nodes.items() if set(members) & set(cores))
    on, of = (spans(each, between=",") for each in (names, cores))
    return f"bound to NUMA node{'s' if len(names) > 1 else ''} {on}: cores {of}"
