"""An examination within a budget: probes of known speed, and a clock that they move; nothing is measured."""

import io
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bigbatch.errors import DoctorError
from bigbatch.tools.doctor import command as doctor_command
from bigbatch.tools.doctor.budget import Budget
from bigbatch.tools.doctor.examine import IMAGES, Examination, ExaminationResults
from bigbatch.tools.doctor.exchange import Probes
from bigbatch.tools.doctor.speedups import part_of_images
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config, lookup, try_values

FACTS = {
    "device": "cpu",
    "device_type": "cpu",
    "torch": "2",
    "capability": None,
    "num_cores": 2,
    "world_size": 1,
    "has_cpu_bf16": True,
}
CONFIGS = {name: load_config(["--config", name]) for name in ("quickstart", "cifar10_10epochs", "imagenet/resnet50_8k")}


@dataclass
class Machine:
    """Starts probes on a machine of known slowness, and counts the seconds that it is kept busy."""

    config: Config
    seconds_per_image: float
    start_seconds: float
    factors: Mapping[str, float] = field(default_factory=dict)
    """By key: how many times as long a step takes with it."""
    now: float = 0.0

    def spend(self, seconds: float, *, limit: float) -> None:
        self.now += min(seconds, limit)
        if seconds > limit:
            raise DoctorError(f"took longer than {limit:.0f} s, and was ended")

    def start(self, values: Mapping[str, Any]) -> "Process":
        self.spend(self.start_seconds, limit=math.inf)
        return Process(self, values)


class Process:
    """Answers as a probe does, after the time that its steps take."""

    facts: Mapping[str, Any] = FACTS
    other_seconds = 1.0

    def __init__(self, machine: Machine, values: Mapping[str, Any]) -> None:
        self.machine, self.values = machine, dict(values)
        self._warm: set[str] = set()

    @property
    def step_seconds(self) -> float:
        factor = math.prod(self.machine.factors.get(key, 1.0) for key in self.values)
        return self.num_images * self.machine.seconds_per_image * factor

    @property
    def num_images(self) -> int:
        batch = self.machine.config.batch
        return int(self.values.get("batch.global_batch_size", batch.global_batch_size))

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> dict[str, Any]:
        step = self.step_seconds
        if what == "shrink":
            self.values |= details["values"]
            taken, found = 1.0, {}
        elif what == "estimate":
            taken = max(0.5, 4 * self.machine.seconds_per_image)
            found = {"flops_per_image": 1e9, "seconds_per_image": self.machine.seconds_per_image}
        elif what == "steps":
            warm = 0.0 if details["batches"] in self._warm else 3 * step
            self._warm.add(details["batches"])
            taken = warm + max(step, details["seconds"]) + 2 * details["flushes"] * step
            found = {"images": self.num_images, "seconds": step, "wait_seconds": 0.0, "exposed_seconds": 0.0}
            found |= {"steps": 1, "peak_bytes": 1}
        elif what == "profile":
            taken, found = max(4 * step, 3 * details["seconds"]), {"busy_share": None, "seconds": step, "phases": {}}
        else:
            taken, found = self.other_seconds, {"peak_flops": 1e12}
        self.machine.spend(taken, limit=limit_seconds)
        return found

    def close(self) -> None:
        self.machine.now += 0.3

    kill = close


def run(machine: Machine, *, seconds: float = 60.0) -> ExaminationResults:
    budget = Budget(seconds, clock=lambda: machine.now, started=0.0)
    probes = Probes(machine.start, limit_seconds=lambda: budget.limit(300.0))
    findings = ExaminationResults()
    Examination(
        config=machine.config,
        full_config=machine.config,
        batches=IMAGES,
        seconds=0.5,
        turns=3,
        only=(),
        budget=budget,
        probes=probes,
        findings=findings,
        say=lambda text: None,
    ).run()
    return findings


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seconds_per_image", [1e-4, 5e-3, 0.03, 0.5])
@pytest.mark.parametrize("start_seconds", [2.0, 6.0, 12.0])
def test_examination_ends_within_its_budget(name: str, seconds_per_image: float, start_seconds: float) -> None:
    machine = Machine(CONFIGS[name], seconds_per_image, start_seconds)
    findings = run(machine)
    assert machine.now <= 60
    assert findings.is_complete
    assert findings.rates is not None
    assert findings.rates.together == pytest.approx(1 / seconds_per_image)  # however few images were measured
    late = [each for each in findings.unmeasured if "no time left" in each.why]
    assert any(each.name == "compile" and "--only compile" in each.why for each in late)
    if start_seconds < 6:
        assert findings.rows


def test_likeliest_speedups_come_first() -> None:
    findings = run(Machine(CONFIGS["quickstart"], 1e-3, 4.0, {"optimizer.precision": 0.5}))
    assert [row.candidate.name for row in findings.rows][:2] == ["precision", "precision"]
    assert findings.rows[0].is_taken
    assert findings.advice["optimizer.precision"] == "bf16_autocast"  # of two as fast the first


def test_speedup_that_is_slower_than_foreseen_is_cut_off() -> None:
    machine = Machine(CONFIGS["quickstart"], 4e-3, 3.0, {"optimizer.precision": 100.0})
    findings = run(machine)
    assert machine.now <= 60
    assert "was ended" in findings.rows[0].failure


