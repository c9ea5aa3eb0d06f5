"""The parts of a search that run no training: a trial's config and command, its process, the study."""

import errno
import itertools
import math
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from error_texts import naming
from fake_searches import stated

from bigbatch.errors import ConfigError, RunFolderError, TuneError
from bigbatch.experiments.engine.engine import gpus_of_slot
from bigbatch.experiments.engine.launch_option import Launch, parse_launch
from bigbatch.experiments.search.plot import draw_search
from bigbatch.experiments.search.space import SearchRange, ValueList
from bigbatch.experiments.search.study import Round, TrialRecord, best_record
from bigbatch.user_settings import visible_gpus

LR = SearchRange("schedule.base_lr", 1, 64, is_log=True, is_int=False)
MOMENTUM = ValueList("optimizer.momentum", ("0.9", "0.95"), is_ordered=False)

# how it is started


def test_launch_words(capsys):
    assert parse_launch("") == Launch((), 1)
    assert parse_launch("torchrun --ranks 3") == Launch(("torchrun", "--ranks", "3"), 3)
    assert parse_launch("").place == {"where": "local", "ranks": 1, "launch": {}}
    assert parse_launch("mpirun --ranks 4 --hosts n0:2,n1:2").place["launch"] == {"hosts": "n0:2,n1:2"}
    wrong = ("mpirun", "srun --ranks 2", "mpirun --ranks 0", "mpirun --ranks 2 -- x", "mpirun --ranks two", "--ranks 2")
    for words in wrong:
        with pytest.raises(ConfigError, match=naming(f"--launch '{words}': ", "'mpirun --ranks 2'")):
            parse_launch(words)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("num_ranks", "gpus", "of_slots"),
    [
        (1, "0123", ["0", "1", "2", "3", "0"]),
        (2, "0123", ["0,1", "2,3", "0,1"]),
        (2, "012", ["0,1", "2,0", "1,2"]),
        (4, "0123", ["", ""]),  # all of them anyway
        (8, "0123", [""]),
        (1, "", [""]),
    ],
)
def test_gpus_are_taken_in_turn(num_ranks, gpus, of_slots):
    seen = [gpus_of_slot(gpus, ranks=num_ranks, slot=slot) for slot in range(len(of_slots))]
    assert seen == [["env", f"CUDA_VISIBLE_DEVICES={each}"] if each else [] for each in of_slots]


def test_gpus_have_the_names_that_their_user_gave():
    assert visible_gpus(2, {}) == ["0", "1"]
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "4,GPU-8f"}) == ["4", "GPU-8f"]
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ["1"], "CUDA ends its list there"
    assert [visible_gpus(2, {"CUDA_VISIBLE_DEVICES": hidden}) for hidden in ("", "-1")] == [[], []]


# the study


def open_round(path, *axes, number=1, maximize=True, prune_from_epoch=1):
    return Round(
        path / "journal.log",
        axes or (LR, MOMENTUM),
        number=number,
        first=1,
        maximize=maximize,
        prune_from_epoch=prune_from_epoch,
        seed=0,
    )


def test_study_spreads_values_evenly(tmp_path):
    study = open_round(tmp_path)
    values = []
    for _ in range(9):
        index, chosen = study.ask()
        study.tell(index, "done", result=0.5)
        values.append(chosen)
    # after a first one by chance, eight of Sobol's points: one in each eighth of the range, four of each choice
    eighths = sorted(int(8 * math.log(float(each["schedule.base_lr"])) / math.log(64)) for each in values[1:])
    assert eighths == list(range(8))
    assert [each["optimizer.momentum"] for each in values[1:]].count("0.9") == 4


def test_study_goes_on_with_the_values_of_a_killed_search(tmp_path):
    first = open_round(tmp_path)
    done, left = first.ask(), first.ask()
    first.tell(done[0], "done", result=0.3)
    again = open_round(tmp_path)
    assert again.unfinished() == [left]
    assert again.ended() == [TrialRecord(1, 1, done[1], "done", 0.3, "")]
    new = again.ask()
    assert new[0] == 3
    assert new[1] not in (done[1], left[1])
    again.tell(left[0], "failed", reason="a reason")
    assert open_round(tmp_path).ended()[1] == TrialRecord(2, 1, left[1], "failed", None, "a reason")


def test_trial_of_which_nothing_was_chosen_yet_gets_values(tmp_path):
    """A search that was killed between the birth of a trial and the choice of its values."""
    study = open_round(tmp_path)
    study._study.ask()
    ((index, values),) = open_round(tmp_path).unfinished()
    assert (index, set(values)) == (1, {"schedule.base_lr", "optimizer.momentum"})


