"""Trials as they are drawn, written, read, refused and made simpler."""

from itertools import islice

import pytest
from error_texts import naming
from faults.trial import KINDS, NUM_STEPS, PHASES, Trial, draw, parse, simpler

from bigbatch.errors import FaultError

ALL = tuple(KINDS)
KILL = Trial("kill", "backward", 6, 1, 1, 3, "gloo")


def drawn(seed: int, count: int, *, max_ranks: int = 4, max_nodes: int = 3) -> list[Trial]:
    return [draw(seed, number, kinds=ALL, max_ranks=max_ranks, max_nodes=max_nodes) for number in range(count)]


def test_draws_depend_on_seed_and_number_alone() -> None:
    assert drawn(7, 30) == drawn(7, 60)[:30]
    assert drawn(7, 30) != drawn(8, 30)
    assert draw(7, 12, kinds=ALL, max_ranks=4, max_nodes=3) == drawn(7, 30)[12]


def test_draws_reach_every_kind_phase_rank_and_backend() -> None:
    trials = drawn(0, 2000)
    assert {trial.kind for trial in trials} == set(KINDS)
    assert {trial.phase for trial in trials} == set(PHASES)
    assert {(trial.ranks, trial.rank) for trial in trials} == {(n, rank) for n in (2, 3, 4) for rank in range(n)}
    assert {trial.backend for trial in trials} == {"gloo", "tcp"}
    assert {trial.step for trial in trials} == {*range(NUM_STEPS - 1), NUM_STEPS}


def test_draws_keep_to_the_ranks_and_nodes_that_there_are() -> None:
    trials = drawn(0, 300, max_ranks=3, max_nodes=1)
    assert {trial.ranks for trial in trials} == {2, 3}
    assert not [trial for trial in trials if trial.nodes > 1 or KINDS[trial.kind].needs_nodes]


def test_printed_trial_is_the_trial() -> None:
    for trial in drawn(3, 500):
        assert parse(str(trial)) == trial


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": "3"}, ("rank=3 is not there", "ranks 0 to 2")),
        ({"ranks_per_node": "5"}, ("1 x ranks_per_node=5", "1 x 4")),
        ({"kind": "kil"}, ("kind=kil", "kill")),
        ({"phase": "backwards"}, ("phase=backwards", "backward")),
        ({"backend": "nccl"}, ("backend=nccl", "gloo, tcp")),
        ({"step": "-1"}, ("step='-1'", "whole number")),
        ({"step": "14"}, ("step=14", "between 1 and 13")),
        ({"kind": "slow"}, ("slow has no phase backward", "forward")),
        ({"kind": "full disk", "phase": "checkpoint"}, ("full disk", "rank=0")),
        ({"kind": "cut"}, ("cut", "nodes=2")),
        ({"kind": "flipped"}, ("step=6", "between 9 and 13")),
    ],
)
def test_trial_that_cannot_be_is_refused_in_a_line(change: dict[str, str], words: tuple[str, ...]) -> None:
    text = dict(word.split("=") for word in str(KILL).split(",")) | change
    with pytest.raises(FaultError, match=naming(*words)) as refused:
        parse(",".join(f"{name}={value}" for name, value in text.items()))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["kill", "kind=kill", "", f"{KILL},seed=3"])
def test_trial_that_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(FaultError, match=naming("kind=...,phase=...,step=...")):
        parse(text)


def test_simpler_trials_are_possible_and_come_to_an_end() -> None:
    def size(trial: Trial) -> tuple[int, int, int, int]:
        return trial.ranks, trial.nodes, KINDS[trial.kind].phases.index(trial.phase), trial.step

    for trial in drawn(5, 300):
        for each in simpler(trial):
            assert parse(str(each)) == each
            assert (each.kind, each.backend) == (trial.kind, trial.backend)
            assert size(each) < size(trial)
        chain = [trial]
        while following := list(islice(simpler(chain[-1]), 1)):
            chain += following
        assert chain[-1].ranks == 2


def test_link_of_a_node_takes_all_of_its_ranks_away() -> None:
    assert Trial("cut", "sum", 3, 3, 2, 2, "tcp").struck == {2, 3}
    assert Trial("kill", "sum", 3, 3, 2, 2, "tcp").struck == {3}
