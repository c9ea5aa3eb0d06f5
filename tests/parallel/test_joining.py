"""Jobs whose lost ranks start again and join the others, to the bits of a job that nothing disturbs."""

import json
import re
import signal
from pathlib import Path

import pytest
from forked_ranks import exit_codes

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from tests.laws.jobs import (
    TIMEOUT_SECONDS,
    ForkedJob,
    alone,
    assert_identical,
    final_state,
    forked,
    records,
    run,
    run_pods,
    steps,
)
from tests.laws.jobs import train_command as command_of
from tests.parallel.test_healing import HEALING, NUM_STEPS, data, launched, ranks_of, undisturbed

__all__ = ("data", "undisturbed")
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("backend", "deaths", "at", "num_ranks"),
    [
        ("tcp", "0/3/forward", 5, 2),
        pytest.param("gloo", "0/5/forward", 10, 4, marks=pytest.mark.weekly),
        ("nccl", "1/4/forward", 8, 3),
        ("tcp", "3/4/forward", NUM_STEPS, 4),
    ],
)
def test_rank_that_starts_again_joins_and_the_bits_are_the_same(
    backend: str, deaths: str, at: int, num_ranks: int, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Law 9: it has its old number, so rank 0 takes the run folder over again; after the last step it evaluates."""
    run, log, lost = tmp_path / "run", tmp_path / "log", int(deaths[0])
    command = command_of(data, run, HEALING | {"comm.backend": backend})
    job = ForkedJob(ranks_of(command, num_ranks), log, DIE=deaths, JOIN_AT=f"{at + 1}")  # a step is begun twice
    job.ranks.append(job.join_again(lost))
    codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    assert codes == [-signal.SIGKILL if rank == lost else 0 for rank in range(num_ranks)] + [0], log.read_text()
    said = log.read_text()
    assert re.search(
        rf"joined: rank {lost} on \S+; continuing from step {at} with {num_ranks} ranks; the others waited \S+ s\n",
        said,
    )
    assert [(record["step"], record["ranks"]) for record in records(run, "joined")] == [(at, num_ranks)]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["resumed_after_step"], summary["num_rank_losses"], summary["num_rank_joins"]) == (0, 1, 1)
    assert steps(run) == list(range(1, NUM_STEPS + 1))
    assert_identical(final_state(run), final_state(undisturbed))


AVERAGED = HEALING | {
    "run.eval_every_epochs": 1,
    "optimizer.precision": "fp16",
    "optimizer.loss_scale": 2.0**24,
    "optimizer.loss_scale_growth_steps": 2,
    "optimizer.ema_decay": 0.9,
    "optimizer.ema_every_steps": 1,
}
"""A state that each step and each evaluation changes: the scale overflows, is halved, and grows again."""


@pytest.fixture(scope="module")
def averaged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of that training by one process."""
    folder = tmp_path_factory.mktemp("averaged")
    run(alone(command_of(data, folder, AVERAGED)), RANK="0")
    return folder


@pytest.mark.parametrize(("at", "where"), [(5, {}), (6, {"JOIN_IN_EVALUATION": "1"})], ids=["step", "evaluation"])
def test_average_loss_scale_and_evaluations_are_the_same_after_a_join(
    at: int, where: dict[str, str], data: Path, averaged: Path, tmp_path: Path
) -> None:
    """An evaluation under way begins again, and is recorded once."""
    run, log = tmp_path / "run", tmp_path / "log"
    command = command_of(data, run, AVERAGED)
    job = ForkedJob(forked(command, ranks=2), log, DIE="1/3/forward", JOIN_AT=f"{at + 1}", **where)
    job.ranks.append(job.join_again(1))
    codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    assert codes == [0, -signal.SIGKILL, 0], log.read_text()
    assert [record["step"] for record in records(run, "joined")] == [at]
    assert_identical(final_state(run), final_state(averaged))
    ours, theirs = (load_checkpoint(list_checkpoints(each / "checkpoints")[-1].path) for each in (run, averaged))
    assert_identical(ours["average"], theirs["average"])
    assert ours["average"], "and there is one"
    assert ours["precision"] == theirs["precision"]
    assert theirs["precision"]["scale"] < 2.0**24, "it has overflowed"
    figures = [[(e["step"], e["top1"], e["count"]) for e in records(each, "eval")] for each in (run, averaged)]
    assert figures[0] == figures[1]


def test_rank_that_is_lost_while_it_joins_is_lost_as_any_other(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    job = ForkedJob(forked(command_of(data, run, HEALING), ranks=3), log, DIE="2/4/forward", JOIN_AT="6")
    job.ranks.append(job.join_again(2, DIE_JOINING="1"))
    codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    said = log.read_text()
    assert codes == [0, 0, -signal.SIGKILL, -signal.SIGKILL], said
    assert re.findall(r"lost: rank 2 on \S+; continuing from step (\d) with 2 ranks", said) == ["3", "5"], said
    assert_identical(final_state(run), final_state(undisturbed))


def test_rank_that_is_killed_just_after_the_others_let_it_in_costs_no_step(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """It is known within a second that a process has ended, so none waits for comm.timeout_seconds, which is 60."""
    run, log = tmp_path / "run", tmp_path / "log"
    job = ForkedJob(forked(command_of(data, run, HEALING), ranks=3), log, DIE="2/4/forward", JOIN_AT="6")
    job.ranks.append(job.join_again(2, target="tests.parallel.dying_loss:lost_before_the_state", DIE_BY="SIGKILL"))
    codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    said = log.read_text()
    assert codes == [0, 0, -signal.SIGKILL, -signal.SIGKILL], said
    assert re.search(r"did not join: rank 2 on \S+; continuing from step 5 with 2 ranks", said), said
    assert not records(run, "joined")
    assert steps(run) == list(range(1, NUM_STEPS + 1))
    times = {record["step"]: record["time"] for record in records(run, "train")}
    assert times[6] - times[5] < 20, "of a busy machine: other ranks wait for the rest"
    assert_identical(final_state(run), final_state(undisturbed))


def test_rank_that_stalls_before_it_has_the_state_does_not_end_the_only_one_that_has_it(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """It would be the first rank of the new group, so by vote the other one could not continue without it."""
    run, log = tmp_path / "run", tmp_path / "log"
    limits = {"comm.timeout_seconds": 4, "comm.warn_seconds": 1, "data.patience_seconds": 1}
    job = ForkedJob(forked(command_of(data, run, HEALING | limits), ranks=2), log, DIE="0/4/forward", JOIN_AT="6")
    joiner = job.join_again(0, target="tests.parallel.dying_loss:lost_before_the_state", DIE_BY="SIGSTOP")
    try:
        codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    finally:
        joiner.kill()
        joiner.join()
    said = log.read_text()
    assert codes == [-signal.SIGKILL, 0], said
    assert re.search(r"did not join: rank 0 on \S+; continuing from step 5 with 1 rank", said), said
    assert not records(run, "joined")
    assert_identical(final_state(run), final_state(undisturbed))


def test_launcher_starts_a_lost_rank_again_and_it_joins(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """There are two ranks, so one holds the state alone meanwhile."""
    done = launched("local", "--restarts", "3", data=data, folder=tmp_path, DIE="0/3/forward", JOIN_AT="6")
    assert re.findall("rank . was ended by .*", done.stderr) == [
        "rank 0 was ended by SIGKILL; it restarts, to join the others"
    ]
    assert [(record["step"], record["ranks"]) for record in records(tmp_path / "run", "joined")] == [(5, 2)]
    assert_identical(final_state(tmp_path / "run"), final_state(undisturbed))


@pytest.mark.parametrize(
    ("deaths", "num_ranks", "restarts", "join_at"),
    [("0/3/forward", 2, None, "6"), ("0/3/forward 3/3/sums", 4, 0, "0")],
    ids=["only-rank-of-a-pod-joins", "one-rank-of-each-pod-stays-lost"],
)
def test_pods_of_a_jobset_heal(
    deaths: str, num_ranks: int, restarts: int | None, join_at: str, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A pod that ends with another code than 0 would restart all pods."""
    log, command = tmp_path / "log", command_of(data, tmp_path / "run", HEALING | {"comm.backend": "tcp"})
    codes = run_pods(command, ranks=num_ranks, restarts=restarts, log=log, DIE=deaths, JOIN_AT=join_at)
    assert codes == [0, 0], log.read_text()
    assert len(re.findall("rank . was ended by SIGKILL", log.read_text())) == len(deaths.split())
    joined = [(record["step"], record["ranks"]) for record in records(tmp_path / "run", "joined")]
    assert joined == ([] if restarts == 0 else [(5, 2)])
    assert_identical(final_state(tmp_path / "run"), final_state(undisturbed))
