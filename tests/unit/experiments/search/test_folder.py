"""The folder of a search: it belongs to one search, and to one process at a time."""

import fcntl

import pytest
from error_texts import naming
from fake_searches import run

from bigbatch.cli import main
from bigbatch.errors import RunFolderError, TuneError
from bigbatch.trainer.config.file import load_config


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a search of three trials, which ended."""
    folder = tmp_path_factory.mktemp("begun")
    run(folder, trials=3, rounds=1)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"epochs": 3}, "epochs: 2 instead of 3"),
        ({"space": ("schedule.base_lr=log:1:32",)}, '"space": ["schedule.base_lr=log:1:32"]'),
        ({"trials": 4}, '"trials": 4'),
        ({"metric": "loss"}, '"metric": "loss"'),
        ({"prune": True}, '"prune": true'),
        ({"config": ("--config", "quickstart", "--run.seed", "1")}, '{"run.seed": 1}'),
    ],
)
def test_folder_of_another_search_is_refused(begun, changes, complaint):
    with pytest.raises(TuneError, match=naming(f"{begun} ", complaint, "--study")):
        run(begun, **({"trials": 3, "rounds": 1} | changes))


@pytest.mark.long
def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").touch()
    with pytest.raises(TuneError, match=naming(f"{tmp_path}/used ", "empty", "--study")):
        run(tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.tex"]
    with pytest.raises(RunFolderError, match=naming(f"{tmp_path}/used/thesis.tex: File exists")):
        run(tmp_path / "used/thesis.tex")


@pytest.mark.long
def test_search_whose_experiment_changed_behind_it_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: quickstart\n")
    stated = {"config": ("--config", str(tmp_path / "mine.yaml")), "trials": 2, "rounds": 1}
    run(tmp_path / "study", **stated)
    (tmp_path / "mine.yaml").write_text("base: quickstart\nrun: {seed: 1}\n")
    with pytest.raises(TuneError, match=naming("base.yaml has run.seed=0 instead of 1", "--study")):
        run(tmp_path / "study", **stated)


@pytest.mark.long
def test_search_that_was_killed_as_it_began_can_begin_again(tmp_path):
    for name in (".lock", ".sweep.yaml.77"):
        (tmp_path / name).write_text("")
    records, _ = run(tmp_path, trials=2, rounds=1)
    assert load_config(["--config", str(tmp_path / "base.yaml")]) == load_config(["--config", "quickstart"])
    assert [record.state for record in records] == ["done"] * 2


@pytest.mark.slow
def test_folder_is_not_shared_by_two_searches(tmp_path):
    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TuneError, match=naming(f" {tmp_path}: ", "another command trains")):
            run(tmp_path)


@pytest.mark.long
def test_search_is_no_sweep_and_its_report_is_as_any(begun, capsys):
    assert main(["sweep", str(begun)]) == 1
    assert "bigbatch tune search" in capsys.readouterr().err
    assert main(["report", str(begun)]) == 0
    assert "base_lr" in capsys.readouterr().out
