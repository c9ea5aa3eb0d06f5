"""Jobs that lose a rank and heal, as they really run here."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bigbatch.errors import INTERRUPTED
from bigbatch.launch.jobs.installed import find_mpirun
from bigbatch.launch.jobs.run_folder import newest_checkpoint
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import assert_identical, final_state, forked, run, run_pods, train_command

LOSS = {
    "data.loader": "torchvision",
    "optimizer.loss": "tests.parallel.losing_loss.loss",
    "optimizer.label_smoothing": 0,
    "run.checkpoint_every_steps": 2,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds data, and the run folder of a job that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_dataset(folder / "data", train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    run(forked(train_command(folder / "data", folder / "run", LOSS), ranks=2))
    return folder


def launch(
    launcher: str, undisturbed: Path, run: Path, *options: str, settings: dict[str, object] = LOSS, **lose: str
) -> "subprocess.CompletedProcess[str]":
    """Run a job of two ranks with the losses in lose; return its result when all of its processes have ended."""
    command = train_command(undisturbed / "data", run, settings)
    return subprocess.run(
        [sys.executable, "-m", "bigbatch", "launch", launcher, "--ranks", "2", *options, "--", *command],
        env={**os.environ, "LOSE_RUN": str(run), **lose},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_local_job_that_loses_ranks_ends_with_the_bits_of_one_that_does_not(tmp_path: Path, undisturbed: Path) -> None:
    """Law 7, healed without a person: rank 1 dies in the middle of a step after a checkpoint."""
    done = launch("local", undisturbed, tmp_path, "--restarts", "1", LOSE_AFTER="4")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 was ended by SIGKILL") == 1
    assert done.stderr.count(f"restarting, from {tmp_path}/checkpoints/step-") == 1
    assert_identical(final_state(tmp_path), final_state(undisturbed / "run"))


@pytest.mark.long
def test_ranks_whose_local_launcher_is_killed_save_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: Path
) -> None:
    lost = launch("local", undisturbed, tmp_path, LOSE_AFTER="2", LOSE_WHOM="launcher")
    assert lost.returncode == -signal.SIGKILL, lost.stderr
    assert "the same command continues from there" in lost.stdout
    run(forked(train_command(undisturbed / "data", tmp_path, LOSS), ranks=2))
    assert_identical(final_state(tmp_path), final_state(undisturbed / "run"))


@pytest.mark.long
def test_job_whose_mpirun_is_killed_starts_again_by_itself(tmp_path: Path, undisturbed: Path) -> None:
    if shutil.which(find_mpirun()) is None:
        pytest.skip("needs mpirun")
    done = launch("mpirun", undisturbed, tmp_path, "--restarts", "1", LOSE_AFTER="2", LOSE_WHOM="launcher")
    assert done.returncode == 0, done.stderr
    assert f"restarting, from {tmp_path}/checkpoints/step-" in done.stderr
    assert_identical(final_state(tmp_path), final_state(undisturbed / "run"))


@pytest.mark.long
def test_pods_of_a_drained_node_save_with_all_others_and_go_on_as_others(tmp_path: Path, undisturbed: Path) -> None:
    """The kubelet sends SIGTERM to one pod; the codes are those that the JobSet's rules start again."""
    run = tmp_path / "run"
    command = train_command(undisturbed / "data", run, LOSS)
    drained = {"LOSE_RUN": str(run), "LOSE_AFTER": "2", "LOSE_WHOM": "launcher", "LOSE_BY": "SIGTERM"}
    assert run_pods(command, **drained) == [INTERRUPTED, INTERRUPTED]
    assert newest_checkpoint(str(run)) > run / "checkpoints/step-00000002", "not the one before"
    assert run_pods(command) == [0, 0]
    assert_identical(final_state(run), final_state(undisturbed / "run"))
