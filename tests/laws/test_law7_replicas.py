"""Law 7: a bit that flips in one rank's weights is found, named, and undone by going back."""

from pathlib import Path

import pytest

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from tests.laws.jobs import Forked, assert_identical, final_state, forked, records, run, steps, train_command

SPARSE = {"run.checkpoint_every_steps": 4, "run.compare_every_steps": 1, "run.keep_checkpoints": 100}


def flipping(command: list[str], *, ranks: int, at: int, times: int) -> Forked:
    return Forked((str(at), str(times), *command), ranks=ranks, target="tests.laws.ranks_flip:main")


@pytest.mark.parametrize(
    ("ranks", "sharded"),
    [(2, "false"), pytest.param(2, "true", marks=pytest.mark.long), pytest.param(3, "false", marks=pytest.mark.long)],
)
def test_flipped_bit_is_named_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    ranks: int, sharded: str, data: Path, tmp_path: Path
) -> None:
    # 160 images are five steps of 32, or six of 24
    shape = {**SPARSE, "batch.global_batch_size": {2: 32, 3: 24}[ranks], "optimizer.sharded": sharded}
    run(forked(train_command(data, tmp_path / "healthy", shape), ranks=ranks))
    done = run(flipping(train_command(data, tmp_path / "faulty", shape), ranks=ranks, at=7, times=1))
    (hint,) = [r["hint"] for r in records(tmp_path / "faulty", "hint") if "same bits" in r["hint"]]
    who = "rank 1 on " if ranks == 3 else "rank 0 on "
    assert hint.startswith(f"after step 7 {who}")
    assert "going back to step" in hint
    assert hint in done.stdout
    assert steps(tmp_path / "faulty") == steps(tmp_path / "healthy")
    assert_identical(final_state(tmp_path / "faulty"), final_state(tmp_path / "healthy"))
    assert all(checkpoint.is_agreed for checkpoint in list_checkpoints(tmp_path / "faulty" / "checkpoints"))


@pytest.mark.long
def test_bit_that_flips_again_ends_the_run_with_a_code_of_its_own(data: Path, tmp_path: Path) -> None:
    done = run(flipping(train_command(data, tmp_path, SPARSE), ranks=2, at=7, times=2), expect=5)
    assert "this happened again after the run went back to step 4" in done.stderr
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints")] == [4]


@pytest.mark.long
def test_weights_that_differ_are_not_saved_though_no_report_compares(data: Path, tmp_path: Path) -> None:
    seldom = {**SPARSE, "run.compare_every_steps": 1000}
    run(flipping(train_command(data, tmp_path, seldom), ranks=2, at=7, times=1))
    (hint,) = [r["hint"] for r in records(tmp_path, "hint") if "same bits" in r["hint"]]
    assert hint.startswith("after step 8 ")
