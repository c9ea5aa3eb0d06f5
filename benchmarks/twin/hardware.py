"""Published rates of links inside nodes and of accelerators: for rows that do not state them.

PUBLISHED and ASSUMED as in tools/simulate/constants.py.
"""

import re
from dataclasses import dataclass

from bigbatch.tools.simulate.constants import GIGABIT, Constants

UNSTATED_GBIT_PER_DEVICE = 100.0
"""Rate of a network that states none; intervals are wider then. ASSUMED, and fitted to no row: a card of 100 Gbit/s for
each accelerator."""


@dataclass(frozen=True)
class RowConstants(Constants):
    """The simulator's constants, and those that only published rows of old software need."""

    eager_seconds_per_tensor: float = 65e-6
    """seconds_per_tensor before 2021: hosts launched each kernel by itself, such as a convolution, its norm, the
    weight's norm and its update. ASSUMED, about thirteen kernels; 10 ms for ResNet-50. Published forward passes of a
    single V100 have 1.5 ms that do not depend on the number of images (NVIDIA's examples of 2020)."""


DEFAULTS = RowConstants()

INSIDE_BYTES_PER_SECOND = {
    # what an all-reduce of large buffers reaches between the accelerators of a node, in bytes per second and direction
    "nvlink4": 450e9,  # PUBLISHED: 450 to 467 GB/s from 512 MiB on of 8 x H100 and H200, which sum in NVSwitch
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
"""Keyed by the beginning of the link's name, in lower case, without spaces, gen and v; the longest match counts."""

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
"""Keyed by the first words of the accelerator's name; the longest match counts. Medians of published one-node rows."""


LIBFABRIC = ("efa", "slingshot", "libfabric")
LIBFABRIC_LATENCY_SECONDS = 75e-6
"""Latency of a hop by NCCL's plugin for libfabric. PUBLISHED: the latency of EFA that the plugin reports to NCCL
(aws/aws-ofi-nccl, src/platform-aws.c)."""


def across_latency_seconds(link: str, constants: Constants) -> float:
    is_libfabric = any(name in link.lower() for name in LIBFABRIC)
    return LIBFABRIC_LATENCY_SECONDS if is_libfabric else constants.across_latency_seconds


def inside_bytes_per_second(link: str) -> float:
    """Return the rate of the links inside a node by name: NVLink 4, NVLink4, nvlink 4.0, PCIe Gen4 x16, ..."""
    plain = re.sub(r"[^a-z0-9]|gen|v(?=\d)", "", link.lower().replace("pci-e", "pcie"))
    return INSIDE_BYTES_PER_SECOND[max((name for name in INSIDE_BYTES_PER_SECOND if plain.startswith(name)), key=len)]


def stated_gbit_per_s(link: str) -> float | None:
    """Read the rate from a link's name: 8 x HDR InfiniBand 200 Gb/s -> 1600; None if none is stated."""
    count = re.match(r"(\d{1,3}) *x ", link)
    rate = re.search(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+|\d{1,4})(\.\d+)? *(G(?:b(?:it)?(?:/s|ps)?|bE)\b|GB/s)", link)
    if not rate:
        return None
    gbit_per_s = float(rate[1].replace(",", "") + (rate[2] or "")) * (8 if rate[3] == "GB/s" else 1)
    return int(count[1] if count else 1) * gbit_per_s or None


def resnet50_rate(accelerator: str, *, is_fp32: bool) -> float | None:
    """Return the published images per second of an accelerator; None if there are none.

    NVIDIA H100-SXM5-80GB is an H100; an NVIDIA A4000 is not an A40.
    """
    words = accelerator.replace("-", " ") + " "
    name = max((name for name in RESNET50_RATES if words.startswith(name + " ")), key=len, default="")
    return RESNET50_RATES[name][0 if is_fp32 else 1] if name else None


def across_bytes_per_second(gbit_per_s: float | None, *, devices_per_node: int, constants: Constants) -> float:
    """Return the rate of a node's links for an all-reduce; None if it is not stated."""
    stated = devices_per_node * UNSTATED_GBIT_PER_DEVICE if gbit_per_s is None else gbit_per_s
    return stated * GIGABIT * constants.link_share
