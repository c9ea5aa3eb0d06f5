"""Which choices are worth measuring, against closed forms; and whole steps, which have the last word."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Measured
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.tuning import sweep
from bigbatch.comm.tuning.cost_model import LinkModel
from bigbatch.comm.tuning.measure import MeasuredLinks, Sums
from bigbatch.comm.tuning.plan_search import Backward
from bigbatch.comm.tuning.ranking import cluster_model, rank
from bigbatch.comm.tuning.report import explain_ranking, explain_steps
from bigbatch.comm.tuning.sweep import measure_times
from bigbatch.comm.tuning.tuner import TuningFindings, best_candidates, choose
from bigbatch.comm.tuning.whole_steps import ROUNDS, Candidate, MeasuredStep, affordable, measure_steps
from bigbatch.trainer.tune import communication as tune_comm

CPU = torch.device("cpu")
PAIRS = ((0, 1), (2, 3))
NAMES = ("native", "ring", "hierarchical", "sharded", "doubling")
ONE = (TensorSpec("all", 1_000_000, 4, "float32"),)
AT_THE_END = Backward({"all": 0.1}, 0.1)
ALL_IN_ONE = PlanSizes(10_000_000, 10_000_000)
INSIDE, ACROSS = LinkModel(1e-4, 1e9), LinkModel(1e-3, 1e8)


def rank_one(**options):
    cluster = cluster_model(PAIRS, inside=INSIDE, across=ACROSS)
    return rank(cluster, ONE, AT_THE_END, algorithms=NAMES, stated=ALL_IN_ONE, **options)


def test_simulated_ranking_is_that_of_the_papers_closed_forms():
    """4 MB that are ready when backward ends, on 2 nodes of 2: all of the all-reduce is exposed.

    Hops, of seconds a + bytes * b: a ring 2(P-1) of M/4 over the slowest link; leaders 4(k-1) of M/2 inside and 2(m-1)
    of M/2 across; shards half the hops inside; doubling one of M across, and two of M inside.
    """
    a, b, c, d, M = 1e-4, 1e-9, 1e-3, 1e-8, 4e6
    expected = {
        "doubling": (c + M * d) + 2 * (a + M * b),
        "sharded": 2 * (a + M / 2 * b) + 2 * (c + M / 2 * d),
        "hierarchical": 4 * (a + M / 2 * b) + 2 * (c + M / 2 * d),
        "ring": 6 * (c + M / 4 * d),
    }
    ranking = rank_one()
    assert list(ranking.best) == sorted(expected, key=lambda name: expected[name])
    for name, seconds in expected.items():
        assert ranking.best[name].exposed_seconds == pytest.approx(seconds, rel=1e-9)
    assert ranking.num_simulated == 2 * 4  # one size alone makes a plan, beside the stated one
    assert "native" not in ranking.best
    shown = explain_ranking(ranking, count=3)
    assert shown[0].startswith("simulated from these links: 8 steps")
    assert "a second)" in shown[0]
    assert "sharded 46.2 ms, doubling 49.2 ms" in shown[1]


def test_simulated_ranking_knows_what_travels_in_half_and_what_needs_no_messages():
    c, d, M = 1e-3, 1e-8, 4e6
    halves = rank_one(wire_shares={"ring": 0.5}).best["ring"]
    assert halves.exposed_seconds == pytest.approx(6 * (c + M / 8 * d), rel=1e-9)
    in_memory = rank_one(shares_memory=True)
    assert in_memory.best["hierarchical"].exposed_seconds == pytest.approx(2 * (c + M / 2 * d), rel=1e-9)
    assert in_memory.best["doubling"] == rank_one().best["doubling"]


def test_equal_gradients_at_an_even_pace_are_the_closed_form_by_the_best_plan():
    """A gradient each 20 ms; one of 1 MB takes 10 ms, without latency: that of the last alone is exposed."""
    tensors = tuple(TensorSpec(f"{i}", 250_000, 4, "float32") for i in range(8))
    backward = Backward({f"{i}": 0.02 * (i + 1) for i in range(8)}, 0.16)
    cluster = cluster_model(((0,), (1,)), inside=None, across=LinkModel(0.0, 1e8))
    found = rank(cluster, tensors, backward, algorithms=("ring",), stated=ALL_IN_ONE)
    assert found.best["ring"].exposed_seconds == pytest.approx(0.01)
    assert len(found.best["ring"].plan.buffers[-1].tensors) == 1
    assert found.num_simulated > 8


def test_worth_measuring_are_the_fastest_at_a_size_and_those_without_a_model():
    ranking = rank_one()
    # short: hops count, one of which across takes 1 ms; ring 6, hierarchical 2.4, sharded 2.2, doubling 1.2
    assert ranking.worth_measuring(8, NAMES, count=1) == ["native", "doubling"]
    assert ranking.worth_measuring(8, NAMES, count=3) == ["native", "hierarchical", "sharded", "doubling"]
    # 40 MB: the ring 606 ms, hierarchical 482, sharded 442, doubling 481
    assert ranking.worth_measuring(40_000_000, NAMES, count=1) == ["native", "sharded"]
    assert ranking.worth_measuring(40_000_000, ("ring", "native"), count=3) == ["native"]


@pytest.mark.parametrize(
    ("groups", "inside", "across"),
    [(((0,),), INSIDE, ACROSS), (PAIRS, None, ACROSS), (PAIRS, INSIDE, None), (((0, 1),), None, None)],
)
def test_no_model_without_the_links_that_ranks_need(groups, inside, across):
    assert cluster_model(groups, inside=inside, across=across) is None


def test_all_is_measured_where_there_is_no_model(monkeypatch):
    alone = connect(env=ALONE, device=CPU)
    options = {"stated": ALL_IN_ONE, "dtype": torch.float32}
    assert tune_comm._rank(alone, MeasuredLinks(None, None), AT_THE_END, ONE, **options) is None
    assert "all is measured" in tune_comm.NO_MODEL


def test_sums_are_measured_of_what_is_worth_it_alone(monkeypatch):
    asked = []

    def time_sums(tensor_N, communicators, *, effort, label):
        asked.append((tensor_N.nbytes, sorted(communicators)))
        return {name: Sums(Measured((1.0, 1.0)), 0) for name in communicators}

    monkeypatch.setattr(sweep, "time_sums", time_sums)
    worth = {1024: ["native", "ring"], 4096: ["sharded"], 16_384: []}
    alone = dataclasses.replace(connect(env=ALONE, device=CPU))
    every = dict.fromkeys(NAMES, alone)
    monkeypatch.setattr(type(alone), "with_every_algorithm", lambda self: every)
    monkeypatch.setattr(type(alone), "algorithms", NAMES)
    measure_times(
        alone,
        list(worth),
        dtype=torch.float32,
        seconds=1e6,
        on_size=lambda *_: None,
        worth_measuring=lambda size, names: worth[size],
    )
    # where nothing would be left, all that may still win are; between two sizes with nobody in common, both choices
    assert asked[:3] == [(1024, ["native", "ring"]), (4096, ["sharded"]), (16_384, sorted(NAMES))]
    assert asked[3] == (2048, ["native", "sharded"])
    times = {1024: {"ring": Measured((1.0, 1.0))}}
    assert [sweep.expected_seconds(times, size, "ring") for size in (512, 1024, 4096)] == [1.0, 1.0, 4.0]


# --- whole steps ---


def found() -> TuningFindings:
    """By its medians doubling is faster at every size: 20 ms, the ring 30, native 25; the config states the ring."""
    seconds = {"doubling": 0.02, "native": 0.025, "ring": 0.03}
    times = {4_000_000: {name: Measured((each, each)) for name, each in seconds.items()}}
    table = HybridTable((HybridRow(None, "ring"),))
    return choose(MeasuredLinks(None, None), times, AT_THE_END, ONE, stated=ALL_IN_ONE, stated_table=table)


def step(candidate: Candidate, *seconds: float) -> MeasuredStep:
    return MeasuredStep(candidate, Measured(seconds))


def algorithm_of(candidate: Candidate) -> Sequence[str]:
    return candidate.table.algorithms


def test_best_few_are_what_is_stated_and_then_the_simulated_in_their_order():
    candidates = best_candidates(found(), count=3)
    assert [algorithm_of(each) for each in candidates] == [("ring",), ("doubling",), ("native",)]
    assert [each.choice.exposed_seconds for each in candidates] == pytest.approx([0.03, 0.02, 0.025])
    assert len(best_candidates(found(), count=1)) == 2


def test_wrong_ranking_is_corrected_by_whole_steps():
    """The simulation's first, doubling, is the slowest in truth; native, its second, the fastest."""
    ring, doubling, native = best_candidates(found(), count=3)
    before = found()
    assert before.table.algorithms == ("doubling",)
    after = dataclasses.replace(before, steps=(step(ring, 0.2, 0.2), step(doubling, 0.3, 0.3), step(native, 0.1, 0.1)))
    assert (after.table, after.chosen) == (native.table, native.choice)
    assert not after.keeps_stated
    said = explain_steps(after)
    assert said[-1] == (
        "chosen: number 2 of the simulated: 100.0 ms a step, the fastest 100.0 ms, against 200.0 ms as the config "
        "states, +-0.2 ms"
    )
    assert [line.split()[0] for line in said[1:4]] == ["200.0", "300.0", "100.0"]


