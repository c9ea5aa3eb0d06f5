"""What the twin assumes of hardware and software: each constant has one cause, and none belongs to a single row.

PUBLISHED: read from what somebody else measured. ASSUMED: set by us so that published rows of many systems come out,
and then left alone; docs/simulate.md says on which rows, and what the error is.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

GIGABIT = 1e9 / 8
"""Bytes per second."""

BACKWARD_SHARE = 2 / 3
"""Of computing: backward has two products for each of forward's. Source: the operations of a convolution."""


@dataclass(frozen=True)
class Constants:
    """Holds what the step's model is made of; seconds, bytes per second and shares."""

    seconds_per_tensor: float = 22e-6
    """Of a step, whatever the batch: the least time of the four or five kernels that a parameter has in forward,
    backward and update. ASSUMED, about 5 us each; 3.5 ms for ResNet-50's 161."""
    eager_seconds_per_tensor: float = 65e-6
    """The same before 2021: hosts started each kernel, a convolution, its norm, the weight's norm and its update each
    by itself. ASSUMED, about thirteen kernels; 10 ms for ResNet-50. Published forward passes of one V100 alone have
    1.5 ms that no picture explains (NVIDIA's examples of 2020)."""
    graph_seconds_per_tensor: float = 14e-6
    """The same where software of 2023 and later replays steps as CUDA graphs. ASSUMED."""
    link_share: float = 0.8
    """Of a link's stated rate that an all-reduce of large buffers reaches. PUBLISHED: NCCL's tests reach 0.74 to 0.9
    between nodes and 0.78 to 1 over NVLink (ANCHORS D3)."""
    inside_latency_seconds: float = 4e-6
    """Of a hop between two GPUs of a node. PUBLISHED: NCCL's own tables of 2019 and later, 3.4 to 5.7 us."""
    across_latency_seconds: float = 20e-6
    """Of a hop between nodes. PUBLISHED: NCCL's own tables, 9.6 to 14 us and more over switches; ASSUMED 20."""
    old_hop_seconds: float = 12e-6
    """Of each hop of the rings that NCCL had before its trees (2.4, 2019). ASSUMED."""
    launch_seconds: float = 40e-6
    """What each all-reduce takes from computing, hidden or not: its kernel's start and the GPU's share that it holds.
    ASSUMED, from one framework's rows with 25 and with 1 MiB buffers."""
    cycle_seconds: float = 2e-3
    """How long Horovod gathers gradients before each sum, at least. ASSUMED from its default cycle of 5 ms (2018)."""
    host_bytes_per_second: float = 2.5e9
    """Of MPI's all-reduce in host memory. ASSUMED."""
    host_tensor_seconds: float = 1.5e-4
    """What MPI in host memory takes for each gradient: negotiation and two copies. ASSUMED."""
    host_node_seconds: float = 4e-3
    """What each doubling of nodes adds to it. ASSUMED."""
    socket_bytes_per_second: float = 1.1e9
    """Of NCCL over sockets, one process per GPU and no tuning, where the Ethernet's rate is not stated. ASSUMED: 8.8
    Gbit/s, what one thread's socket carries."""
    slow_socket_bytes_per_second: float = 0.25e9
    """The same from virtual machines of the K80's time. ASSUMED."""
    socket_step_seconds: float = 36e-3
    """What crossing sockets adds to each step, whatever its bytes: with them nothing hides behind backward. ASSUMED."""
    socket_node_seconds: float = 4e-3
    """What each doubling of nodes adds to that. ASSUMED."""
    most_servers: int = 8
    """Parameter servers of a job whose number is not stated. ASSUMED."""
    server_bytes_per_second: float = 1.85 * GIGABIT
    """Of a small virtual machine's Ethernet whose rate is not stated. ASSUMED."""
    straggler_share: float = 0.004
    """How much longer than one node the slowest of 2, 4, 8 nodes computes: this for each doubling. ASSUMED."""
    server_straggler_share: float = 0.022
    """The same where virtual machines share hosts, and parameter servers wait for all. ASSUMED."""
    input_share: float = 0.02
    """What real pictures cost more across nodes than in one: their decoding disturbs the slowest node. ASSUMED."""
    unstated_gbit_per_device: float = 100.0
    """Of a network that is not stated. ASSUMED: a card of 100 Gbit/s for each accelerator."""


DEFAULTS = Constants()

