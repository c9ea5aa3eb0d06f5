"""Real trials of faults: a rank is struck in a known step and phase, and the same command continues."""

import pytest
from faults.experiment import Laboratory
from faults.job import prepare
from faults.trial import Trial


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    folder = tmp_path_factory.mktemp("faults")
    # longer than any wait of a slow machine: none of these faults is found by the time limit
    return Laboratory(prepare(), folder, timeout_seconds=120)


def test_killed_rank_is_named_and_the_run_goes_on_with_the_same_bits(laboratory: Laboratory) -> None:
    score = laboratory.score(Trial("kill", "backward", 8, 1, 1, 2, "tcp"))
    assert score.broken == (), score.said
    assert (score.is_named, score.steps_lost, score.is_equal) == (True, 2, True), "checkpoints are of steps 4 and 5"


def test_terminated_rank_loses_no_step(laboratory: Laboratory) -> None:
    score = laboratory.score(Trial("term", "sum", 7, 1, 1, 2, "tcp"))
    assert score.broken == (), score.said
    assert (score.steps_lost, score.is_equal) == (0, True)


@pytest.mark.long
@pytest.mark.parametrize(
    "trial",
    [
        Trial("pause", "update", 6, 1, 1, 3, "tcp"),
        Trial("segfault", "forward", 6, 2, 1, 3, "gloo"),
        Trial("exception", "evaluation", 6, 2, 1, 3, "tcp"),
        Trial("full disk", "checkpoint", 6, 0, 1, 2, "tcp"),
        Trial("kill", "checkpoint", 8, 0, 1, 2, "tcp"),
        Trial("slow", "forward", 4, 1, 1, 2, "tcp"),
        Trial("deleted", "sum", 3, 1, 1, 2, "tcp"),
        Trial("gradient bit", "update", 7, 0, 1, 3, "tcp"),
        Trial("lasting bit", "backward", 6, 2, 1, 3, "gloo"),
        Trial("state bit", "evaluation", 6, 2, 1, 3, "gloo"),
        Trial("clock", "sum", 6, 0, 1, 2, "tcp"),
        Trial("slow storage", "checkpoint", 6, 0, 1, 2, "tcp"),
        Trial("store killed", "backward", 6, 0, 1, 3, "tcp"),
        Trial("kill", "report", 4, 1, 1, 2, "tcp"),
        Trial("kill", "close", 15, 1, 1, 2, "tcp"),
    ],
    ids=lambda trial: f"{trial.kind} of rank {trial.rank} at {trial.phase}",
)
def test_faults_of_each_kind_break_no_promise(trial: Trial, laboratory: Laboratory) -> None:
    score = laboratory.score(trial)
    assert score.broken == (), score.said
