"""Jobs that lose ranks and continue in the same processes, to the bits of a job that nothing disturbs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import exit_codes

from bigbatch.errors import LOST
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import (
    TIMEOUT_SECONDS,
    Forked,
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

pytestmark = pytest.mark.long

HEALING = {
    "run.heal": "in_place",
    "run.reproducible": True,
    "run.eval_every_epochs": 2,
    "batch.global_batch_size": 24,
    "batch.microbatch_size": 2,
    "batch.bn_span": 2,
    "optimizer.loss": "tests.parallel.dying_loss.loss",
    "optimizer.label_smoothing": 0,
}
LIMITS = {"comm.timeout_seconds": 4, "comm.warn_seconds": 1, "data.patience_seconds": 1}
ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 12
"""Two epochs of 160 images."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    return folder


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same training by one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(alone(command_of(data, folder, HEALING)), RANK="0")
    return folder


def ranks_of(command: list[str], num_ranks: int) -> Forked:
    """Ranks of this command; --comm.backend=nccl is played by gloo."""
    if "--comm.backend=nccl" not in command:
        return forked(command, ranks=num_ranks)
    command = [word for word in command if word != "--comm.backend=nccl"]
    return Forked((*command, "--comm.algorithm=native"), num_ranks, "tests.parallel.nccl_by_gloo:bigbatch")


def lose(
    data: Path, folder: Path, *, deaths: str, num_ranks: int = 4, save_seconds: float = 0, **settings: object
) -> tuple[list[int], str]:
    """Train with these losses; return the ranks' exit codes, and what they said."""
    log = folder.with_name(f"{folder.name}.log")
    overrides = HEALING | {name.replace("__", "."): value for name, value in settings.items()}
    environment = {"DIE": deaths, "SAVE_SECONDS": f"{save_seconds}"}
    job = ForkedJob(ranks_of(command_of(data, folder, overrides), num_ranks), log, **environment)
    codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    assert codes is not None, log.read_text()
    return codes, log.read_text()


