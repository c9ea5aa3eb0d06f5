"""Law 7: a bit that flips in one rank's own gradient is found before the update, its device named, and undone."""

from pathlib import Path

import pytest

from tests.laws.jobs import Forked, assert_identical, final_state, forked, records, run, train_command

AUDITED: dict[str, object] = {
    "run.reproducible": "true",
    "run.audit_every_steps": 1,
    "run.checkpoint_every_steps": 4,
    "run.epochs": 1,
    "data.loader": "torchvision",
}


def miscomputing(command: list[str], *, ranks: int, first: int, how_many: int) -> Forked:
    return Forked((str(first), str(how_many), *command), ranks=ranks, target="tests.laws.ranks_miscompute:main")


def test_single_flip_is_named_by_the_majority_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    data: Path, tmp_path: Path
) -> None:
    shape = {**AUDITED, "batch.global_batch_size": 24}  # six steps, in which each rank has one microbatch
    run(forked(train_command(data, tmp_path / "healthy", {**shape, "run.audit_every_steps": 0}), ranks=3))
    # a rank calls backward for its own microbatch and for another rank's: the ninth call is its own of step 5
    command = train_command(data, tmp_path / "faulty", shape)
    done = run(miscomputing(command, ranks=3, first=9, how_many=1))
    (hint,) = [r["hint"] for r in records(tmp_path / "faulty", "hint") if "going back" in r["hint"]]
    assert hint.startswith("in step 5 rank 1 on ")
    assert "computed other bits than ranks 0 and 2: the gradient of linear.weight in microbatch 1 (a bit" in hint
    assert hint.endswith("going back to step 4")
    assert hint in done.stdout
    assert [(r["step"], r["compared"]) for r in records(tmp_path / "faulty", "audit")] == [(k, 3) for k in range(1, 7)]
    assert_identical(final_state(tmp_path / "faulty"), final_state(tmp_path / "healthy"))


@pytest.mark.long
def test_audits_change_no_bit_and_no_record(data: Path, tmp_path: Path) -> None:
    """Digests and the noise scale are of the step alone, although microbatches are computed again within it."""
    shape = {
        **AUDITED,
        "optimizer.sharded": "true",
        "augment.mixup_alpha": 0.2,
        "run.digest_every_steps": 1,
        "run.noise_scale_every_steps": 1,
    }
    found = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        run(forked(train_command(data, folder, {**shape, "run.audit_every_steps": every}), ranks=2))
        of_time = ("time", "elapsed_seconds", "kind")
        told = [*records(folder, "digests"), *records(folder, "noise")]
        found.append([{key: value for key, value in record.items() if key not in of_time} for record in told])
    assert len(records(tmp_path / "1", "audit")) == 5
    assert found[0] == found[1]
    assert len(found[0]) == 10
    assert_identical(final_state(tmp_path / "1"), final_state(tmp_path / "0"))


@pytest.mark.long
def test_lasting_fault_ends_the_run_at_the_first_audit_after_it_and_two_ranks_are_both_named(
    data: Path, tmp_path: Path
) -> None:
    # from step 3 on: steps 2 and 4 are audited, the latter for its checkpoint, too
    command = train_command(data, tmp_path, {**AUDITED, "run.audit_every_steps": 2, "run.checkpoint_every_steps": 1})
    done = run(miscomputing(command, ranks=2, first=8, how_many=10**9), expect=5)
    assert "in step 3 rank 0 on " in done.stderr
    assert "computed different bits, and no third rank tells which of them is wrong: the gradient of " in done.stderr
    assert "; this happened again after the run went back to step 2\n" in done.stderr