def test_start_and_turns_of_what_only_names_may_take_longer_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, findings = Machine(CONFIGS["quickstart"], 0.03, 25.0), ExaminationResults()

    def start(config: Config, folder: Path, *, num_ranks: int, start_seconds: float) -> Process:
        machine.spend(machine.start_seconds, limit=start_seconds)
        return Process(machine, {})

    monkeypatch.setattr(doctor_command, "ProbeChild", start)
    doctor_command._examine(
        doctor_command._parser().parse_args(["--config", "quickstart", "--quick", "--only", "layout"]),
        findings,
        Console(file=io.StringIO()),
        config=machine.config,
        full_config=machine.config,
        budget=Budget(60.0, clock=lambda: machine.now, started=0.0),
    )
    assert [(row.candidate.name, row.failure) for row in findings.rows] == [("layout", "")]
    assert findings.unmeasured == []


def test_nothing_is_cut_or_left_out_without_a_budget() -> None:
    findings = run(Machine(CONFIGS["quickstart"], 0.05, 20.0), seconds=math.inf)
    assert findings.part == {}
    assert {"compile", "recompute", "microbatch"} <= {row.candidate.name for row in findings.rows}
    assert not any("no time left" in each.why for each in findings.unmeasured)


@pytest.mark.parametrize(
    ("used", "images", "options", "code"),
    [
        (19.0, 64, (), 0),
        (19.0, 64, ("--out",), 1),  # nothing is recommended, so the file is not written
        (19.0, 0, (), None),  # there is no result
        (1.0, 64, (), None),  # another reason than the budget's end
    ],
)
def test_doctor_prints_what_it_has_measured_when_its_budget_ends(
    used: float,
    images: int,
    options: tuple[str, ...],
    code: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a busy machine a start alone may take it all."""

    def slow(arguments: object, findings: ExaminationResults, console: object, **_: object) -> None:
        findings.steps = {"images": images, "seconds": 8.0} if images else {}
        raise DoctorError("took longer than 3 s, and was ended")

    monkeypatch.setattr(doctor_command, "_examine", slow)
    monkeypatch.setattr(doctor_command, "Budget", partial(Budget, clock=lambda: used, started=0.0))
    words = ["--config", "quickstart", "--within", "20"]
    words += [each for name in options for each in (name, f"{tmp_path}/x")]
    if code is None:
        with pytest.raises(DoctorError, match=r"was ended$"):
            doctor_command.main(words)
        return
    assert doctor_command.main(words) == code
    out, err = capsys.readouterr()
    assert "whole steps: 8 images/s (64 images in 8.0 s)" in out
    assert "nothing is recommended" in out
    assert "was ended; --within 20 is too short here" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("start_seconds", "probe_seconds"), [(70.0, 1.0), (40.0, 30.0)])
def test_config_is_measured_although_its_start_took_the_whole_budget(
    start_seconds: float, probe_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine: speedups are left out, and a part that takes more than a third of the budget is cut."""
    machine, findings = Machine(CONFIGS["quickstart"], 1e-3, start_seconds), ExaminationResults()
    monkeypatch.setattr(Process, "other_seconds", probe_seconds)

    def start(config: Config, folder: Path, *, num_ranks: int, start_seconds: float) -> Process:
        machine.spend(machine.start_seconds, limit=start_seconds)
        return Process(machine, {})

    monkeypatch.setattr(doctor_command, "ProbeChild", start)
    with pytest.raises(DoctorError, match="longer than 20 s") if probe_seconds > 20 else nullcontext():
        doctor_command._examine(
            doctor_command._parser().parse_args(["--config", "quickstart", "--quick"]),
            findings,
            Console(file=io.StringIO()),
            config=machine.config,
            full_config=machine.config,
            budget=Budget(60.0, clock=lambda: machine.now, started=0.0),
        )
    assert findings.steps["images"] > 0
    assert findings.is_complete == (findings.rates is not None) == (probe_seconds < 20)
    assert any("no time left" in each.why for each in findings.unmeasured) == findings.is_complete
    assert not findings.rows


@pytest.mark.parametrize(
    ("name", "num_images", "expected"),
    [
        ("quickstart", 1e9, {}),
        ("quickstart", 300, (256, 128, 128)),  # two of four microbatches
        ("quickstart", 127, (127, 127, 127)),  # a microbatch is one ghost batch
        ("cifar10_10epochs", 511, (256, 256, 32)),
        ("cifar10_10epochs", 40, (32, 32, 32)),
        ("imagenet/resnet50_8k", 0.3, (2, 2, 2)),
    ],
)
def test_part_of_a_step(name: str, num_images: float, expected: Any) -> None:
    config = CONFIGS[name]
    part = part_of_images(config, num_images, world_size=1)
    cut = try_values(config, part, world_size=1)
    assert isinstance(cut, Config)
    if expected:
        assert (cut.batch.global_batch_size, cut.batch.microbatch_size, cut.batch.bn_span) == expected
    else:
        assert part == expected
    assert all(lookup(cut, key) == part[key] for key in part)
