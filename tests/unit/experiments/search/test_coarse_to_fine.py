"""Whole searches, with a stand-in for the training whose results are a closed form."""

import csv
import os
import re
import signal
import sys
import threading
import time
from unittest import mock

import pytest
import yaml
from error_texts import naming
from fake_searches import Fake, run, states

from bigbatch.errors import TuneError
from bigbatch.experiments.search.study import Round, best_record
from bigbatch.tools import child
from bigbatch.trainer.config.file import PACKAGED, load_config
from bigbatch.trainer.folder.folder import read_records


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder, trials and output of a search of two rounds, which tests only read."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(folder)


@pytest.mark.long
def test_second_round_comes_closer_to_the_best(whole):
    folder, records, said = whole
    lrs = [[float(r.values["schedule.base_lr"]) for r in records if r.round == n] for n in (1, 2)]
    assert [len(each) for each in lrs] == [5, 5]
    best = [min(each, key=lambda lr: max(lr / 8, 8 / lr)) for each in lrs]  # the stand-in's best is at 8
    found = float(best_record(records, metric="top1").values["schedule.base_lr"])
    assert found == min(best, key=lambda lr: max(lr / 8, 8 / lr))
    assert max(lrs[1]) / min(lrs[1]) <= 4  # a third of 64 in the logarithm
    assert min(lrs[1]) <= best[0] * 2
    assert said[0] == "round 1 of 2, 5 trials: schedule.base_lr from 1 to 64 (log)"
    (last,) = (line for line in said if line.startswith("point 10 (schedule.base_lr="))
    assert "10 of 10" in last
    assert not [line for line in said if "lies at an end" in line]
    assert (folder / "search.png").exists()
    assert states(folder) == ["done"] * 10
    runs = list(csv.DictReader((folder / "report/runs.csv").read_text().splitlines()))
    assert len({row["schedule.base_lr"] for row in runs}) == 10


@pytest.mark.long
def test_best_yaml_is_the_whole_experiment_in_its_own_length(whole):
    folder, records, _ = whole
    best, path = best_record(records, metric="top1"), folder / "best.yaml"
    lr = best.values["schedule.base_lr"]
    found = load_config(["--config", str(path)])
    assert found == load_config(["--config", "quickstart", "--schedule.base_lr", lr])
    assert found.run.epochs == yaml.safe_load((PACKAGED / "quickstart.yaml").read_text())["run"]["epochs"] != 2
    first, second = path.read_text().splitlines()[:2]
    assert first == f"# bigbatch tune search in {folder}: trial {best.number} of 10, of 2 epochs each"
    assert re.fullmatch(rf"# top-1 .*% with schedule\.base_lr={lr}", second)


@pytest.mark.long
def test_finished_search_repeats_its_result_and_runs_nothing(whole):
    fake = Fake()
    assert run(whole[0], fake)[0] == whole[1]
    assert fake.made == []


@pytest.mark.long
def test_trials_that_diverge_count_as_failed(tmp_path):
    records, said = run(tmp_path, Fake("--diverge-above", "16"), trials=6, rounds=1)
    failed = [r for r in records if r.state == "failed"]
    assert 0 < len(failed) < 6
    assert all(float(r.values["schedule.base_lr"]) > 16 for r in failed)
    assert all(r.reason.startswith("the loss is nan at step ") for r in failed)
    assert "failed: the loss is nan at step " in "\n".join(said)


@pytest.mark.long
def test_search_whose_trials_all_fail_says_why(tmp_path):
    with pytest.raises(TuneError) as caught:
        run(tmp_path, Fake("--diverge-above", "0"), trials=2)
    message = str(caught.value)
    assert re.search(
        naming("all 2 trials", f" {tmp_path} ", "loss is nan at step ", "schedule.base_lr", "--study"), message
    )
    assert "\n" not in message
    assert not (tmp_path / "best.yaml").exists()
    assert states(tmp_path) == ["failed"] * 2


@pytest.mark.long
def test_evaluation_that_is_no_number_is_a_failure(tmp_path):
    code = """
import json, sys, pathlib, yaml
folder = pathlib.Path(yaml.safe_load(open(sys.argv[1]))["run"]["directory"])
folder.mkdir()
loss = (None, float('nan'))[int(sys.argv[2])]  # as runs write it now, and as earlier releases did
folder.joinpath('metrics.jsonl').write_text(json.dumps(dict(kind='eval', step=1, epoch=1.0, loss=loss, top1=0)))
folder.joinpath('summary.json').write_text('{}')
"""

    def fake(plan, point, folder):
        return [sys.executable, "-c", code, str(folder.config(point.number)), str(point.number % 2)]

    with pytest.raises(TuneError, match=naming(tmp_path, " 2 of them", "evaluation", " nan", "--study")):
        run(tmp_path, fake, trials=2, metric="loss")


