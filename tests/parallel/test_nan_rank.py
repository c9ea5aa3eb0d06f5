"""Numbers that are not finite on one rank name its device; on all ranks they are of the learning rate."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from bigbatch.errors import DIFFERENT, FAILED
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import Forked, assert_identical, final_state, forked, records, run, train_command

LASTING = 10**9
SETTINGS: dict[str, object] = {"data.loader": "torchvision", "run.epochs": 1, "run.log_every_steps": 2}
SETTINGS |= {"batch.global_batch_size": 24, "run.checkpoint_every_steps": 4}
"""Six steps; with three ranks each has one microbatch in each."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    return folder


def job(command: list[str], *, ranks: int, of: str, first: int, how_many: int, expect: int) -> CompletedProcess[str]:
    words = (of, str(first), str(how_many), *command)
    return run(Forked(words, ranks, "tests.laws.ranks_miscompute:not_finite"), expect=expect)


def going_back(folder: Path) -> list[str]:
    return [record["hint"] for record in records(folder, "hint") if "going back" in record["hint"]]


def test_single_nan_of_a_rank_is_undone(data: Path, tmp_path: Path) -> None:
    """In plain sums no rank keeps its own gradient: the run goes back, and all is finite then."""
    settings = SETTINGS | {"comm.algorithm": "native", "run.checkpoint_every_steps": 2}
    run(forked(train_command(data, tmp_path / "healthy", settings), ranks=3))
    command = train_command(data, tmp_path / "faulty", settings)
    job(command, ranks=3, of="1", first=5, how_many=1, expect=0)
    (back,) = going_back(tmp_path / "faulty")
    assert back.startswith("the loss is nan since step 6: "), back
    assert back.endswith("; going back to step 4, and checking each rank's gradients up to step 6"), back
    said = [record["hint"] for record in records(tmp_path / "faulty", "hint")]
    assert any(line.startswith("all numbers up to step 6 are finite this time: a device ") for line in said), said
    assert_identical(final_state(tmp_path / "faulty"), final_state(tmp_path / "healthy"))


def test_rank_that_computes_nan_again_ends_the_job_with_its_name(data: Path, tmp_path: Path) -> None:
    command = train_command(data, tmp_path / "run", SETTINGS)
    done = job(command, ranks=3, of="1,2", first=5, how_many=LASTING, expect=DIFFERENT)
    assert "bigbatch: in step 5 rank 1 on " in done.stderr
    named = (
        "computed gradients that are not finite, linear.weight in microbatch {}, of which rank 0 computed finite ones"
    )
    assert named.format(1) in done.stderr
    assert "; rank 2 on " in done.stderr
    assert named.format(2) in done.stderr
    assert "this happened again after the run went back to step 4" in done.stderr
    assert "base_lr" not in done.stderr


def test_nan_on_all_ranks_is_of_the_learning_rate(data: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"schedule.base_lr": 1e30, "schedule.warmup_epochs": 0, "run.log_every_steps": 1}
    done = run(forked(train_command(data, tmp_path / "run", settings), ranks=3), expect=FAILED)
    (back,) = [line for line in done.stdout.splitlines() if "going back" in line]
    assert back.startswith("the loss is nan since step "), back
    assert ": lower schedule.base_lr or lengthen schedule.warmup_epochs" in done.stderr
    assert "this happened again after the run went back to step 0" in done.stderr
    assert "that processor" not in done.stderr


def test_exact_sums_name_the_rank_at_once(data: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"run.reproducible": "true", "run.log_every_steps": 3}
    job(train_command(data, tmp_path / "run", settings), ranks=3, of="1", first=2, how_many=1, expect=0)
    (back,) = going_back(tmp_path / "run")
    assert " or not finite, by step 3, first in step 2 on rank 1 of 3 alone (" in back, back
    assert back.endswith("; going back to step 0, and checking each rank's gradients up to step 3"), back
