"""`bigbatch doctor RUN`: the limit follows from the run's own records."""

import json
from pathlib import Path
from typing import Any

import pytest

from bigbatch.cli import main
from bigbatch.tools.doctor.recorded_run import explain, limit_of_run, run_times
from bigbatch.trainer.config.file import dump_config, load_config

CONFIG = load_config(["--config", "quickstart"])  # 512 images a step


def train(
    step: int, rate: float = 256.0, *, wait: float | None = 0.01, sums: float | None = 0.02, slow: float = 0.0
) -> dict:
    shares = {"input_wait_fraction": wait, "exposed_communication_fraction": sums, "straggler_fraction": slow}
    return {"kind": "train", "step": step, "images_per_second": rate, "compute_images_per_second": rate, **shares}


def records(*reports: dict[str, Any], alone: float | None = None) -> list[dict[str, Any]]:
    start = {"kind": "start", "step": 0, "job": {}, "elapsed_seconds": 0.0}
    measured = [] if alone is None else [{"kind": "input", "step": 0, "loader_images_per_second": alone}]
    return [start, *measured, *reports, {"kind": "eval", "step": reports[-1]["step"], "elapsed_seconds": 100.0}]


UNEVEN = load_config(["--config", "quickstart", "--batch.microbatch_size", "128", "--batch.bn_span", "32"])
"""4 microbatches: on 3 ranks, 2 of 6 places are empty."""


@pytest.mark.parametrize(
    ("world_size", "shares", "alone", "limit"),
    [
        (None, {}, None, "compute"),
        (None, {"wait": 0.3}, None, "input"),
        (None, {"wait": 0.3}, 300.0, "input"),
        (None, {"wait": 0.3}, 9000.0, "cores"),
        (None, {"sums": None, "wait": 0.04}, None, "compute"),
        (None, {"sums": 0.3, "slow": 0.1}, None, "network"),
        (None, {"sums": 0.3, "slow": 0.26}, None, "straggler"),
        (4, {"sums": 0.3, "slow": 0.2}, None, "straggler"),
        (3, {"sums": 0.3, "slow": 0.26}, None, "uneven"),
        (3, {"sums": 0.3, "slow": 0.0}, None, "uneven"),
        (3, {"sums": 0.9, "slow": 0.8}, None, "straggler"),
        (3, {"sums": 0.9, "slow": 0.4}, None, "network"),
    ],
)
def test_limit_follows_from_the_largest_wait_and_uneven_shares_are_no_slow_rank(
    world_size: int | None, shares: dict[str, Any], alone: float | None, limit: str
) -> None:
    run = records(train(5), train(10, **shares), alone=alone)
    run[0]["job"] = {"world_size": world_size}
    times = run_times(run, UNEVEN)
    assert times is not None
    assert limit_of_run(times) == limit
    assert limit != "uneven" or "3 ranks" in next(explain(times, UNEVEN))


def test_times_are_those_of_the_last_start_without_its_first_report() -> None:
    old = records(train(5, 10.0), train(10, 10.0))
    times = run_times([*old, *records(train(5, 128.0), train(10), train(15), train(20, 64.0))], CONFIG)
    assert times is not None
    assert (times.images_per_second, times.num_reports, times.slow_steps, times.step) == (256.0, 3, (20,), 20)
    assert times.step_seconds == pytest.approx(5 * 512 / 128 + 2 * 5 * 512 / 256 + 5 * 512 / 64)
    assert times.other_seconds == pytest.approx(100 - times.step_seconds)


def test_command_prints_the_limit_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(CONFIG))
    path = tmp_path / "metrics.jsonl"
    assert main(["doctor", str(tmp_path)]) == 1
    assert "run.log_every_steps" in capsys.readouterr().err
    damaged = [{"kind": "train"}, train("x"), {**train(7), "images_per_second": None}]  # type: ignore[arg-type]
    damaged.append({"kind": "eval", "step": 8, "elapsed_seconds": 10**400})
    lines = [json.dumps(each) for each in (*records(train(5), train(10, wait=0.3)), *damaged)]
    path.write_text("\n".join([*lines, '{"kind": "tra']))
    assert main(["doctor", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "limited by the input" in said
    assert "data.num_threads" in said
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit"] == "input"
    assert main(["doctor", str(tmp_path / "none")]) == 1
    assert "not a run folder" in capsys.readouterr().err
