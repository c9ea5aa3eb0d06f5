"""What the doctor concludes: closed-form rates, contestants of known speed, and configs; nothing is measured."""

import io
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from error_texts import naming
from rich.console import Console

from bigbatch.errors import ConfigError, DoctorError, RunFolderError
from bigbatch.tools.doctor import command as doctor_command
from bigbatch.tools.doctor import limit as doctor_limit
from bigbatch.tools.doctor import speedups
from bigbatch.tools.doctor.budget import Budget, Pace
from bigbatch.tools.doctor.command import introduction, main
from bigbatch.tools.doctor.examine import Examination, ExaminationResults
from bigbatch.tools.doctor.exchange import Probes, Turn
from bigbatch.tools.doctor.profile import covered
from bigbatch.tools.doctor.recommend import Greedy, SpeedComparison, TriedSpeedup, compare
from bigbatch.tools.doctor.report import print_report
from bigbatch.tools.doctor.speedups import Candidate, Machine, Unmeasured, find_candidates, part_of_step
from bigbatch.tools.simulate import cluster
from bigbatch.tools.simulate.cluster import kept_rate
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import KEYS, Config, try_values
from bigbatch.user_settings import measured_folder

CPU = Machine(device="cpu", device_type="cpu", capability=None, num_cores=4, world_size=1)
GPU = Machine(device="a GPU", device_type="cuda", capability=(9, 0), num_cores=16, world_size=1)
QUICKSTART = load_config(["--config", "quickstart"])
RESNET = load_config(["--config", "imagenet/resnet50_8k"])
RATES = doctor_limit.DoctorRates(
    together=900.0,
    input_alone=4000.0,
    model_alone=1000.0,
    wait_share=0.01,
    exposed_share=0.02,
    busy_share=None,
    flops_per_image=2e9,
    peak_flops=8e12,
)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, "compute"),
        ({"wait_share": 0.3, "exposed_share": 0.2, "input_alone": 800.0}, "input"),
        ({"wait_share": 0.3, "exposed_share": 0.2}, "cores"),  # alone the input is 4 times as fast as the model
        ({"wait_share": 0.3, "input_alone": None}, "input"),
        ({"wait_share": 0.2, "exposed_share": 0.3}, "network"),
        ({"busy_share": 0.5}, "launch"),
        ({"busy_share": 0.95}, "compute"),
        ({"busy_share": 0.5, "wait_share": 0.3, "input_alone": 800.0}, "input"),  # an idle GPU has its reason
        ({"wait_share": 0.049, "exposed_share": 0.0}, "compute"),
        ({"wait_share": 0.06, "exposed_share": None, "input_alone": 800.0}, "input"),
    ],
)
def test_limit_is_the_longest_wait(changes: dict[str, float], limit: str) -> None:
    assert doctor_limit.find_limit(replace(RATES, **changes)) == limit


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({}, ("1.0%", "2.0%", "4,000", "1,000", "900", "25.0%", "8.0 TFLOP/s")),
        ({"together": 800.0}, ("80%",)),
        ({"peak_flops": 5e10}, ("50.0 GFLOP/s",)),
        ({"wait_share": 0.06}, ("4 times", "compute.cpu_threads")),
        ({"exposed_share": None}, ("1.0%", "captured step")),
        ({"busy_share": 0.4}, ("40%",)),
    ],
)
def test_limit_is_explained_by_figures(changes: dict[str, float], figures: tuple[str, ...]) -> None:
    assert RATES.roofline_share == pytest.approx(0.25)  # 1,000 x 2e9 of 8e12
    text = "\n".join(doctor_limit.explain(replace(RATES, **changes)))
    assert re.search(naming(*figures), text)
    assert ("compete" in text) is ("together" in changes)


def test_profile_intervals_count_overlaps_once() -> None:
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 5.0
    assert covered([]) == 0.0


