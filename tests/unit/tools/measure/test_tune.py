"""Tuning: when gradients are ready, which choices are tried and taken, what is said of them, and the command alone."""

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.cli import main
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, MeasuredTimes
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.tuning.tuned import make_cluster, read_tuned, write_tuned
from bigbatch.tools.measure import whole_steps
from bigbatch.tools.measure.cost_model import Backward
from bigbatch.tools.measure.timing import MeasuredLinks
from bigbatch.tools.measure.tune import TuneResults, explain_choice, near_the_fastest
from bigbatch.tools.measure.whole_steps import (
    ENOUGH_STEPS,
    MIN_STEPS,
    StepCandidate,
    Steps,
    choose_step,
    in_ready_order,
    make_candidates,
    measure_backward,
    measure_steps,
    time_turn,
)
from bigbatch.tools.tune import communication

CPU = torch.device("cpu")


class Slow(torch.autograd.Function):
    """The identity; its backward moves a clock on by one second."""

    clock = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Slow.clock += 1.0
        return gradient


def test_ready_times_by_a_clock_that_backward_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, a second of backward behind each: 0, 1 and 2 s from the last one on; unused ones at the end."""
    monkeypatch.setattr(whole_steps.time, "perf_counter", lambda: Slow.clock)
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward() -> Tensor:
        hidden_BC = torch.ones(1, 2)
        for layer in list(layers)[:3]:
            hidden_BC = layer(Slow.apply(hidden_BC.requires_grad_()))
        return hidden_BC.sum()

    parameters = dict(layers.named_parameters())
    backward = measure_backward(parameters, forward, connect(env=ALONE, device=CPU), seconds=10)
    assert backward.seconds == 3.0
    assert backward.ready_seconds == {"2.weight": 0.0, "1.weight": 1.0, "0.weight": 2.0, "3.weight": 3.0}
    assert [spec.name for spec in in_ready_order(parameters, backward)] == [f"{i}.weight" for i in (2, 1, 0, 3)]
    assert all(not p._post_accumulate_grad_hooks for p in parameters.values())  # no hook stays behind


def test_ready_times_at_once_go_last_parameter_first() -> None:
    layer = nn.Linear(3, 2)
    specs = in_ready_order(dict(layer.named_parameters()), Backward({"weight": 1.0, "bias": 1.0}, 1.0))
    assert specs == [TensorSpec("bias", 2, 4, "float32"), TensorSpec("weight", 6, 4, "float32")]


@pytest.mark.gpu
def test_ready_times_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6))).to(device)
    input_BC = torch.randn(4096, 4096, device=device)
    parameters = dict(model.named_parameters())
    alone = connect(env=ALONE, device=device)
    backward = measure_backward(parameters, lambda: model(input_BC).square().mean(), alone, seconds=5)
    ready = [backward.ready_seconds[f"{i}.weight"] for i in reversed(range(6))]
    assert ready == sorted(ready)
    assert 0 < ready[0] < 0.5 * ready[-1]
    assert ready[-1] <= backward.seconds < 5


OTHER_CLUSTER = make_cluster(
    ((0, 1), (2, 3)), backend="tcp", wire_dtype=None, device="cpu", reduce_dtype="fp32", buffers="torch"
)
MANY = tuple(TensorSpec(f"t{i}", 1 << 18, 4, "float32") for i in range(24))
"""24 MiB, of a MiB each."""


def only(algorithm: str) -> HybridTable:
    return HybridTable((HybridRow(None, algorithm),))


FASTEST = HybridTable((HybridRow(100_000, "doubling"), HybridRow(None, "ring")))
STATED = StepCandidate(only("native"), PlanSizes(10 << 20, 8 << 20))


def exact(seconds: float) -> MeasuredTimes:
    return MeasuredTimes((seconds, seconds))


def candidates() -> list[StepCandidate]:
    return make_candidates(STATED, FASTEST, MANY, algorithms=("native", "ring"))


def test_candidates_are_what_is_stated_then_buffers_then_algorithms() -> None:
    """Buffers of 4 MiB hold a sixth of the gradients, of 64 MiB all of them; of 256 MiB they hold no more."""
    stated, *others = candidates()
    assert stated == STATED
    assert others[0] == StepCandidate(FASTEST, STATED.sizes)
    assert [each.sizes.buffer_bytes >> 20 for each in others[1:-1]] == [4, 64, 16, 1]
    assert {each.table for each in others[:-1]} == {FASTEST}
    assert others[-1] == StepCandidate(only("ring"), STATED.sizes)  # native with these is what is stated
    counts = [len(each.sizes.plan(MANY).buffers) for each in others[1:-1]]
    assert counts == [6, 1, 2, 24]


def test_candidates_of_few_gradients_have_no_two_alike() -> None:
    """8 KiB in one tensor: every size makes the same plan."""
    one = (TensorSpec("all", 2048, 4, "float32"),)
    found = make_candidates(STATED, FASTEST, one, algorithms=("native", "ring"))
    assert [each.table for each in found] == [only("native"), FASTEST, only("ring")]


def test_choice_is_the_fastest_beyond_noise_and_never_slower_than_what_is_stated() -> None:
    a, b, c = candidates()[:3]
    stated = exact(1.0)
    assert choose_step({a: stated, b: exact(0.9), c: exact(0.8)}) == c
    assert choose_step({a: stated, b: exact(0.9), c: exact(0.899)}) == b  # within 0.2%
    assert choose_step({a: stated, b: exact(1.1)}) == a
    unsteady = MeasuredTimes((0.5, 0.9, 1.3))
    assert choose_step({a: stated, b: unsteady}) == a  # its quartiles are 0.4 apart
    assert choose_step({a: stated, b: unsteady, c: exact(0.8)}) == c  # b is near c, but not better than a


class PlayedSteps:
    """Steps that take a stated time, on a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[StepCandidate, float]) -> None:
        self.now, self.turns = 0.0, []
        self._seconds = seconds
        monkeypatch.setattr(whole_steps, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(whole_steps, "elapsed_seconds", lambda _, start: self.now - start)

    def turn(self, candidate: StepCandidate, count: int) -> list[float]:
        self.turns.append(candidate)
        self.now += (count + 1) * self._seconds[candidate]
        return [self._seconds[candidate]] * count

    def measure(self, tried: Sequence[StepCandidate], *, seconds: float, step_seconds: float = 1.0) -> Any:
        nothing: Any = None
        return measure_steps(tried, self.turn, nothing, step_seconds=step_seconds, seconds=seconds)


def test_steps_keep_to_their_time_and_drop_the_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = candidates()[:4]
    played = PlayedSteps(monkeypatch, dict(zip(tried, (1.0, 0.9, 2.0, 0.95), strict=True)))
    found = played.measure(tried, seconds=60.0)
    assert played.now <= 60.0
    assert list(found) == tried
    assert played.turns.count(tried[2]) == 1
    counts = [len(each.seconds) for each in found.values()]
    assert counts[2] == MIN_STEPS < min(counts[0], counts[1], counts[3])
    assert choose_step(found) == tried[1]


@pytest.mark.parametrize(("seconds", "count"), [(3.9, 0), (4.0, 1), (8.0, 2)])
def test_steps_that_there_is_no_time_for_are_left_out(
    seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of the first round is a step to warm up and three that count."""
    tried = candidates()[:2]
    played = PlayedSteps(monkeypatch, dict.fromkeys(tried, 1.0))
    assert len(played.measure(tried, seconds=seconds)) == count
    assert played.now <= seconds


def test_steps_end_where_enough_are_measured_or_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = candidates()[:2]
    played = PlayedSteps(monkeypatch, dict(zip(tried, (1e-3, 1e-3), strict=True)))
    found = played.measure(tried, seconds=1e6, step_seconds=1e-3)
    assert all(ENOUGH_STEPS <= len(each.seconds) < 2 * ENOUGH_STEPS for each in found.values())
    played = PlayedSteps(monkeypatch, dict(zip(tried, (1e-3, 2e-3), strict=True)))
    found = played.measure(tried, seconds=1e6)
    assert [len(each.seconds) for each in found.values()] == [MIN_STEPS] * 2


def test_whole_steps_of_a_model_are_timed_and_leave_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    input_BC, named = torch.ones(4, 8), dict(model.named_parameters())
    alone = connect(env=ALONE, device=torch.device("cpu"))
    tried = [StepCandidate(only("native"), PlanSizes(size, size)) for size in (64, 4096)]
    turn = partial(time_turn, named, lambda: model(input_BC).sum(), alone, order=list(named))
    found = measure_steps(tried, turn, alone.connection, step_seconds=1e-3, seconds=5.0)
    assert list(found) == tried
    assert all(min(each.seconds) > 0 for each in found.values())


def findings(steps: Steps) -> TuneResults:
    backward = Backward({"t0": 0.01}, 0.2)
    return TuneResults(MeasuredLinks(None, None), {}, backward, MANY, FASTEST, STATED, steps)


def test_choice_is_explained() -> None:
    without = findings({STATED: exact(1.0)})
    assert without.chosen == StepCandidate(FASTEST, STATED.sizes)
    assert "no whole steps were compared" in explain_choice(without)[0]
    other = StepCandidate(FASTEST, PlanSizes(1 << 22, 1 << 22))
    faster = findings({STATED: exact(0.2), other: exact(0.1)})
    assert faster.chosen == other
    assert re.search(
        naming(f"chosen: {other}:", "100.0 ms a step", "200.0 ms as the config"), explain_choice(faster)[-1]
    )
    kept = findings({STATED: exact(0.2), other: exact(0.3)})
    assert kept.chosen == STATED
    assert explain_choice(kept)[-1].startswith("chosen: what the config states is kept: 200.0 ms a step")
    noisy = MeasuredTimes((0.18, 0.2, 0.2, 0.22))
    assert any("200.0 ms ±4.6%" in line for line in explain_choice(findings({STATED: noisy, other: exact(0.3)})))


def test_doubtful_times_choose_nothing() -> None:
    other = StepCandidate(FASTEST, PlanSizes(1 << 22, 1 << 22))
    for steps in ({STATED: exact(0.2), other: exact(0.1)}, {STATED: exact(0.2)}):
        disturbed = dataclasses.replace(findings(steps), doubt="noise")
        assert disturbed.chosen == STATED
        assert not any(str(FASTEST) in line for line in explain_choice(disturbed) if line.startswith("chosen: "))
    kept = explain_choice(dataclasses.replace(faster_than_stated(), doubt="noise"))[-1]
    assert kept == "chosen: what the config states is kept: noise"


def faster_than_stated() -> TuneResults:
    return findings({STATED: exact(0.2), StepCandidate(FASTEST, STATED.sizes): exact(0.1)})


def test_algorithms_that_are_far_behind_are_not_tried_in_whole_steps() -> None:
    times = {1024: {"ring": exact(9.0)}, 4096: {"ring": exact(1.0), "native": exact(2.0), "doubling": exact(2.1)}}
    assert near_the_fastest(times) == ["ring", "native"]
    assert near_the_fastest({}) == []


# --- the command ---

SMALL = ["--config", "quickstart", "--batch.microbatch_size", "4", "--batch.bn_span", "4", "--data.image_size", "16"]


@pytest.mark.slow
def test_tune_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.json"
    assert main(["comm", "tune", *SMALL, "--budget-seconds", "2", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "messages: none between these ranks",
        "native",
        "algorithm by size: ",
        "backward: ",
        "chosen: ",
        "runs with another table, or none, end with other bits, within rounding, but for run.reproducible",
    ):
        assert text in out
    tuned = read_tuned(path)
    assert (tuned.model, tuned.cluster.world_size, tuned.cluster.backend) == ("resnet9", 1, "single")
    assert tuned.command.startswith("bigbatch comm tune --config quickstart")
    assert {t.name for t in tuned.tensors} == set(tuned.evidence["ready_seconds"])
    ready = [tuned.evidence["ready_seconds"][t.name] for t in tuned.tensors]
    assert ready == sorted(ready)
    assert max(ready) <= tuned.evidence["backward_seconds"]
    assert all(set(tuned.table.algorithms) <= set(times) for times in tuned.evidence["all_reduce_seconds"].values())
    assert f"--comm.algorithm hybrid --comm.table {path}" in out
    assert main(["comm", "bench", "--max-bytes", "1K", "--algorithms", "hybrid", "--table", str(path)]) == 0
    write_tuned(dataclasses.replace(tuned, cluster=OTHER_CLUSTER), path)
    assert main(["comm", "bench", "--table", str(path)]) == 1
    assert re.search(naming(path, "backend tcp there", "single here"), capsys.readouterr().err)


def test_tune_stores_no_doubtful_times_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def tune(*_: object, force: bool, **__: object) -> TuneResults:
        asked.append(force)
        return dataclasses.replace(faster_than_stated(), doubt="" if force else "93.1 ms, but 1.6 ms")

    monkeypatch.setattr(communication, "tune", tune)
    path = tmp_path / "tuned.json"
    command = ["comm", "tune", *SMALL, "--output", str(path)]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert re.search(naming("nothing is stored", "93.1 ms, but 1.6 ms", "--budget-seconds", "--force"), out)
    assert ("to train with it" in out, path.exists()) == (False, False)
    assert main([*command, "--force"]) == 0
    assert (asked, read_tuned(path).table) == ([False, True], FASTEST)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ("--config is missing",)),
        (
            ["--config", "quickstart", "--model", "resnet50"],
            ("--model resnet50 ", "--config quickstart "),
        ),
        (["--model", "resnet51"], ("model.name=resnet51 ", "resnet50")),
        (["--config", "quickstart", "--comm.bufer_bytes", "1"], ("comm.bufer_bytes", "comm.buffer_bytes")),
        ([*SMALL, "--output", "/proc"], ("cannot write /proc: Is a directory", "--output")),
        (["--ddp=/proc/none.py", "--", "--config"], ("--ddp /proc/none.py ", "Python script")),
        (["--", "--ddp", "/proc/none.py"], ("name an experiment with --config",)),
        # also a model by name, whose config has other options, comes as far as this
        *(
            ([*config, "--output", "/proc/no/a.json"], ("/proc/no/a.json: ", "--output"))
            for config in (SMALL, ["--model", "resnet152"], ["--model", "alexnet_bn"])
        ),
    ],
)
def test_tune_refuses_impossible_arguments(
    options: list[str], named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(communication, "tune", lambda *_, **__: faster_than_stated())
    assert main(["comm", "tune", *options]) == 1
    err = capsys.readouterr().err
    assert re.search(naming(*named), err)
    assert len(err.splitlines()) == 1
