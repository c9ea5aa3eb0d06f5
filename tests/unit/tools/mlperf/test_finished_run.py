"""The MLPerf log of a run: MLPerf's own compliance checker is the judge."""

import json
import re
from pathlib import Path

import pytest
from error_texts import naming
from mlperf_runs import RULES, START, verified, write_run
from tiny_training import TINY

from bigbatch.cli import main
from bigbatch.errors import RunFolderError
from bigbatch.tools.mlperf.finished_run import mlperf_events, read_run
from bigbatch.tools.mlperf.reference import RULESET
from bigbatch.trainer.folder.folder import RunDir

rcp_checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")
mlp_compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")


def compliant(log: Path) -> bool:
    """MLPerf's compliance checker, warnings as errors."""
    judge = mlp_compliance.make_checker("training", RULESET, False, True)
    return bool(mlp_compliance.main(str(log), f"training_{RULESET}/common.yaml", judge)[0])


def test_finished_run_one_run_of_a_recipe_is_fine_and_its_log_complies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = verified(capsys, write_run(tmp_path / "run"))
    assert code == 0
    assert re.split(r"  +", lines.pop("epochs to 75.9%")) == [
        *("-", "epochs to 75.9%", "42"),
        "record of 8,192: 41.88 (41 to 44); a test needs 3 runs, MLPerf's 5",
    ]
    legal = {rule: re.split(r"  +", line)[3] for rule, line in lines.items()}
    assert legal == {**RULES, "train_samples": "1,281,167 (ImageNet)", "eval_samples": "50,000 (ImageNet)"}
    assert all(line.startswith("yes ") for line in lines.values())
    log = tmp_path / "run/mlperf_log.txt"
    assert compliant(log)
    assert rcp_checker.read_submission_file(str(log), RULESET, False) == (0, 42, 8192, "resnet")


def test_finished_run_the_log_has_the_times_and_settings_of_the_run(tmp_path: Path) -> None:
    assert main(["verify", str(write_run(tmp_path / "run"))]) == 0
    lines = (tmp_path / "run/mlperf_log.txt").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    found = [(e["key"], (e["time_ms"] / 1000 - START)) for e in events if e["event_type"] != "POINT_IN_TIME"]
    assert found == [
        *(("init_start", 0), ("init_stop", 0), ("run_start", 0)),
        *(("block_start", 0), ("block_stop", 38 * 60 + 0.5), ("eval_start", 38 * 60 + 0.5), ("eval_stop", 38 * 60 + 7)),
        *(("block_start", 38 * 60 + 7), ("block_stop", 42 * 60 + 0.5), ("eval_start", 42 * 60 + 0.5)),
        *(("eval_stop", 42 * 60 + 7), ("run_stop", 42 * 60 + 7)),
    ]
    values = {e["key"]: e["value"] for e in events}
    assert values["lars_opt_learning_rate_decay_steps"] == 39 * 156
    assert values["lars_opt_learning_rate_warmup_epochs"] == 5
    assert (values["global_batch_size"], values["model_bn_span"], values["submission_division"]) == (8192, 64, "closed")
    assert values["cache_clear"] is False
    assert events[-1]["metadata"]["status"] == "success"
    assert [e["metadata"]["epoch_num"] for e in events if e["key"] == "eval_accuracy"] == [38, 42]
    blocks = [e["metadata"] for e in events if e["key"] == "block_start"]
    assert [(b["first_epoch_num"], b["epoch_count"]) for b in blocks] == [(1, 38), (39, 4)]


def test_finished_run_the_log_does_not_follow_a_time_of_day_that_is_set(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in RunDir(run).metrics.read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {"elapsed_seconds": record["time"] - START, "time": record["time"] + (number > 1) * 864000}
    RunDir(run).metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    seconds = records[-1]["elapsed_seconds"]
    *_, end = mlperf_events(read_run(RunDir(run)), target_top1=0.759, division="closed")
    assert end.time_s == pytest.approx(START + seconds)


def test_finished_run_the_log_ends_where_the_target_is_reached(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "--run.target_top1=null", epochs=(34, 38))
    with RunDir(run).metrics.open("a") as file:
        later = {"kind": "eval", "time": START + 9999, "step": 6864, "epoch": 44.0, "top1": 0.77, "seconds": 1.0}
        file.write(json.dumps(later) + "\n")
    assert main(["verify", str(run)]) == 1, "the target must end the run"
    assert '"epoch_num": 44' not in (run / "mlperf_log.txt").read_text()


@pytest.mark.parametrize("job", [7, [], {}, {"world_size": 1, "train_samples": "x"}])
def test_finished_run_a_start_that_is_damaged_is_refused(job: object, tmp_path: Path) -> None:
    run = RunDir(write_run(tmp_path / "run"))
    _, *others = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text(json.dumps({"kind": "start", "time": START, "step": 0, "job": job}) + "\n" + "".join(others))
    with pytest.raises(RunFolderError, match=naming(run.metrics, "started")):
        read_run(run)


@pytest.mark.parametrize("seconds", [None, "x", 10**400], ids=["none", "text", "huge"])
def test_finished_run_an_evaluation_that_is_damaged_does_not_count(seconds: object, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=(38,), reached=False)
    damaged = {"kind": "eval", "time": START + 9999, "step": 6864, "epoch": 44.0, "top1": 0.77, "seconds": seconds}
    with RunDir(run).metrics.open("a") as file:
        file.write(json.dumps(damaged) + "\n")
    *_, end = mlperf_events(read_run(RunDir(run)), target_top1=0.759, division="closed")
    assert end.metadata == {"status": "aborted"}


def test_finished_run_a_run_that_does_not_reach_the_target_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = verified(capsys, write_run(tmp_path / "run", reached=False))
    assert code == 1
    assert lines["epochs to 75.9%"].startswith("NO")
    assert "not reached" in lines["epochs to 75.9%"]
    log = tmp_path / "run/mlperf_log.txt"
    assert '"status": "aborted"' in log.read_text()
    assert not compliant(log)


@pytest.mark.long
def test_finished_run_what_a_training_leaves_can_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = TINY | {"run.directory": tmp_path / "run", "run.epochs": 2, "run.eval_every_epochs": 1}
    words |= {"data.num_synthetic_samples": 48}
    assert main(["train", "--config", "quickstart", *(f"--{key}={value}" for key, value in words.items())]) == 0
    capsys.readouterr()
    code, lines = verified(capsys, tmp_path / "run")
    assert code == 1
    assert re.split(r"  +", lines["train_samples"])[:3] == ["NO", "train_samples", "48"]
    run = read_run(RunDir(tmp_path / "run"))
    assert (run.job["accumulation_steps"], run.job["steps_per_epoch"], run.job["world_size"]) == (2, 3, 1)
    events = [json.loads(line[len(":::MLLOG ") :]) for line in run.rundir.mlperf_log.read_text().splitlines()]
    times = [event["time_ms"] for event in events]
    assert times == sorted(times)
    assert [e["metadata"]["epoch_num"] for e in events if e["key"] == "eval_accuracy"] == [1, 2]