@dataclass(eq=False)
class Fake:
    """A contestant whose rates are known."""

    rates: Any
    is_closed: bool = False

    def run(self) -> Turn:
        if isinstance(self.rates, str):
            raise DoctorError(self.rates)
        return Turn(next(self.rates), 10**9)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Lab:
    """Starts contestants: each value multiplies the rate; what is unknown cannot be started."""

    factors: Mapping[str, float]
    wobble: tuple[float, ...] = (1.0,)
    started: list[Fake] = field(default_factory=list)

    def start(self, values: Mapping[str, Any]) -> Fake:
        rate = 100.0
        for key in values:
            if key not in self.factors:
                raise DoctorError(f"{key} does not fit")
            rate *= self.factors[key]
        self.started.append(Fake(cycle([rate * each for each in self.wobble])))
        return self.started[-1]

    def greedy(self, *names: str, noise: float = 0.02) -> tuple[Greedy, list[TriedSpeedup]]:
        greedy = Greedy(self.start({}), self.start, turns=3, noise=noise)
        return greedy, [greedy.consider(Candidate(name, {name: 1})) for name in names]


def test_comparison_is_the_median_gain_and_half_of_the_range() -> None:
    base, other = Fake(iter([100.0, 100.0, 200.0])), Fake(iter([110.0, 130.0, 240.0]))
    found = compare(base, other, turns=3)
    assert found.gain == pytest.approx(0.2)  # of 10%, 30% and 20%
    assert found.spread == pytest.approx(0.1)
    assert found.images_per_second == 130.0
    assert found.is_worth(noise=0.19)
    assert not found.is_worth(noise=0.21)
    assert not replace(found, spread=0.21).is_worth(noise=0.0)
    assert found.noise == pytest.approx(0.2)
    assert replace(found, gain=-0.01).noise == pytest.approx(0.1)


def test_rates_that_differ_from_turn_to_turn_are_marked() -> None:
    """Equal measurements differ by the larger share: of turns, or of two starts of the same config."""
    quiet = replace(ExaminationResults(), rates=replace(RATES, turns=5, spread=0.2))
    assert (quiet.spread, quiet.is_noisy) == (0.2, False)
    assert replace(quiet, rates=replace(RATES, turns=5, spread=0.201)).is_noisy
    compared = replace(quiet, noise=SpeedComparison(100.0, -0.25, 0.1, 3, 0))
    assert (compared.spread, compared.is_noisy) == (0.25, True)
    assert not replace(quiet, noise=SpeedComparison(100.0, 0.1, 0.199, 3, 0)).is_noisy
    assert ExaminationResults().spread == 0.0


def test_spread_of_rates_is_that_of_their_turns() -> None:
    """Whole steps at 90, 100 and 100 images/s, the model alone at 100, 200 and 160: half of 100 beside 160."""
    seconds = iter((1 / 90, 1 / 100, 1 / 100, 1 / 200, 1 / 100, 1 / 160))
    answers: dict[str, Any] = {
        "profile": {"seconds": 1.0, "phases": {}, "busy_share": None},
        "always": {},
        "input": {},
        "roofline": {"peak_flops": 1.0},
    }

    def ask(name: str, **values: Any) -> dict[str, Any]:
        return {"images": 1, "seconds": next(seconds), "steps": 1} if name == "steps" else answers[name]

    examination = Examination(
        config=QUICKSTART,
        full_config=QUICKSTART,
        batches="images",
        seconds=1.0,
        turns=3,
        only=(),
        budget=Budget(),
        probes=None,  # type: ignore[arg-type]
        findings=ExaminationResults(),
        say=lambda text: None,
    )
    pace = Pace(start_seconds=1.0, step_seconds=0.0, turn_seconds=1.0, turns=3, ahead=1)
    base: Any = SimpleNamespace(ask=ask)
    _, rates = examination._measure_base(base, CPU, pace=pace, flops_per_image=1.0)
    assert (rates.turns, rates.spread) == (3, pytest.approx(50 / 160))
    assert (rates.together, rates.model_alone) == (pytest.approx(100), pytest.approx(160))