@pytest.mark.parametrize(
    ("backend", "deaths", "left"),
    [
        ("tcp", "0/5/sums", 3),
        ("tcp", "0/2/update 3/9/forward", 2),
        ("tcp", "0/4/forward 1/4/forward 2/4/sums", 1),
        ("tcp", "0/4/forward 1/4/listening", 2),
        ("tcp", "0/4/forward 1/4/published", 2),
        ("tcp", "0/4/forward 1/4/claimed", 2),
        ("gloo", "1/5/sums", 3),
        ("nccl", "0/3/sums 2/7/forward", 2),
    ],
)
def test_survivors_go_on_to_the_same_bits(
    backend: str, deaths: str, left: int, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Law 9: each step is made once, and nothing is read from a disk, where no checkpoint is yet."""
    codes, said = lose(data, tmp_path / "run", deaths=deaths, comm__backend=backend)
    assert codes.count(0) == left, said
    assert codes.count(-signal.SIGKILL) == 4 - left, said
    reported = steps(tmp_path / "run")
    # the other ranks may have had all sums of the step in which one was lost: its report is lost, as its share of it is
    lost = [int(step) for step in re.findall(r"/(\d+)/(?:sums|update)", deaths)]
    assert reported == [step for step in range(1, NUM_STEPS + 1) if step in reported or step not in lost]
    healed = [record["hint"] for record in records(tmp_path / "run", "hint") if record["hint"].startswith("lost: ")]
    named = re.findall(r"rank (\d) on", " ".join(healed))
    assert sorted(named) == sorted(re.findall(r"(\d)/\d+/", deaths)), "by the launcher's numbers"
    assert healed[-1].endswith(f"with {left} rank{'s' * (left > 1)}"), healed
    assert_identical(final_state(tmp_path / "run"), final_state(undisturbed))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["resumed_after_step"], summary["num_rank_losses"]) == (0, len(healed))
    assert summary["seconds"] > summary["rank_loss_seconds"] > 0


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


@pytest.mark.parametrize("lost", [2, 0])
def test_loss_while_a_checkpoint_is_written(lost: int, data: Path, tmp_path: Path) -> None:
    """Over gloo, whose process group has to be released before the next one is made; without rank 0 another writes."""
    settings = {"comm__backend": "gloo", "run__checkpoint_every_steps": 4, "run__keep_checkpoints": 9}
    codes, said = lose(data, tmp_path / "run", deaths=f"{lost}/5/forward", num_ranks=3, save_seconds=1, **settings)
    assert codes == [-signal.SIGKILL if rank == lost else 0 for rank in range(3)], said
    saved = [int(path.name.removeprefix("step-")) for path in sorted((tmp_path / "run/checkpoints").glob("step-*"))]
    assert saved[:1] == [4]
    groups = load_checkpoint(tmp_path / "run/checkpoints/step-00000004")["optimizer"]["param_groups"]
    assert {group["lr"] for group in groups} == {r["lr"] for r in records(tmp_path / "run", "train") if r["step"] == 4}


def test_ranks_that_cannot_share_the_batch_end_as_for_a_restart(data: Path, tmp_path: Path) -> None:
    """Three of four, where two share each ghost batch."""
    settings = {"batch__global_batch_size": 16, "batch__bn_span": 4, "run__reproducible": False}
    codes, said = lose(data, tmp_path / "run", deaths="2/3/forward", **settings)
    assert codes == [LOST, LOST, -signal.SIGKILL, LOST]
    assert "the remaining ranks cannot share the batch: batch.bn_span=4" in said


def files_of(run: Path) -> dict[Path, bytes]:
    """The files of a run but TensorBoard's, whose thread may have had a record in hand when its process was stopped."""
    files = (path for path in run.rglob("*") if path.is_file() and path.parent.name != "tensorboard")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("backend", ["tcp", "nccl"])
def test_rank_that_wakes_after_the_others_went_on_ends_and_writes_nothing(
    backend: str, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The first one, which owned the run folder."""
    run, log = tmp_path / "run", tmp_path / "log"
    command = command_of(data, run, HEALING | LIMITS | {"run.keep_checkpoints": 9, "comm.backend": backend})
    job = ForkedJob(ranks_of(command, 3), log, DIE="0/5/forward", DIE_BY="SIGSTOP")
    try:
        others = exit_codes(job.ranks[1:], timeout_seconds=TIMEOUT_SECONDS)
        written = files_of(run)
    finally:
        os.kill(job.ranks[0].pid or 0, signal.SIGCONT)
        codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    assert others == [0, 0], log.read_text()
    assert codes == [0, 0, 0], log.read_text()
    assert re.search("rank 0 on .*: the job has ended without this process", log.read_text())
    assert files_of(run) == written
    assert_identical(final_state(run), final_state(undisturbed))


def launched(
    launcher: str, *options: str, data: Path, folder: Path, limits: dict[str, int] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Train on two ranks by the command line, to a good end."""
    command = command_of(data, folder / "run", HEALING | (limits or {}))
    done = subprocess.run(
        [sys.executable, "-m", "bigbatch", "launch", launcher, "--ranks", "2", *options, "--", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_launcher_starts_a_lost_rank_again_and_it_joins(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """There are two ranks, so one holds the state alone meanwhile."""
    done = launched("local", "--restarts", "3", data=data, folder=tmp_path, DIE="0/3/forward", JOIN_AT="6")
    assert re.findall("rank . was ended by .*", done.stderr) == [
        "rank 0 was ended by SIGKILL; it restarts, to join the others"
    ]
    assert [(record["step"], record["ranks"]) for record in records(tmp_path / "run", "joined")] == [(5, 2)]
    assert_identical(final_state(tmp_path / "run"), final_state(undisturbed))


@pytest.mark.parametrize(
    ("launcher", "lost", "told"),
    [("local", 1, ["rank 1 was ended by SIGKILL; the others may continue"]), ("mpirun", 0, [])],
)
def test_job_ends_well_without_the_rank_that_was_lost(
    launcher: str, lost: int, told: list[str], data: Path, tmp_path: Path
) -> None:
    """The job is started by the command line."""
    done = launched(launcher, data=data, folder=tmp_path, DIE=f"{lost}/3/forward")
    assert re.findall("rank . was ended by .*", done.stderr) == told
    assert steps(tmp_path / "run") == list(range(1, NUM_STEPS + 1))


@pytest.mark.weekly
def test_rank_that_mpirun_wakes_as_it_ends_does_not_fail_the_job(data: Path, tmp_path: Path) -> None:
    """mpirun ends 2 x comm.timeout_seconds + 30 s after the first rank."""
    done = launched("mpirun", data=data, folder=tmp_path, limits=LIMITS, DIE="1/3/forward", DIE_BY="SIGSTOP")
    assert "mpirun still runs although the job's first rank has ended" in done.stderr
    assert steps(tmp_path / "run") == list(range(1, NUM_STEPS + 1))


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
