"""Targets of the figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.suite import calibration, exact_sums
from benchmarks.gpu.suite.cifar import RECIPE
from benchmarks.gpu.suite.torchvision_peer import SCRIPT


@dataclass(frozen=True)
class Target:
    """A target for the median of a figure, or for its ratio to the median of another one."""

    words: str
    figure: tuple[str, str]
    """Case, and the figure's name in it."""
    over: tuple[str, str] | None = None
    least: float | None = None
    most: float | None = None
    device: str = ""
    """A part of the device's name, if the target is of that one alone."""

    def value(self, cases: Mapping[str, Any]) -> float | None:
        """Return the value; None if it was not measured."""
        medians = [_median(cases, where) for where in (self.figure, self.over) if where is not None]
        known = [each for each in medians if each is not None]
        if len(known) < len(medians):
            return None
        return known[0] if len(known) == 1 else known[0] / known[1]

    def is_met(self, value: float) -> bool:
        """Return whether a value meets the target."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def bound(self) -> str:
        return f"at least {self.least:,g}" if self.least is not None else f"at most {self.most:,g}"


TARGETS = (
    *(
        Target(
            f"the card: images/s by the settings that give {rate:,} on an {card}, less 2%",
            ("calibration", calibration.FIGURE),
            least=round(0.98 * rate),
            device=card,
        )
        for card, rate in calibration.PUBLISHED.items()
    ),
    Target("tests marked gpu that failed", ("tests", "failed"), most=0),
    *(
        Target(f"ResNet-50 {precision}, {what}, against {SCRIPT}", (case, f"{precision} / {SCRIPT}"), least=1.3)
        for case, what in (("training/generated", "generated tensors"), ("training/pictures", "DALI"))
        for precision in ("bf16", "fp16")
    ),
    Target(
        "ResNet-50 bf16, images/s (stretch 5,000; MXNet's record 7,140)",
        ("training/generated", "bf16"),
        least=4300,
        device="NVIDIA H100",
    ),
    *(
        Target(
            f"images/s at 32 per GPU, of those at 256, {mode}",
            ("small_batches/32", mode),
            over=("small_batches/256", mode),
            least=0.9,
        )
        for mode in ("eager", "compile", "cuda_graph")
    ),
    Target("a step's wait for images, of ResNet-50 from files", ("feed", "input wait"), most=0.01),
    Target("evaluation against decoding alone", ("evaluation", "evaluation / decoding"), most=1.05),
    Target("CIFAR-10: our seconds against airbench94's", ("cifar", f"{RECIPE} seconds / airbench94 seconds"), most=1.0),
    Target("CIFAR-10: our top-1, median of the seeds", ("cifar", f"{RECIPE} top1"), least=0.94),
    Target("steps with the reducer against steps without", ("reducer", "CUDA graph, with / without"), most=1.01),
    Target(
        "LARS, as a share of ResNet-50's step at 256",
        ("lars", "bigbatch_graph"),
        over=("training/generated", "bf16 step"),
        most=0.01,
    ),
    Target("time of sums of integers against fp32's, batch 256", ("exact_sums", exact_sums.RATIO), most=1.05),
    Target("digests of virtual ranks that differ", ("exact_sums", exact_sums.DIFFERENT), most=0),
    Target(
        "images/s of the published record's class",
        ("steps", "CUDA graph"),
        least=7960,
        device="NVIDIA H200",
    ),
    Target("seconds to the first step, eager", ("startup", "eager"), most=15),
    Target("seconds to the first step, compiled, warm cache", ("startup", "compile, warm cache"), most=15),
)


def _median(cases: Mapping[str, Any], where: tuple[str, str]) -> float | None:
    case, name = where
    figure = cases.get(case, {}).get("figures", {}).get(name)
    return None if figure is None else float(figure["median"])
