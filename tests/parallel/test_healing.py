"""Jobs that lose ranks and continue in the same processes, to the bits of a job that nothing disturbs.

test_joining.py has the ranks that start again.
"""

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
from bigbatch.trainer.checkpoint.checkpoint import load_checkpoint
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