def test_compare_lets_each_begin_as_often() -> None:
    """Each turn's rate is its number in time: 1 and 2, then 4 and 3, since the other one begins, 5 and 6, 8 and 7."""
    numbers = map(float, range(1, 9))
    assert compare(Fake(numbers), Fake(numbers), turns=4).gain == pytest.approx((6 / 5 + 7 / 8) / 2 - 1)


def test_greedy_takes_what_is_faster_than_the_noise_on_top_of_the_others() -> None:
    lab = Lab({"a": 1.5, "b": 1.01, "c": 0.8, "d": 1.2})
    greedy, rows = lab.greedy("a", "b", "oom", "c", "d")
    assert [row.is_taken for row in rows] == [True, False, False, False, True]
    assert rows[2].failure == "oom does not fit"
    assert [row.measured and round(row.measured.gain, 6) for row in rows] == [0.5, 0.01, None, -0.2, 0.2]
    assert greedy.taken == {"a": 1, "d": 1}
    assert [dict(row.before) for row in rows] == [{}, *[{"a": 1}] * 4]
    verified = greedy.verify()
    assert verified is not None
    assert verified.gain == pytest.approx(0.8)
    assert [each.is_closed for each in lab.started] == [False, True, True, True, False]  # base and the best stay


def test_greedy_does_not_try_again_under_another_name() -> None:
    greedy, _ = Lab({"a": 1.5, "b": 0.9}).greedy("a", "b")  # a is taken, b is not
    assert not greedy.is_new(Candidate("both", {"a": 1, "b": 1}))
    assert not greedy.is_new(Candidate("none", {"a": 1}))
    assert greedy.is_new(Candidate("further", {"a": 2}))


def test_failures_while_measuring_are_rows_and_verify_survives_them() -> None:
    failing = Fake("out of memory")
    greedy = Greedy(Fake(cycle([100.0])), lambda values: failing, turns=3, noise=0.0)
    row = greedy.consider(Candidate("a", {"a": 1}))
    assert (row.measured, row.failure, failing.is_closed) == (None, "out of memory", True)
    assert greedy.verify() is None  # nothing was taken
    fades = Fake(iter([200.0] * 3))
    greedy = Greedy(Fake(cycle([100.0])), lambda values: fades, turns=3, noise=0.0)
    assert greedy.consider(Candidate("a", {"a": 1})).is_taken
    fades.rates = "lost"
    assert greedy.verify() is None


class Process:
    """A probe's process on a GPU with room for so many."""

    running = 0

    def __init__(self, room: int) -> None:
        if Process.running >= room:
            raise DoctorError("OutOfMemoryError: CUDA out of memory")
        Process.running += 1
        self.facts: dict[str, Any] = {}

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> dict[str, Any]:
        return {"images": 10, "seconds": 2.0, "peak_bytes": 7}

    def close(self) -> None:
        Process.running -= 1

    kill = close


def test_configs_that_do_not_fit_beside_each_other_run_alone() -> None:
    Process.running = 0
    probes = Probes(lambda values: Process(room=1), limit_seconds=lambda: 1.0)
    one = probes.open({}, batches="images", seconds=1.0)
    two = probes.open({"a": 1}, batches="images", seconds=1.0)
    assert probes.is_alone
    assert [each.run() for each in (one, two, one)] == [Turn(5.0, 7)] * 3
    assert Process.running == 1
    probes.kill_all()
    assert Process.running == 0


def test_configs_that_do_not_fit_alone_either_fail_and_the_others_go_on_together() -> None:
    Process.running = 0
    rooms = {"small": 9, "large": 0}
    probes = Probes(lambda values: Process(room=rooms[values["size"]]), limit_seconds=lambda: 1.0)
    small = probes.open({"size": "small"}, batches="images", seconds=1.0)
    with pytest.raises(DoctorError, match="OutOfMemory"):
        probes.open({"size": "large"}, batches="images", seconds=1.0)
    assert not probes.is_alone
    assert small.run() == Turn(5.0, 7)
    probes.kill_all()


def names(found: list[Candidate] | list[Unmeasured]) -> set[str]:
    return {each.name for each in found}


