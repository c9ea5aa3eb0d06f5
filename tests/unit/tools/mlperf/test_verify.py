"""The command that verifies runs: which it tests together, which it refuses or warns of, and its verdicts."""

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from error_texts import naming
from mlperf_runs import seeds, verified, write_run

from bigbatch.errors import ConfigError, RunFolderError
from bigbatch.tools.mlperf.finished_run import read_run
from bigbatch.tools.mlperf.reference import RULESET
from bigbatch.trainer.folder.folder import RunDir

rcp_checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")


@pytest.mark.long
@pytest.mark.parametrize(
    ("epochs", "holds"),
    [
        ((40, 40, 41, 41, 41), True),  # 40.67, just above 40.63
        ((40, 40, 40, 41, 42), False),  # 40.33
    ],
)
def test_verify_several_seeds_are_tested_together(
    epochs: tuple[int, ...], holds: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = seeds(tmp_path, epochs)
    code, lines = verified(capsys, *folders)
    assert (code == 0) == holds
    assert lines["epochs to 75.9%"].startswith("yes" if holds else "NO")
    counted = sorted(epochs)[1:-1]
    assert f"mean without extremes {sum(counted) / len(counted):.2f}" in lines["epochs to 75.9%"]
    for number, folder in enumerate(folders):  # MLPerf's whole checker, from the logs
        (tmp_path / f"result_{number}.txt").write_text((Path(folder) / "mlperf_log.txt").read_text())
    passed, _, _ = rcp_checker.check_directory(str(tmp_path), "training", RULESET, False, False, rcp_pass="full_rcps")
    assert passed == holds


@pytest.mark.long
def test_verify_one_of_several_seeds_may_miss_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = seeds(tmp_path, (41, 42, 42))
    missed = [str(write_run(tmp_path / f"missed{n}", f"--run.seed={9 + n}", reached=False)) for n in range(2)]
    code, lines = verified(capsys, *folders, missed[0])
    assert code == 0
    assert "41 42 42 not reached, mean without extremes 42.00" in lines["epochs to 75.9%"]
    code, lines = verified(capsys, *folders, *missed)
    assert code == 1
    assert "reached by all runs but one" in lines["epochs to 75.9%"]


def test_verify_a_batch_above_all_records_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = ["--batch.global_batch_size=81920", "--batch.microbatch_size=64"]
    code, lines = verified(capsys, write_run(tmp_path / "run", *big, "--optimizer.momentum=0.95"))
    assert code == 0
    assert lines["epochs to 75.9%"].endswith("MLPerf has no record of so large a batch")


def test_verify_a_run_of_another_kind_is_verified_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = verified(capsys, write_run(tmp_path / "run", recipe="fast_resnet50_16", epochs=(12, 16)))
    assert code == 1
    broken = {rule for rule, line in lines.items() if line.startswith("NO")}
    assert {"optimizer.name", "schedule.name", "model.options.blurpool", "data.train_sizes"} <= broken
    assert '"submission_division", "value": "open"' in (tmp_path / "run/mlperf_log.txt").read_text()


@pytest.mark.long
def test_verify_runs_of_two_recipes_are_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "--run.seed=1", "--schedule.base_lr=16")]
    with pytest.raises(ConfigError, match=naming(*runs, "schedule.base_lr=16.0 ", "17.0")):
        verify_all(runs)
    runs = [runs[0], write_run(tmp_path / "c", "--run.eval_offset_epochs=1")]
    with pytest.raises(ConfigError, match=naming(*runs, "run.seed=0")):
        verify_all(runs)


ELSEWHERE = {
    "run.digest_every_steps": 1,
    "run.digest_values": "[fc.weight]",
    "run.noise_scale_every_steps": 5,
    "run.loggers": "[]",
    "run.log_every_steps": 7,
    "run.checkpoint_every_steps": 0,
    "run.keep_checkpoints": 5,
    "run.resume": "never",
    "data.root": "/elsewhere",
    "data.num_threads": 3,
    "data.prefetch_batches": 9,
    "data.patience_seconds": 19,
    "data.stage": "/dev/shm/stage",
    "data.bind_numa": "false",
    "data.probe_seconds": 0,
    "comm.backend": "tcp",
    "comm.interface": "eth9",
    "comm.algorithm": "ring",
    "comm.table": "table.json",
    "comm.group_size": 4,
    "comm.threshold_bytes": 1000,
    "comm.buffer_bytes": 1000,
    "comm.first_buffer_bytes": 1000,
    "comm.warn_seconds": 21,
    "comm.timeout_seconds": 301,
    "comm.timeline_steps": "[1,2]",
}


@pytest.mark.long
def test_verify_runs_of_one_recipe_on_other_machines_belong_together(tmp_path: Path) -> None:
    here = write_run(tmp_path / "a")
    words = [f"--{key}={value}" for key, value in ELSEWHERE.items()]
    assert verify_all([here, write_run(tmp_path / "b", "--run.seed=1", *words)]) == 0
    precise = write_run(tmp_path / "c", "--run.seed=2", "--comm.wire_dtype=float16")
    with pytest.raises(ConfigError, match=naming(here, precise, "comm.wire_dtype=float16")):
        verify_all([here, precise])


@pytest.mark.long
@pytest.mark.parametrize(
    ("epochs", "recipe", "warns"),
    [
        ((37,), "resnet50_8k", False),  # the fastest reference run needs 41
        ((42, 20), "resnet50_8k", True),
        ((20,), "nus_resnet50_16k", True),  # between two records, which have a mean alone: 46.9 or so
        ((20, 20, 20), "resnet50_8k", False),  # the test itself refuses these
    ],
)
def test_verify_a_run_far_ahead_of_the_reference_gets_a_warning(
    epochs: tuple[int, ...], recipe: str, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        write_run(tmp_path / f"{n}", f"--run.seed={n}", "--run.target_top1=0.759", epochs=(10, e), recipe=recipe)
        for n, e in enumerate(epochs)
    ]
    code = verify_all(folders)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == warns
    for line in warnings:
        assert line.startswith(f"warning: 75.9% after {min(epochs)} epochs, and the reference needs ")
    if recipe == "resnet50_8k":
        assert code == (len(epochs) > 2)


def verify_all(runs: Sequence[Path]) -> int:
    """Without the command's way to print errors."""
    return int(importlib.import_module("bigbatch.tools.mlperf.verify").main([str(run) for run in runs]))


@pytest.mark.slow
def test_verify_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=naming(tmp_path, "config.yaml")):
        read_run(RunDir(tmp_path))
    run = RunDir(write_run(tmp_path / "run", epochs=()))
    with pytest.raises(RunFolderError, match=naming("run/metrics.jsonl", "evaluation")):
        read_run(run)
    run.metrics.write_text("")
    with pytest.raises(RunFolderError, match=naming("run/metrics.jsonl", "started")):
        read_run(run)
