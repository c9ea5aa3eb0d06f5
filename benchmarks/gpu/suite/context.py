"""Input and result of a case."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import spread


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a measurement."""

    name: str
    model: str
    image_size: int
    num_classes: int
    batch: int
    local_batches: tuple[int, ...]
    steps: int
    """Steps between two readings of the clock; on a GPU at least as many as a replay needs."""
    rounds: int
    """Turns of each contestant."""
    eval_images: int
    matmul: int
    """Rows and columns of the product that measures the device's peak."""
    copy_bytes: int
    repeats: int
    """Readings of the clock for a peak."""
    calls: int
    """Calls between two readings: a launch and a reading take longer than the smallest layers."""


FULL = Size(
    name="full",
    model="resnet50",
    image_size=224,
    num_classes=1000,
    batch=256,
    local_batches=(16, 32, 50, 64, 128, 256, 400),
    steps=20,
    rounds=7,
    eval_images=50_000,
    matmul=8192,
    copy_bytes=2**30,
    repeats=7,
    calls=10,
)
SMALL = Size(
    name="small",
    model="resnet18",
    image_size=32,
    num_classes=10,
    batch=2,
    local_batches=(2, 3),
    steps=1,
    rounds=1,
    eval_images=20,
    matmul=128,
    copy_bytes=2**20,
    repeats=1,
    calls=1,
)


TOO_LONG = "left out small on a CPU: compiling takes longer than all the rest"


@dataclass(frozen=True, kw_only=True)
class Context:
    """Device and size of the measurements, and the folders that only the user can name."""

    size: Size
    device: torch.device
    scratch: Path
    """An empty folder for a case's files."""
    data: Path | None = None
    """Images like ImageNet's, in class folders or shards."""
    cifar: Path | None = None
    vision: Path | None = None
    """references/classification of a checkout of torchvision."""
    airbench: Path | None = None
    """A checkout of cifar10-airbench."""
    seeds: int = 5

    @property
    def is_small(self) -> bool:
        return self.size.name == "small"

    @property
    def precision(self) -> str:
        """Return bf16, but fp32 for the small size on a CPU: few of them have instructions for bf16."""
        return "bf16" if self.compiles else "fp32"

    @property
    def compiles(self) -> bool:
        """Return whether to compile: not at the small size on a CPU, where compiling takes longer than all the rest."""
        return not (self.is_small and self.device.type == "cpu")


@dataclass
class Found:
    """Results of a case."""

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name: unit and spread."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Missing measurements, and why."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Title: rows with the same columns, computed from the figures or measured beside them."""
    failure: str = ""
    """Why the part fails after its figures are kept; empty if it does not."""
    conditions: dict[str, Any] = field(default_factory=dict)
    """Conditions of this case alone, beside the common ones."""

    def add(self, name: str, values: Sequence[float], *, unit: str) -> None:
        """Add a figure. The guard watches images/s, s, TFLOP/s and GB/s, not ratio and share."""
        self.figures[name] = {"unit": unit, **spread(values)}

    def keep(self, name: str, figure: Mapping[str, float], *, unit: str) -> None:
        """Add a figure whose spread is in a script's record."""
        self.figures[name] = {"unit": unit, **figure}

    def median(self, name: str) -> float:
        """Return the median of a figure."""
        return float(self.figures[name]["median"])