def find(config: Config, machine: Machine, limit: str = "compute") -> tuple[list[Candidate], list[Unmeasured]]:
    measured = part_of_step(config, world_size=machine.world_size)
    return find_candidates(measured, machine, full_config=config, limit=limit)


@pytest.mark.parametrize("config", [QUICKSTART, RESNET])
@pytest.mark.parametrize("machine", [CPU, GPU, replace(CPU, world_size=2), replace(GPU, capability=(7, 0))])
def test_candidates_are_legal_and_leave_the_update_as_it_is(config: Config, machine: Machine) -> None:
    found, _ = find(config, machine)
    assert found
    for candidate in found:
        assert set(candidate.values) <= set(KEYS)
        changed = try_values(config, candidate.values, world_size=machine.world_size)
        assert isinstance(changed, Config)
        assert changed != config
        batch = changed.batch
        assert (batch.global_batch_size, batch.bn_span) == (config.batch.global_batch_size, config.batch.bn_span)
        assert batch.microbatch_size % batch.bn_span == 0
        assert replace(changed.optimizer, precision="fp32", loss_scale=None, loss_scale_growth_steps=None) == replace(
            config.optimizer, precision="fp32", loss_scale=None, loss_scale_growth_steps=None
        )


def test_speedups_are_all_tried_or_have_a_reason() -> None:
    for machine in (CPU, GPU, replace(CPU, world_size=2), replace(GPU, world_size=2)):
        tried, reasons = find(QUICKSTART, machine)
        assert ("algorithm" in names(tried)) is (machine.world_size == 2 and not machine.is_gpu)  # else native already
        expected = {"workers", "prefetch", "precision", "microbatch", "buckets", "algorithm"}
        assert expected <= names(tried) | names(reasons)
    tried, reasons = find(QUICKSTART, CPU)
    assert {"precision", "cudnn", "graph", "buckets", "algorithm"} <= names(reasons)
    assert [dict(each.values) for each in tried if each.name == "workers"] == [
        {"data.num_threads": 2},
        {"data.num_threads": 4},
    ]
    assert [dict(each.values) for each in tried if each.name == "microbatch"] == [
        {"batch.microbatch_size": 256},
        {"batch.microbatch_size": 512},
    ]


def test_speedups_against_the_limit_are_tried_first() -> None:
    two = replace(CPU, world_size=2)
    assert find(QUICKSTART, two, "input")[0][0].name == "workers"
    assert find(QUICKSTART, two, "network")[0][0].name == "buckets"
    assert find(QUICKSTART, two, "compute")[0][0].name in speedups.COMPUTE


def test_gpu_without_bf16_is_offered_fp16() -> None:
    cpu = [each for each in find(QUICKSTART, replace(CPU, has_cpu_bf16=True))[0] if each.name == "precision"]
    assert [each.values["optimizer.precision"] for each in cpu] == ["bf16_autocast", "bf16"]
    half = try_values(QUICKSTART, {"optimizer.precision": "bf16"}, world_size=1)
    assert isinstance(half, Config)
    assert not any(each.name == "precision" for each in find(half, replace(CPU, has_cpu_bf16=True))[0])
    old = [each for each in find(QUICKSTART, replace(GPU, capability=(7, 0)))[0] if each.name == "precision"]
    assert old[-1].values["optimizer.precision"] == "fp16"
    assert all(each.values["optimizer.loss_scale"] == 1024.0 for each in old)
    new = [each for each in find(QUICKSTART, GPU)[0] if each.name == "precision"]
    assert new[-1].values == {"optimizer.precision": "bf16"}
    assert new[-1].note == speedups.ROUNDS


def of(config: Config, values: Mapping[str, Any]) -> Config:
    changed = try_values(config, values, world_size=1)
    assert isinstance(changed, Config), changed
    return changed


def graphs(config: Config) -> list[dict[str, Any]]:
    return [dict(each.values) for each in find(config, GPU)[0] if each.name == "graph"]


