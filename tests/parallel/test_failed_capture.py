"""A step that cannot be captured as a CUDA graph ends no job: all ranks continue without, from the state before it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bigbatch.errors import FAILED
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import Forked, assert_identical, final_state, forked, run, train_command

TARGET = "tests.parallel.failing_capture:bigbatch"
SETTINGS = {"data.loader": "torchvision", "compute.mode": "eager", "run.checkpoint_every_steps": 0}
SETTINGS |= {"run.log_every_steps": 4}
SETTINGS |= {"schedule.warmup_epochs": 0, "schedule.base_lr": 0.5, "schedule.end_lr": 0.5}
"""In captured steps the learning rate is an fp32 number: 0.5 is one."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_job_whose_last_rank_cannot_capture_trains_on_without_a_graph(ranks: int, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_dataset(data, train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    captured = train_command(data, tmp_path / "run", SETTINGS | {"compute.cuda_graph": True})
    done = run(Forked(tuple(captured), ranks, TARGET))
    run(forked(train_command(data, tmp_path / "eager", SETTINGS), ranks=ranks))
    who = "rank 1: " if ranks > 1 else ""
    why = f"{who}compute.cuda_graph=true: a step of "
    (line,) = [line for line in done.stdout.splitlines() if "could not be captured" in line]
    assert why in line
    assert line.endswith("; continuing from step 3 without a CUDA graph"), line
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    starts = [(record["step"], record["job"]["mode"]) for record in records if record["kind"] == "start"]
    assert starts == [(0, "CUDA graph"), (3, "eager")]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["resumed_after_step"], summary["steps"]) == (0, 10)
    assert not [name for name in summary if "rank_" in name], "no rank was lost"
    trained = [{"step": 0}, *(record for record in records if record["kind"] == "train")]
    seconds = sum(32 * (one["step"] - before["step"]) / one["images_per_second"] for before, one in pairwise(trained))
    assert summary["images_per_second"] == pytest.approx(320 / seconds, rel=0.1), "a played capture counts images"
    reported = [record["step"] for record in records if record["kind"] == "train"]
    assert reported[0] == 3, "the steps before the capture are reported"
    ours, theirs = final_state(tmp_path / "run"), final_state(tmp_path / "eager")
    assert_identical(ours, theirs)


def test_failed_capture_ends_a_job_with_a_sharded_update(tmp_path: Path) -> None:
    """No rank holds the whole state."""
    settings = SETTINGS | {"compute.cuda_graph": True, "optimizer.sharded": True, "data.root": tmp_path / "data"}
    write_dataset(tmp_path / "data", train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    command = train_command(tmp_path, tmp_path / "run", settings)
    done = run(Forked(tuple(command), 2, TARGET), expect=FAILED)
    assert "could not be captured" in done.stderr
    assert "set compute.cuda_graph=false" in done.stderr
