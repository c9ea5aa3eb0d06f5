"""A sweep of real runs by an own script: one trains, one does not fit into memory; the rest has nothing left to do."""

import json
from pathlib import Path

import pytest
import yaml

from bigbatch.cli import main
from bigbatch.experiments.engine.folder import SweepFolder

SWEEP = {
    "name": "memory",
    "config": "quickstart",
    "options": {
        "data.loader": "synthetic",
        "data.image_size": 32,
        "model.options.width": 64,
        "data.probe_seconds": 0,
        "run.log_every_steps": 1,
        "schedule.warmup_epochs": 0,
        "batch.microbatch_size": 8,
        "batch.bn_span": 8,
        "batch.global_batch_size": 16,
    },
    "steps": 4,
    "where": "local",
    "launch": {},
    "ranks_per_node": 2,
    "script": ["mine.py", "--mine"],
    "grid": {"ranks": [1], "data.num_classes": [10, 1_000_000_000]},  # the last layer's weights take terabytes
    "seeds": 1,
    "timeout_minutes": 10,
}
SCRIPT = """
import sys
from bigbatch.cli import main
assert sys.argv[1:3] == ["--mine", "--config"], sys.argv
print("by my script", flush=True)
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.long
def test_sweep_point_out_of_memory_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    Path("sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    assert main(["sweep", "sweep.yaml"]) == 3
    folder = SweepFolder(Path("runs/sweeps/memory"))
    small, large = folder.read_state(0), folder.read_state(1)
    assert (small["state"], large["state"]) == ("done", "failed"), large["reason"]
    assert large["reason"].startswith("out of memory: "), large["reason"]
    summary = folder.read_summary(0)
    assert summary is not None
    assert (summary["steps"], summary["world_size"], summary["global_batch_size"]) == (4, 1, 16)
    metrics = [json.loads(line) for line in folder.run(0).metrics.read_text().splitlines()]
    assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2, 3, 4]
    assert "by my script" in folder.log(0).read_text()
    assert main(["sweep", "sweep.yaml"]) == 3
    assert folder.read_state(0) == small, "what is done stays as it is"
    assert "0 to run" in capsys.readouterr().out