def test_graph_is_tried_on_steps_of_any_number_of_microbatches() -> None:
    size, span = QUICKSTART.batch.global_batch_size, RESNET.batch.bn_span
    alone = {"compute.cuda_graph": True}
    assert graphs(QUICKSTART) == [alone]
    assert graphs(of(QUICKSTART, {"batch.microbatch_size": size})) == [alone]
    assert graphs(of(QUICKSTART, {"batch.microbatch_size": size, **alone})) == []
    odd = of(RESNET, {"batch.global_batch_size": 31 * span, "batch.microbatch_size": span})
    assert part_of_step(odd, world_size=1).batch.global_batch_size == span
    assert graphs(odd) == [alone]


ALEXNET = of(RESNET, {"model.name": "alexnet_bn"})


@pytest.mark.parametrize(("config", "num_blocks"), [(QUICKSTART, {2}), (RESNET, {4}), (ALEXNET, set())])
def test_recompute_of_no_more_blocks_than_there_are(config: Config, num_blocks: set[int]) -> None:
    tried = [each.values["compute.recomputed_blocks"] for each in find(config, CPU)[0] if each.name == "recompute"]
    assert set(tried) == num_blocks


def test_introduction_states_the_shares_of_the_ranks() -> None:
    batch = replace(QUICKSTART.batch, global_batch_size=7 * 8, microbatch_size=8, bn_span=8, virtual_ranks=None)
    config = replace(QUICKSTART, batch=batch)
    first, second = introduction(config, config, num_ranks=4).splitlines()
    assert first.endswith("a step of 56 images = 7 microbatches x 8 on 4 ranks")
    assert second.startswith("uneven shares: 3 ranks x 2 and 1 rank x 1 microbatches in a step")
    assert introduction(config, config, num_ranks=1).endswith("a step of 56 images = 1 rank x 7 microbatches x 8")


def test_step_of_many_microbatches_is_measured_in_part() -> None:
    size = RESNET.batch.microbatch_size
    assert RESNET.batch.global_batch_size > 8 * size
    assert part_of_step(RESNET, world_size=1).batch.global_batch_size == 8 * size
    assert part_of_step(QUICKSTART, world_size=1) is QUICKSTART


def test_change_that_is_illegal_is_told() -> None:
    assert "batch.bn_span=96 " in str(try_values(QUICKSTART, {"batch.bn_span": 96}, world_size=1))


def comparison(gain: float) -> SpeedComparison:
    return SpeedComparison(100.0 * (1 + gain), gain, 0.01, 3, 10**9)


def report(findings: ExaminationResults) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    print_report(findings, console, config=QUICKSTART, command=["bigbatch", "train", "--config", "quickstart"])
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    return text


def test_report_recommends_a_command_line() -> None:
    row = TriedSpeedup(Candidate("workers", {"data.num_threads": 2}, "note"), comparison(0.25), is_taken=True)
    failed = TriedSpeedup(Candidate("prefetch", {"data.prefetch_batches": 4}), None, "OutOfMemoryError: no room")
    findings = ExaminationResults(
        noise=comparison(0.01),
        rows=[row, failed],
        unmeasured=[Unmeasured("graph", "CUDA graphs need a GPU")],
        verified=comparison(0.24),
        taken={"data.num_threads": 2},
        advice={"data.num_threads": 2},
        is_complete=True,
    )
    parts = ("--data.num_threads 2", "+24.0% ± 1.0", "1 -> 2", "+25.0% ± 1.0", "2 -> 4: OutOfMemoryError", "need a GPU")
    assert re.search(naming("bigbatch train --config quickstart", "workers note", *parts), report(findings))
    kept = replace(findings, advice={}, verified=comparison(-0.1))
    assert "-10.0%" in report(kept)
    assert "no known speedup" in report(replace(kept, taken={}))
    assert "nothing is recommended" in report(replace(findings, is_complete=False))
    said = " ".join(report(replace(findings, noise=replace(comparison(0.02), spread=0.21))).split())
    assert "nothing is recommended: this machine is busy, and the rates above are noise, as --json says." in said
    assert "Equal measurements differ by 21%" in said
    assert "--data.num_threads 2" not in said