def test_rounds_try_other_values_and_do_not_count_each_other(tmp_path):
    first, second = open_round(tmp_path), open_round(tmp_path, number=2)
    assert first.ask()[1] != second.ask()[1]
    assert (len(first.unfinished()), len(second.unfinished())) == (1, 1)


@pytest.mark.parametrize("maximize", [True, False])
def test_worse_half_is_pruned_once_four_have_finished(tmp_path, maximize):
    study = open_round(tmp_path, maximize=maximize, prune_from_epoch=2)
    sign = 1 if maximize else -1
    for result in (0.1, 0.2, 0.3, 0.4):
        index, _ = study.ask()
        for epoch in (1, 2):
            assert not study.should_stop(index, epoch=epoch, result=sign * result)
        study.tell(index, "done", result=sign * result)
    index, _ = study.ask()
    assert not study.should_stop(index, epoch=1, result=sign * 0.0)  # in the warm-up
    assert study.should_stop(index, epoch=2, result=sign * 0.24)  # the median is 0.25
    study.tell(index, "pruned", reason="worse")
    better, _ = study.ask()
    assert not study.should_stop(better, epoch=2, result=sign * 0.26)
    assert not study.should_stop(better, epoch=2, result=sign * 0.1)  # a resumed trial comes by again
    last = study.ended()[-1]
    assert (last.state, last.result, last.reason) == ("pruned", sign * 0.24, "worse")


