"""The command that searches: its options, what it shows and refuses, and a search with real runs."""

import json
import subprocess
import sys
import time

import pytest
from error_texts import naming
from fake_searches import SPACE, stated, states
from tiny_training import TINY_OPTIONS, bigbatch

from bigbatch.cli import main
from bigbatch.errors import ConfigError, UserError
from bigbatch.experiments.batch import recommend
from bigbatch.experiments.engine.launch_option import Launch
from bigbatch.experiments.search import options
from bigbatch.experiments.search.options import parse_search
from bigbatch.tools.doctor import command as doctor_command
from bigbatch.trainer.config.file import load_config

WORDS = ("tune", "search", "--config", "quickstart", "--space", SPACE, "--trials", "4", "--epochs", "2", "--study")


def test_tune_search_command_line(tmp_path):
    found = parse_search(
        [*WORDS[2:], str(tmp_path), "--run.seed", "3", "--launch", "mpirun --ranks 2", "--prune", "none"]
    )
    assert found == stated(
        tmp_path,
        config=("--config", "quickstart", "--run.seed", "3"),
        trials=4,
        launch=Launch(("mpirun", "--ranks", "2"), 2),
    )
    with pytest.raises(ConfigError, match=naming("--launch ", "mpirun '")):
        parse_search([*WORDS[2:], str(tmp_path), "--launch", "mpirun '"])
    with pytest.raises(SystemExit):
        parse_search([*WORDS[2:], ""])


@pytest.mark.long
def test_tune_search_dry_run_shows_commands_and_writes_nothing(tmp_path, capsys):
    folder = tmp_path / "study"
    assert main([*WORDS, str(folder), "--dry-run", "--launch", "torchrun --ranks 2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2  # a round has two trials
    for number, line in enumerate(lines, start=1):
        assert f"point {number} (schedule.base_lr=" in line
        assert "bigbatch launch torchrun --ranks 2 -- train --config" in line
        assert line.endswith(str(folder / f"points/{number}/config.yaml"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [
        (options.main, [*WORDS[2:], "runs/search"], (" 2: ", "--launch")),
        (recommend.main, ["runs/one"], ("one process, not 2",)),
        (doctor_command.main, ["--config", "quickstart"], ("bigbatch doctor ", "bigbatch launch")),
    ],
)
def test_command_that_starts_ranks_refuses_to_be_one(command, words, named, monkeypatch):
    job = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": 1}
    for name, value in job.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=naming(*named)):
        command(words)


@pytest.mark.weekly
def test_tune_search_of_real_runs_and_a_kill(tmp_path):
    """Two ranks a trial; the search is killed while its second trial trains, and started again."""
    folder = tmp_path / "study"
    often = ["--data.num_synthetic_samples=32", "--run.log_every_steps=1", "--run.checkpoint_every_steps=1"]
    words = [*WORDS, str(folder), "--trials", "3", "--launch", "mpirun --ranks 2", *TINY_OPTIONS, *often]
    first = subprocess.Popen([sys.executable, "-m", "bigbatch", *words], stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 200
    while not (folder / "points/2/run/metrics.jsonl").exists():
        assert time.monotonic() < until
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.communicate()
    kept = (folder / "points/1/run/summary.json").stat().st_mtime_ns
    done = bigbatch(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "points/1/run/summary.json").stat().st_mtime_ns == kept
    assert states(folder) == ["done"] * 3
    for number in range(1, 4):
        summary = json.loads((folder / f"points/{number}/run/summary.json").read_text())
        assert (summary["world_size"], summary["epochs"]) == (2, 2)
    assert load_config(["--config", str(folder / "best.yaml")]).run.epochs == 12
