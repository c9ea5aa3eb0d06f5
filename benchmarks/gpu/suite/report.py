"""Judge a record: targets that it meets, losses against the last record, and its page in Markdown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.suite import exact_sums, prototypes, recipes, training
from benchmarks.gpu.suite.cifar import RECIPE
from benchmarks.gpu.suite.torchvision_peer import SCRIPT
from benchmarks.record import table

MAX_LOST = 0.05
"""Share of a rate, or added share of a time, that may be lost without failing."""
WATCHED = {"images/s": 1, "TFLOP/s": 1, "GB/s": 1, "s": -1}
"""Units: 1 if more is better, -1 if less is. Ratios are not watched: a peer may have become faster."""
DIGITS = 9
"""Rounding, so that a loss of exactly 5% passes."""

Case = Mapping[str, Any]
Figure = Mapping[str, Any]


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
    """A part of the device's name, if the target is for that device only."""

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
            ("calibration", training.CALIBRATION),
            least=round(0.98 * rate),
            device=card,
        )
        for card, rate in training.PUBLISHED.items()
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
    *(
        Target(
            f"{name}: images/s of its own step, of one ghost batch of 256",
            (f"recipes/{name}", recipes.RATIO),
            least=0.97,
        )
        for name in recipes.recipes()
    ),
    *(
        Target(
            f"prototype {name}: largest ratio to today's time, or the best setting's",
            (f"prototypes/{name}", prototypes.RATIO),
            most=0.95,
        )
        for name in prototypes.names()
    ),
    *(
        Target(
            f"ResNet-50 {precision}: images/s from files, of those generated",
            ("training/pictures", precision),
            over=("training/generated", precision),
            least=0.95,
        )
        for precision in ("bf16", "fp16")
    ),
    Target("a step's wait for images, of ResNet-50 from files", ("feed", "input wait"), most=0.01),
    Target("evaluation against decoding alone", ("evaluation", "evaluation / decoding"), most=1.05),
    Target(
        "seconds of an evaluation: 50,000 images at the 4,985/s of an H100's training from JPEG, and 5%",
        ("evaluation", "evaluation with dali, 50,000 images"),
        most=10.5,
    ),
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


@dataclass(frozen=True)
class Comparison:
    """An earlier figure beside the new one, which is None if it was not measured."""

    name: str
    unit: str
    before: float
    now: float | None
    noise: float
    """Distance of the quartiles as a share of the median, for the noisier of the two."""

    @property
    def loss(self) -> float:
        """Return the lost share of the rate, or the added share of the time; negative if it improved."""
        if self.now is None:
            return 1.0
        lost = 1 - self.now / self.before if WATCHED[self.unit] > 0 else self.now / self.before - 1
        return round(lost, DIGITS)

    @property
    def has_lost(self) -> bool:
        return self.loss > MAX_LOST

    def __str__(self) -> str:
        now = "not measured" if self.now is None else f"{self.now:,.4g}"
        change = "" if self.now is None else f", {abs(self.loss):.1%} {'worse' if self.loss > 0 else 'better'}"
        verdict = "LOST " if self.has_lost else "ok   "
        return (
            f"{verdict}{self.name:48} {self.before:>10,.4g} -> {now:>12} {self.unit}{change} (noise {self.noise:.1%})"
        )


def compare_case(before: Case, now: Case) -> list[Comparison]:
    """Compare every watched figure of the earlier record of a case. New figures have nothing to lose."""
    return [
        _compare(name, figure, now["figures"].get(name))
        for name, figure in before["figures"].items()
        if figure["unit"] in WATCHED
    ]


def _compare(name: str, before: Figure, now: Figure | None) -> Comparison:
    noise = max(_noise(each) for each in (before, now) if each is not None)
    return Comparison(name, before["unit"], before["median"], None if now is None else now["median"], noise)


def _noise(figure: Figure) -> float:
    return (figure["q3"] - figure["q1"]) / figure["median"]


def page(record: Mapping[str, Any]) -> str:
    """Write targets, then each case: its figures, its tables, missing measurements, and its conditions."""
    title = f"# {record['device']}: benchmarks/gpu"
    if record["size"] != "full":
        return "\n\n".join([title, "Small size: shows that all cases run, and no figure of it means anything.\n"])
    cases = record["cases"]
    return "\n\n".join([title, targets(record), *(case(name, each) for name, each in cases.items())]) + "\n"


def targets(record: Mapping[str, Any]) -> str:
    """Write this device's targets, and whether they are met."""
    rows = []
    for target in (each for each in TARGETS if each.device in record["device"]):
        value = target.value(record["cases"])
        verdict = "not measured" if value is None else "yes" if target.is_met(value) else "NO"
        rows.append([target.words, target.bound, "" if value is None else number(value), verdict])
    return table(("target", "wanted", "found", "met"), rows)


def case(name: str, found: Mapping[str, Any]) -> str:
    """Write a case's section."""
    figures = [
        [each, number(f["median"]), f"{number(f['min'])} to {number(f['max'])}", str(f["n"]), f["unit"]]
        for each, f in found["figures"].items()
    ]
    parts = [f"## {name}", table(("figure", "median", "spread", "n", "unit"), figures)]
    for rows in filter(None, found["tables"].values()):
        cells = [[each if isinstance(each, str) else number(each) for each in row.values()] for row in rows]
        parts.append(table(tuple(rows[0]), cells))
    parts += [f"Left out: {what}: {why}" for what, why in found["left_out"].items()]
    parts += [f"Failed: {why}" for why in [found.get("failure")] if why]
    conditions = found["conditions"]
    shown = (
        "date",
        "commit",
        "torch_build",
        "cuda",
        "cudnn",
        "driver",
        "power_limit",
        "sm_clock",
        "temperature_celsius",
        "precision",
        "clock",
    )
    parts.append("Conditions: " + ", ".join(f"{key} {conditions[key]}" for key in shown if conditions.get(key)) + ".")
    return "\n\n".join(parts)


def number(value: float | None) -> str:
    """Show a number with four digits."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