def test_noise_between_whole_steps_changes_nothing():
    ring, doubling, native = best_candidates(found(), count=3)
    # quartiles 0.1 s apart of four: two standard errors are 0.93 of that
    noisy = (0.15, 0.15, 0.25, 0.25)
    kept = dataclasses.replace(found(), steps=(step(ring, *noisy), step(doubling, 0.19, 0.19)))
    assert kept.keeps_stated
    assert kept.table.algorithms == ("ring",)
    assert "is kept" in explain_steps(kept)[-1]
    # of two that are equal the better simulated; never one that is slower than what is stated
    equal = (step(ring, 0.2, 0.2), step(doubling, 0.1, 0.1), step(native, 0.0999, 0.0999))
    assert dataclasses.replace(found(), steps=equal).table.algorithms == ("doubling",)
    slower = (step(ring, 0.2, 0.2), step(doubling, 0.1, 0.1, 0.31, 0.5), step(native, 0.1, 0.1))
    assert dataclasses.replace(found(), steps=slower).table.algorithms == ("native",)


def test_as_many_are_measured_as_there_is_time_for():
    candidates = best_candidates(found(), count=3)
    # a warm step and one that counts in each of two rounds: 4 * (1.5 * 0.1 + 0.03) s, and 0.68 s, and 0.7 s
    for seconds, count in ((1.3, 0), (1.41, 2), (2.0, 2), (2.2, 3)):
        assert affordable(candidates, backward_seconds=0.1, seconds=seconds) == count
    assert affordable([], backward_seconds=0.1, seconds=1) == 0


def test_whole_steps_of_one_rank_leave_no_trace():
    alone = connect(env=ALONE, device=CPU)
    layer, count = nn.Linear(3, 2), 0

    def forward():
        nonlocal count
        count += 1
        return layer(torch.ones(1, 3)).sum()

    table = HybridTable((HybridRow(None, "native"),))
    plan = best_candidates(found(), count=1)[0].choice
    candidates = [Candidate(table, plan), Candidate(table, plan)]
    parameters = dict(layer.named_parameters())
    steps = measure_steps(candidates, parameters, forward, alone, order=["bias", "weight"], seconds=0.0)
    assert [len(each.measured.seconds) for each in steps] == [ROUNDS, ROUNDS]
    assert count == 2 * ROUNDS * 2  # each turn warms up with a step of its own
    assert all(each.measured.min > 0 for each in steps)
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in parameters.values())
