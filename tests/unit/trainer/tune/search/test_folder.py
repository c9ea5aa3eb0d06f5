"""The folder of a search: it belongs to one search, and to one process at a time."""

import fcntl
import re
import subprocess
import sys

import pytest
from error_texts import naming
from fake_searches import Fake, poll_often, run, stated  # noqa: F401 - poll_often works by being here

from bigbatch.errors import RunFolderError, TuneError
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.tune.search import coarse_to_fine as search_module
from bigbatch.trainer.tune.search import folder as folder_module
from bigbatch.trainer.tune.search.coarse_to_fine import search


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"epochs": 3}, "--epochs 3 (was 2)"),
        ({"space": ("schedule.base_lr=log:1:32",)}, '--space ["schedule.base_lr=log:1:32"] (was '),
        ({"trials": 4}, "--trials 4 (was 3)"),
        ({"metric": "loss"}, '--metric "loss" (was "top1")'),
        ({"prune": True}, '--prune "median" (was "none")'),
        ({"config": ("--config", "quickstart", "--run.seed", "1")}, "run.seed=1 (was 0)"),
    ],
)
def test_folder_of_another_search_is_refused(tmp_path, changes, complaint):
    run(tmp_path, trials=3, rounds=1)
    with pytest.raises(TuneError) as caught:
        run(tmp_path, **({"trials": 3, "rounds": 1} | changes))
    assert re.search(naming(f"{tmp_path} ", f": {complaint}", "--study"), str(caught.value))


@pytest.mark.long
def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").touch()
    with pytest.raises(TuneError, match=naming(f"{tmp_path}/used ", "empty", "--study")):
        run(tmp_path / "used")
    (tmp_path / "used/search.json").write_text("[")
    with pytest.raises(TuneError, match=naming(f"{tmp_path}/used/search.json ", "line 1", "--study")):
        run(tmp_path / "used")
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) == ["search.json", "thesis.tex"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/base.yaml").write_text("of my own")
    with pytest.raises(TuneError, match=naming(f"{tmp_path}/mine ", "empty", "--study")):
        run(tmp_path / "mine")
    assert (tmp_path / "mine/base.yaml").read_text() == "of my own"
    with pytest.raises(RunFolderError, match=naming(f"{tmp_path}/used/thesis.tex: File exists")):
        run(tmp_path / "used/thesis.tex")


def test_trials_of_a_search_that_goes_on_take_its_own_config(tmp_path):
    folder, identity = folder_module.StudyFolder(tmp_path), {"config": "run: {seed: 1}\n"}
    folder_module.enter(folder, identity)
    folder.base.write_text("run: {metrics: {x: planted.Net}}\n")
    folder_module.enter(folder, identity)
    assert folder.base.read_text() == identity["config"]


@pytest.mark.long
@pytest.mark.parametrize("left", [(), ("base.yaml",), (".base.yaml.77",), ("base.yaml", ".search.json.77")])
def test_search_that_was_killed_as_it_began_can_begin_again(tmp_path, left):
    for name in (".search.lock", ".trials.lock", *left):
        (tmp_path / name).write_text("")
    outcome, _ = run(tmp_path, trials=2, rounds=1)
    assert load_config(["--config", str(tmp_path / "base.yaml")]) == load_config(["--config", "quickstart"])
    assert outcome.best.ended.state == "finished"


@pytest.mark.slow
def test_folder_that_is_taken_while_we_wait_for_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(search_module, "require_own", lambda folder, identity: (tmp_path / "thesis.tex").touch())
    with pytest.raises(TuneError, match=naming(f"{tmp_path} ", "empty", "--study")):
        run(tmp_path)


@pytest.mark.slow
def test_folder_is_not_shared_by_two_searches(tmp_path):
    with (tmp_path / ".search.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TuneError, match=naming(f" {tmp_path}: ", "another search", "--study")):
            run(tmp_path)


@pytest.mark.long
def test_trials_of_a_killed_search_are_waited_for(tmp_path):
    """What a trial inherits keeps the lock when the search is gone."""
    tmp_path.joinpath("study").mkdir()
    with (tmp_path / "study/.trials.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        orphan = subprocess.Popen(
            [sys.executable, "-c", "input()"], pass_fds=(lock.fileno(),), stdin=subprocess.PIPE, text=True
        )
    said = []

    def say(text):
        said.append(text)
        if len(said) == 1:
            orphan.communicate("\n")

    assert search(stated(tmp_path / "study", trials=2, rounds=1), say=say, make_argv=Fake())
    assert orphan.returncode == 0
    assert re.search(naming(f" {tmp_path}/study: ", " 600 s "), said[0])


@pytest.mark.long
def test_trials_of_a_killed_search_are_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "ORPHAN_SECONDS", 0.5)
    with (tmp_path / ".trials.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TuneError, match=naming(f" {tmp_path} ", " 0.5 s: ", f"fuser -v {tmp_path}/.trials.lock")):
            run(tmp_path)