@pytest.mark.parametrize("missing", ["optuna", "scipy.stats.qmc"])
def test_missing_package_names_the_extra(missing, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(TuneError, match=naming(f" {missing}: ", "pip install -e '.[tune]'")):
        open_round(tmp_path)


# the whole search, as far as it can be checked without running


def make(tmp_path, **changes):
    return stated(tmp_path, **({"trials": 7, "rounds": 3, "prune": True} | changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trials": 0}, ("--trials 0 ", " 1")),
        ({"parallel": 0}, ("--parallel 0 ", " 1")),
        ({"epochs": 0}, ("--epochs 0 ",)),
        ({"rounds": 8}, ("--rounds 8 ", "--trials 7")),
        ({"space": ("optimizer.momentum=linear:0.5:1.5",)}, (" 1.5, ", "optimizer.momentum=1.5 ")),
        ({"space": ("optimizer.momentum=choice:0.9,high",)}, (" high, ", "optimizer.momentum=high ")),
        ({"space": ("schedule.base_lr=log:1e-5:1",)}, (" 1e-05, ", "schedule.end_lr=")),
        ({"launch": Launch(("mpirun",), 5)}, ("batch.global_batch_size=512 ", " 5 rank")),
        # whole numbers between the ends, and sizes of the data set
        ({"space": ("batch.global_batch_size=linear:512:1024",)}, (" at 513, ", "batch.global_batch_size=513 ")),
        (
            {
                "space": ("batch.global_batch_size=log2:512:4096",),
                "config": ("--config", "quickstart", "--data.loader=synthetic", "--data.num_synthetic_samples=2048"),
            },
            ("point 4 (batch.global_batch_size=4096)", "exceeds the 2048 training images"),
        ),
        ({"config": ("--config", "quickstart", "--run.epoch", "2")}, (" run.epoch;", " run.epochs")),
    ],
)
def test_check_search_refuses_before_anything_runs(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        make(tmp_path, **changes).check()
    assert list(tmp_path.iterdir()) == []


def test_trials_are_shared_out_among_rounds(tmp_path):
    assert make(tmp_path).started().sizes == [3, 2, 2]
    assert make(tmp_path, rounds=1).started().sizes == [7]


@pytest.mark.slow
@pytest.mark.parametrize(("warmup", "epoch"), [("0", 1), ("4", 2)])
def test_prune_of_nothing_in_the_warmup(tmp_path, warmup, epoch):
    """Quickstart's 8 epochs become 2, so a warm-up of 4 is one of the two."""
    found = make(tmp_path, config=("--config", "quickstart", "--schedule.warmup_epochs", warmup))
    assert found.prune_from_epoch == epoch


# what came out


def test_best_is_the_first_of_equals():
    results = (("done", 0.25), ("failed", None), ("done", 0.75), ("done", 0.75))
    records = [TrialRecord(n, 1, {}, state, result, "") for n, (state, result) in enumerate(results)]
    assert best_record(records, metric="top1") == records[2]
    assert best_record(records, metric="loss") == records[0]
    assert best_record(records[1:2], metric="top1") is None


# the image

DECAY = SearchRange("optimizer.weight_decay", 1e-5, 2e-4, is_log=True, is_int=False)
BATCH = SearchRange("batch.global_batch_size", 8192, 65_536, is_log=False, is_int=True)
MODEL = ValueList("model.name", ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), is_ordered=False)
TRIALS = [
    TrialRecord(number, 1 + number // 3, {LR.key: lr, DECAY.key: decay, BATCH.key: batch, MODEL.key: model}, *ended, "")
    for number, (lr, decay, batch, model, *ended) in enumerate(
        [
            ("2", "1e-5", "8192", "resnet18", "done", 0.5),
            ("16", "3e-5", "16384", "resnet152", "done", 0.75),
            ("40", "1e-4", "65536", "resnet50", "pruned", 0.9),
            ("64", "2e-4", "65536", "resnet50", "failed", None),
        ]
    )
]


@pytest.mark.parametrize("axes", [(LR,), (LR, DECAY, BATCH, MODEL)])
def test_search_plot_has_no_texts_over_each_other(axes):
    figure = draw_search(TRIALS, axes, metric="top1")
    figure.draw_without_rendering()
    for panel in figure.axes:
        texts = [text for text in panel.get_xticklabels(which="both") if text.get_text()]
        assert len(texts) > 1
        if not texts[0].get_rotation():
            boxes = [text.get_window_extent() for text in texts]
            assert not any(left.overlaps(right) for left, right in itertools.pairwise(boxes)), panel.get_xlabel()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert not any(box.overlaps(panel.get_tightbbox()) for panel in figure.axes)
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1


def test_search_plot_has_its_star_where_the_table_has_its_first_row():
    """The pruned trial's last evaluation was higher: it is hollow, and says where it ended."""
    figure = draw_search(TRIALS, (LR, MODEL), metric="top1")
    stars = [panel.collections[-1].get_offsets().tolist() for panel in figure.axes]
    assert stars == [[[16, 75]], [[4, 75]]]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["round 1", "round 1, pruned (where it ended)", "best that finished: trial 1, top-1 75.00%"]
    assert figure.get_suptitle() == "4 trials, without 1 that failed"


def test_search_whose_journal_was_cut_off_goes_on(tmp_path):
    """A kill or a full disk may leave part of a line: its content is written again, and the next line is whole."""
    first = open_round(tmp_path)
    done, left = first.ask(), first.ask()
    first.tell(done[0], "done", result=0.3)
    before = (tmp_path / "journal.log").read_bytes()
    first.tell(left[0], "done", result=0.4)
    after = (tmp_path / "journal.log").read_bytes()
    (tmp_path / "journal.log").write_bytes(after[: len(before) + 20])
    again = open_round(tmp_path)
    assert again.unfinished() == [left]
    again.tell(left[0], "done", result=0.4)
    ended = [(record.number, record.values, record.result) for record in open_round(tmp_path).ended()]
    assert ended == [(*done, 0.3), (*left, 0.4)]


def test_search_does_not_wait_for_the_lock_of_a_killed_one(tmp_path, monkeypatch):
    """Optuna's is a link to the journal's path as it was named, which leads nowhere from another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search").mkdir()
    (tmp_path / "search/journal.log.lock").symlink_to("search/journal.log")
    assert open_round(Path("search")).ask()[0] == 1


@pytest.mark.parametrize(
    "text", [b"[" * 10_000, b"1\n", b"{}\n", b'{"op_code": 0}\n{"op_code": 99}\n', b"\xff\n\xff\n"]
)
def test_journal_that_is_damaged_is_refused(tmp_path, text):
    (tmp_path / "journal.log").write_bytes(text + b"\n")
    with pytest.raises(TuneError, match=naming(tmp_path / "journal.log", "--study")):
        open_round(tmp_path)


def test_journal_that_the_disk_has_no_room_for_is_named(tmp_path, monkeypatch):
    study = open_round(tmp_path)
    index, _ = study.ask()
    monkeypatch.setattr(os, "fsync", raise_no_space)
    for act in (study.ask, partial(study.tell, index, "done", result=0.5)):
        with pytest.raises(RunFolderError, match=naming(tmp_path / "journal.log", "No space left")):
            act()


def raise_no_space(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")