INSIDE_BYTES_PER_SECOND = {
    # what an all-reduce of large buffers reaches between the accelerators of a node, in bytes per second and direction
    "nvlink4": 300e9,  # PUBLISHED: ANCHORS D3, 8 x H100 and H200 360 to 480 GB/s, from 64 MB on
    "nvlink3": 180e9,  # PUBLISHED: 230 to 250 GB/s with large buffers; 50 MB get less
    "nvlink2": 90e9,  # PUBLISHED: about 130 GB/s with large buffers over six links
    "nvlink1": 50e9,  # ASSUMED: four links of 20 GB/s
    "nvlink": 300e9,
    "pcie5": 30e9,  # ASSUMED
    "pcie4": 18e9,  # PUBLISHED: 35 to 45 GB/s on the bus of newer hosts; ASSUMED half
    "pcie": 8e9,  # ASSUMED: 16 lanes of PCIe 3, several devices at a switch
    "hccs": 25e9,  # ASSUMED
    "ipulink": 50e9,  # ASSUMED
    "10x100gbe": 90e9,  # as its links say
    "torus": 150e9,  # PUBLISHED: four to six links of 62 to 82 GB/s of a TPU v2 to v4; ASSUMED half of them
    "": 15e9,  # ASSUMED, where nothing is stated
}
"""By the beginning of the link's name as `_plain` spells it; the longest that fits counts."""

RESNET50_RATES: dict[str, tuple[float | None, float | None]] = {
    # images per second of one accelerator in training, at its usual local batch: fp32, then fp16, bf16 or mixed
    "NVIDIA K80": (52, None),  # PUBLISHED: half a card; TensorFlow's page of 2017 and Azure Batch AI
    "NVIDIA P100": (212, None),  # PUBLISHED: TensorFlow's page of 2017
    "NVIDIA P40": (169, None),  # PUBLISHED: Azure Batch AI
    "NVIDIA V100S": (350, 1370),
    "NVIDIA V100 SXM3 32GB 450 W": (None, 1560),  # of DGX-2H
    "NVIDIA V100": (350, 1370),  # PUBLISHED: DLPerf; MLPerf v0.5 to v0.7, and likewise below
    "NVIDIA A100": (None, 3240),
    "NVIDIA A10G": (None, 940),
    "NVIDIA A30": (None, 1590),
    "NVIDIA A40": (None, 1350),
    "NVIDIA RTX A5000": (None, 1320),
    "NVIDIA L4": (None, 730),
    "NVIDIA L40": (None, 2000),
    "NVIDIA L40S": (None, 2020),
    "NVIDIA H100": (None, 7050),
    "NVIDIA H100 PCIe": (None, 4000),
    "NVIDIA H200": (None, 7950),
    "Habana Gaudi": (None, 1640),
    "Habana Gaudi2": (None, 5740),
    "node of 8 Xeon 8380H": (None, 819),
    "node of 8 Xeon 8376H": (None, 734),  # ASSUMED: by the clock that its data sheet states, 2.6 of 2.9 GHz
    "Ascend 910": (None, 1700),  # of 512, in MLPerf v0.7
    "TPU v2": (None, 550),
    "TPU v3": (None, 910),
    "TPU v4": (None, 3480),
    "Graphcore IPU": (None, 1700),
    "Graphcore Bow": (None, 2490),
}
"""By the first words of the accelerator's name; the longest that fits counts. Medians of published rows in one node."""


def inside_bytes_per_second(link: str) -> float:
    """Look up what the links inside a node carry: NVLink 4, NVLink4, nvlink 4.0, PCIe Gen4 x16, ..."""
    return INSIDE_BYTES_PER_SECOND[_longest(INSIDE_BYTES_PER_SECOND, _plain(link))]


def stated_gbit_per_s(link: str) -> float | None:
    """Read the rate out of a link's name: 8 x HDR InfiniBand 200 Gb/s -> 1600; None where none is stated."""
    count = re.match(r"(\d{1,3}) *x ", link)
    rate = re.search(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+|\d{1,4})(\.\d+)? *(G(?:b(?:it)?(?:/s|ps)?|bE)\b|GB/s)", link)
    if not rate:
        return None
    gbit_per_s = float(rate[1].replace(",", "") + (rate[2] or "")) * (8 if rate[3] == "GB/s" else 1)
    return int(count[1] if count else 1) * gbit_per_s or None


def resnet50_rate(accelerator: str, *, is_fp32: bool) -> float | None:
    """Return the images per second of an accelerator that were published; None where none were.

    NVIDIA H100-SXM5-80GB is an H100; an NVIDIA A4000 is no A40.
    """
    words = accelerator.replace("-", " ") + " "
    name = max((name for name in RESNET50_RATES if words.startswith(name + " ")), key=len, default="")
    return RESNET50_RATES[name][0 if is_fp32 else 1] if name else None


def _plain(link: str) -> str:
    return re.sub(r"[^a-z0-9]|gen|v(?=\d)", "", link.lower().replace("pci-e", "pcie"))


def _longest(names: Iterable[str], text: str) -> str:
    return max((name for name in names if text.startswith(name)), key=len, default="")