def test_report_tells_what_is_always_on_and_what_found_no_time() -> None:
    update = {"fused_seconds": 0.0016, "unfused_seconds": 0.0064, "times": 4.0, "turns": 24}
    looked = ExaminationResults(
        rates=RATES,
        profile={"seconds": 0.1, "phases": {"update": 0.002}, "operators": [], "syncs": {}},
        always={"update": update, "pinning": {"why": "nothing is copied"}},
        unmeasured=[Unmeasured("compile", "no time left")],
        budget_seconds=60.0,
        used_seconds=41.0,
        is_complete=True,
    )
    parts = ("1.60 ms", "6.40 ms", "4.0 times", "24 turns", "2.0% of a step", "nothing is copied", "60 s", "41 of 60 s")
    assert re.search(naming(*parts), report(looked))
    noisy = " ".join(report(replace(looked, rates=replace(RATES, turns=5, spread=0.31))).split())
    assert "Equal measurements differ by 31%" in noisy
    copies = {"bytes": 3_000_000, "pinned_seconds": 0.0005, "pageable_seconds": 0.002}
    other = replace(looked, always={"update": {"why": "muon has no other form"}, "pinning": copies}, part=PART)
    parts = ("muon has no other form", "3.0 MB", "0.50 ms", "2.00 ms", "steps of 8 images instead of 512")
    assert re.search(naming(*parts), report(other))
    fewer = {**PART, "batch.global_batch_size": 128, "batch.microbatch_size": 128}
    assert "steps of 128 images instead of 512" in report(replace(other, part=fewer))


PART = {"batch.global_batch_size": 8, "batch.microbatch_size": 8, "batch.bn_span": 8}


def test_microbatches_are_not_tried_on_a_part_of_one() -> None:
    part = of(RESNET, {"batch.global_batch_size": 8, "batch.microbatch_size": 8, "batch.bn_span": 8})
    tried, reasons = find_candidates(part, CPU, full_config=RESNET, limit="compute")
    assert not any("batch.microbatch_size" in each.values for each in tried)
    assert {each.why for each in reasons if each.name == "microbatch"} == {speedups.MEASURED_IN_PART}


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (["--seconds", "0"], ConfigError, ("--seconds 0 ",)),
        (["--limit", "nan"], ConfigError, ("--limit nan ",)),
        (["--within", "19"], ConfigError, ("--within 19 ", " 20 seconds or more")),
        (["--within", "inf"], ConfigError, ("--within inf ",)),
        (["--ranks", "0"], ConfigError, ("--ranks 0 ",)),
        (["--ranks", "5"], ConfigError, ("batch.global_batch_size=512 ", "fewer than 5 ranks")),
        (["--only", "speed"], ConfigError, ("--only speed ", " workers, prefetch")),
        (["--run.epoch", "2"], ConfigError, (" run.epoch;", " run.epochs")),
        (["--json", "/proc/no/where.json"], RunFolderError, (" /proc/no/where.json: ",)),
        (["--out", "/proc"], RunFolderError, (" /proc: ",)),
    ],
)
def test_doctor_refuses_options(options: list[str], error: type[Exception], named: tuple[str, ...]) -> None:
    with pytest.raises(error, match=naming(*named)):
        main(["--config", "quickstart", *options])