@pytest.mark.long
def test_values_that_do_not_go_together_fail_without_a_process(tmp_path):
    space = ("batch.microbatch_size=choice:128,512", "batch.global_batch_size=choice:512,384")
    fake = Fake()
    records, _ = run(tmp_path, fake, space=space, trials=6, rounds=1)
    failed = [r for r in records if r.state == "failed"]
    assert failed
    assert all(r.values == {"batch.microbatch_size": "512", "batch.global_batch_size": "384"} for r in failed)
    assert "batch.global_batch_size=384 is not a multiple of batch.microbatch_size=512" in failed[0].reason
    assert len(fake.made) == 6 - len(failed)


@pytest.mark.long
def test_worse_are_pruned_and_their_processes_end(tmp_path):
    records, _ = run(tmp_path, Fake("--epoch-seconds", "0.15"), trials=12, rounds=1, epochs=10, prune=True, parallel=4)
    pruned, lengths = [r for r in records if r.state == "pruned"], []
    for record in pruned:
        path = tmp_path / f"points/{record.number}/run/metrics.jsonl"
        evaluated = [each for each in read_records(path) if each["kind"] == "eval"]
        lengths.append(len(evaluated))
        assert record.reason.startswith("worse than the median after ")
        assert record.reason.endswith(" of 10 epochs")
        assert record.result == pytest.approx(evaluated[-1]["top1"], abs=0.2)
    assert min(lengths) < 10, "on a busy machine another one may end by itself before it is asked"
    assert best_record(records, metric="top1") is not None


@pytest.mark.long
def test_trials_run_at_once(tmp_path):
    """Each waits until all three have started."""
    fake = Fake("--together", "3")
    records, _ = run(tmp_path, fake, trials=3, rounds=1, parallel=3)
    assert [r.state for r in records] == ["done"] * 3
    assert fake.made == [1, 2, 3]


def stop_after(condition, number):
    """Send this process a signal once the condition holds."""

    def wait():
        while not condition():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()


@pytest.mark.long
def test_stopped_search_goes_on_with_what_it_had(tmp_path):
    number, folder = signal.SIGTERM, tmp_path / "study"
    whole, _ = run(tmp_path / "whole", trials=4)
    before = signal.getsignal(number)
    stop_after(lambda: (folder / "points/2/run/metrics.jsonl").exists(), number)
    stopped, said = run(folder, Fake("--hold", "2"), trials=4)
    assert stopped is None
    assert said[-1] == "stopped; the same command continues the search"
    assert signal.getsignal(number) == before
    assert not (folder / "best.yaml").exists()
    kept = (folder / "points/2/run/metrics.jsonl").read_text()
    fake = Fake()
    resumed, _ = run(folder, fake, trials=4)
    assert len(fake.made) == 3  # the first is kept, the second continues
    assert (folder / "points/2/run/metrics.jsonl").read_text().startswith(kept)
    assert [(r.number, r.values, r.result) for r in resumed] == [(r.number, r.values, r.result) for r in whole]


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


@pytest.mark.long
def test_second_interrupt_presses_and_a_deaf_trial_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "PATIENCE_SECONDS", (60.0, 0.1))
    log, asked = tmp_path / "points/1/log.txt", threading.Event()
    ask_to_stop = child.ChildProcess.ask_to_stop

    def ask(process):
        ask_to_stop(process)
        asked.set()

    monkeypatch.setattr(child.ChildProcess, "ask_to_stop", ask)
    stop_after(lambda: log.exists() and log.read_text(), signal.SIGINT)
    stop_after(asked.is_set, signal.SIGINT)
    records, _ = run(tmp_path, lambda *_: [sys.executable, "-c", DEAF])
    assert records is None
    assert states(tmp_path) == ["pending"]


@pytest.mark.long
def test_trial_that_ended_and_was_not_told_is_not_run_again(tmp_path):
    """A search that was killed between the end of a trial and its line in the journal."""
    fake = Fake()
    with mock.patch.object(Round, "tell", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(tmp_path, fake, trials=2, rounds=1)
    records, _ = run(tmp_path, fake, trials=2, rounds=1)
    assert fake.made == [1, 2]
    assert [record.state for record in records] == ["done"] * 2


@pytest.mark.long
def test_best_at_an_end_of_its_range_is_pointed_out(tmp_path):
    _, said = run(tmp_path, space=("optimizer.weight_decay=log2:1e-5:2e-5",), trials=2, rounds=1)
    remark = "the best optimizer.weight_decay is at an end of log2:1e-5:2e-5: widen it"
    assert [line for line in said if "at an end" in line] == [remark]
