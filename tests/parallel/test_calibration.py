"""The first start on a cluster measures it, and later ones take that: two nodes, with a home each, played here."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import places
from test_parallel import fork_job

from bigbatch.cli import main
from bigbatch.comm.measure.calibration import calibrate
from bigbatch.trainer.build import job

TINY = (
    *("--config", "quickstart", "--data.loader", "synthetic", "--data.num_synthetic_samples", "32"),
    *("--data.probe_seconds", "0", "--data.image_size", "16", "--model.options.width", "2", "--run.epochs", "1"),
    *("--batch.global_batch_size", "16", "--batch.microbatch_size", "8", "--batch.bn_span", "8"),
    *("--schedule.warmup_epochs", "0"),
)


def train_shortly(seconds: str, *command: str) -> int:
    """What a rank runs: bigbatch, which may measure for so long."""
    job.calibrate = partial(calibrate, seconds=float(seconds))  # type: ignore[attr-defined]
    return main(command)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Train on two nodes, in the folder run: the summary, and all that was said."""

    def run(*options: str, run: str) -> tuple[dict[str, Any], str]:
        environs = [
            {**place, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "BIGBATCH_HOST": f"n{rank}"}
            | {"XDG_CACHE_HOME": str(tmp_path / f"home{rank}")}
            for rank, place in enumerate(places(2))
        ]
        folder = tmp_path / run
        command = ("0.5", "train", *TINY, "--run.directory", str(folder), *options)
        code, text = fork_job("test_calibration:train_shortly", command, environs, timeout_seconds=250)
        assert code == 0, text
        return json.loads((folder / "summary.json").read_text()), text

    return run


@pytest.mark.long
def test_a_cluster_is_measured_once_and_rank_0_tells_all(
    train: Callable[..., tuple[dict[str, Any], str]], tmp_path: Path
) -> None:
    over = ("--comm.backend", "tcp", "--comm.interface", "lo")
    homes = [tmp_path / f"home{rank}/bigbatch/calibration" for rank in range(2)]
    summary, text = train(*over, run="first")
    (path,) = homes[0].iterdir()
    assert not homes[1].exists()
    assert f"stored in {path}" in summary["algorithm_why"]
    assert summary["algorithm_why"].startswith("comm.algorithm=auto: ")
    assert text.count("stored in") >= 1
    assert "another table may change the last bits" in text

    record = json.loads(path.read_text())
    assert (record["cluster"]["backend"], record["cluster"]["group_sizes"]) == ("tcp", [1, 1])
    assert json.loads((tmp_path / "first/calibration.json").read_text()) == record
    homes[1].mkdir(parents=True)
    for home, algorithm in zip(homes, ("ring", "doubling"), strict=True):  # no two ranks have the same
        (home / path.name).write_text(json.dumps({**record, "table": [[None, algorithm]]}))
    summary, text = train(*over, run="second")
    assert summary["algorithm"] == "ring"
    assert str(path) in summary["algorithm_why"]

    for home in homes:
        shutil.rmtree(home)
    summary, text = train(*over, "--run.epochs", "2", run="second")  # continues with what it began with
    assert summary["algorithm"] == "ring"
    assert str(tmp_path / "second/calibration.json") in summary["algorithm_why"]
