"""Shared by the tests of sweeps: a file of a small one, and a folder whose trainings are played."""

import sys
from pathlib import Path

import pytest
from small_sweep import write

from bigbatch.experiments.engine import engine as running
from bigbatch.experiments.engine.folder import SweepFolder


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "sweep.yaml")


TRAIN = """
import json, os, pathlib, sys, time, yaml
config = yaml.safe_load(open(sys.argv[1]))
run = pathlib.Path(config["run"]["directory"])
run.mkdir(parents=True)
code = int(os.environ["FAKE_CODE"]) if config["run"]["seed"] == 0 else 0
if code == 3:
    print("bigbatch: something else\\nbigbatch: no such image")
elif code == 5:
    time.sleep(600)
else:
    (run / "summary.json").write_text(json.dumps({"images_per_second": 1234.5}))
sys.exit(code)
"""


@pytest.fixture
def fake(file: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """Two points; the first one ends as FAKE_CODE says."""
    write(file, grid={"ranks": [1]}, seeds=2)
    script = file.with_name("train.py")
    script.write_text(TRAIN)
    monkeypatch.setattr(
        running,
        "point_command",
        lambda sweep, point, folder: [sys.executable, str(script), str(folder.config(point.number))],
    )
    return SweepFolder(file.with_name("f"))