def test_doctor_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without results it removes the empty file that it made, and not /dev/null, which is empty, too."""

    def fails(*_: object, **__: object) -> int:
        raise DoctorError("nothing can be measured")

    monkeypatch.setattr(doctor_command, "_examine", fails)
    (tmp_path / "there.json").touch()
    for path in ("there.json", "made.json"):
        with pytest.raises(DoctorError):
            main(["--config", "quickstart", "--json", str(tmp_path / path)])
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


EAGER = ("--compute.mode", "eager")
MeasuredBy = Callable[..., None]


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> MeasuredBy:
    """Let the doctor find these rates on an H100, or on the machine of that type."""

    def measured_by(*, load: float = 0.0, device_type: str = "cuda", part: Any = None, **changes: Any) -> None:
        def measured(arguments: Any, findings: ExaminationResults, *_: object, **__: object) -> None:
            findings.machine = Machine("NVIDIA H100 80GB HBM3", device_type, None, 8, arguments.ranks)
            findings.part = part or {}
            findings.rates = replace(RATES, model_alone=2500.0, **{"turns": 3, "spread": 0.05} | changes)

        monkeypatch.setattr(doctor_command, "_examine", measured)
        monkeypatch.setattr(doctor_command, "print_report", lambda *_, **__: None)
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 100 * load)

    return measured_by


@pytest.mark.parametrize(
    ("changes", "words", "is_kept"),
    [
        ({}, EAGER, True),
        ({"load": 0.1}, EAGER, True),
        ({"turns": 1}, EAGER, False),
        ({"spread": 0.051}, EAGER, False),
        ({"load": 0.11}, EAGER, False),
        ({}, (*EAGER, "--ranks", "2"), False),  # sums over ranks are part of it
        ({}, (*EAGER, "--data.train_sizes", "[[0, 128], [10, 224]]"), False),  # only the first size is measured
        ({"part": {"batch.microbatch_size": 32, "batch.bn_span": 32}}, EAGER, False),  # of another microbatch
        ({}, (), False),  # a run on a GPU compiles, and makes larger microbatches
        ({"device_type": "cpu"}, (), True),
        ({}, ("--model.name", "alexnet_bn"), True),  # the rule leaves it as it is
    ],
)
def test_rate_is_kept_for_the_simulator_if_a_run_would_have_it(
    changes: dict[str, Any],
    words: tuple[str, ...],
    is_kept: bool,
    measured_by: MeasuredBy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured_by(**changes)
    config = ["--config", "imagenet/resnet50_64k", *words]
    assert main([*config, "--data.loader", "synthetic"]) == 0
    found = kept_rate(load_config([word for word in config if word not in ("--ranks", "2")]), "NVIDIA H100-SXM5-80GB")
    assert (found and found.images_per_second) == (2500.0 if is_kept else None)  # as dgx_h100 names the device
    assert ("kept for bigbatch simulate: " in capsys.readouterr().out) == (is_kept or "part" in changes)


@pytest.mark.parametrize("home", ["/proc/no", "$NOT_SET_HERE/cache"])
def test_rate_that_cannot_be_kept_is_told_after_the_record_is_written(
    home: str,
    measured_by: MeasuredBy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured_by()
    monkeypatch.setattr(cluster, "measured_folder", partial(measured_folder, environ={"XDG_CACHE_HOME": home}))
    words = ["--config", "imagenet/resnet50_64k", *EAGER, "--data.loader", "synthetic"]
    assert main([*words, "--json", str(tmp_path / "doctor.json")]) == 0
    assert (tmp_path / "doctor.json").stat().st_size
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "kept for bigbatch simulate" in line)
    assert line.startswith("not kept for bigbatch simulate: ")
    assert home in line
    assert kept_rate(load_config(words), "NVIDIA H100-SXM5-80GB") is None


def test_output_that_fails_is_no_rate_that_cannot_be_kept(
    measured_by: MeasuredBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str) -> None:
        if "kept for" in text:
            raise BrokenPipeError

    measured_by()
    monkeypatch.setattr(doctor_command, "print_line", closed)
    with pytest.raises(BrokenPipeError):
        main(["--config", "imagenet/resnet50_64k", *EAGER, "--data.loader", "synthetic"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_doctor_that_is_asked_to_stop_leaves_neither_folder_nor_probe(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def stopped(*arguments: object, **others: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Examination, "run", stopped)
    monkeypatch.setattr(Probes, "kill_all", lambda self: closed.append(self))
    before = signal.getsignal(number)
    assert main(["--config", "quickstart"]) == 130
    assert len(closed) == 1
    assert list(tmp_path.iterdir()) == []
    assert "stopped before the end" in capsys.readouterr().out
    assert signal.getsignal(number) == before
