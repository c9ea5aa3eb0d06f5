"""The range test: pure parts against closed forms, and the command on a small run."""

import argparse
import json
import math
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_texts import naming
from matplotlib.figure import Figure
from tiny_training import TINY_OPTIONS, bigbatch

from bigbatch.errors import ConfigError, RunFolderError, TuneError
from bigbatch.experiments.search.options import parse_search
from bigbatch.tools.tune.range import rising_rate as range_test
from bigbatch.tools.tune.range.curve import SmoothedLoss, Suggestion, exponential, smooth, suggest
from bigbatch.tools.tune.range.rising_rate import explain, plot_range
from bigbatch.trainer.build import job
from bigbatch.trainer.config.file import load_config

STEPS = 121
LR = exponential(1e-3, 1e3, steps=STEPS)
LRS = [LR(step) for step in range(STEPS)]


@pytest.mark.usefixtures("rendered_figures")
def test_plot_of_an_explosion_still_shows_the_descent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between two dollar signs of its title matplotlib would read mathematics, and fail after all of the training."""
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or save(figure, *a, **k))
    lrs, losses = [1.0, 10.0, 100.0, 2000.0], [2.0, 1.0, 1.6, 80.0]
    plot_range(lrs, losses, Suggestion(10.0, 2000.0, 10.0), tmp_path / "range.png", title="a$\\frac{$b\x1b")
    assert (tmp_path / "range.png").stat().st_size > 1000
    (axes,) = drawn[0].axes
    low, high = axes.get_ylim()
    assert 0.5 < low < 1.0
    assert 2.0 < high <= 2 * 2.0
    legend = axes.get_legend()
    assert legend is not None
    assert "exploded: 2000" in [text.get_text() for text in legend.get_texts()]


def test_learning_rate_rises_by_the_same_factor_each_step():
    assert (LRS[0], LRS[-1]) == pytest.approx((1e-3, 1e3))
    assert [b / a for a, b in pairwise(LRS)] == pytest.approx([10 ** (6 / 120)] * (STEPS - 1))


def test_running_mean_has_no_bias():
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)
    # (0.8 * 0.2 * 1 + 0.2 * 4) / (0.8 * 0.2 + 0.2)
    assert smooth([1.0, 4.0])[1] == pytest.approx(0.96 / 0.36)


def test_explosion_is_four_times_the_lowest_mean():
    mean = SmoothedLoss()
    mean.add(2.0)
    assert [mean.has_exploded(value) for value in (2.0, 8.0, 8.001, math.nan)] == [False, False, True, True]


@pytest.mark.parametrize("middle", [0.02, 0.3, 2.0])
def test_steepest_descent_of_a_logistic_fall_is_its_middle(middle):
    losses = [1 + 1.3 / (1 + (lr / middle) ** 2) for lr in LRS]  # logistic in ln(lr): steepest at the middle
    found = suggest(LRS, losses, exploded_lr=None)
    assert found.steepest_lr == pytest.approx(middle, rel=0.07)  # a step is a factor of 1.12
    assert found.suggested_lr == found.steepest_lr
    assert found.tenth_lr is None


def test_steepest_descent_moves_little_with_noise_and_counts_no_rise():
    noise = [0.02 * math.sin(7.3 * step) for step in range(STEPS)]
    losses = [1 + 1.3 / (1 + lr / 0.3) + (lr / 30) ** 2 + n for lr, n in zip(LRS, noise, strict=True)]
    found = suggest(LRS, losses, exploded_lr=500.0)
    assert found.steepest_lr == pytest.approx(0.3, rel=0.6)
    assert found.tenth_lr == 50


def test_suggestion_is_the_smaller_reading():
    losses = [1 + 1.3 / (1 + (lr / 2.0) ** 2) for lr in LRS]
    assert suggest(LRS, losses, exploded_lr=5.0).suggested_lr == 0.5


def test_loss_that_only_rises_suggests_nothing():
    found = suggest(LRS, [2 + step / 100 for step in range(STEPS)], exploded_lr=LRS[-1])
    assert (found.steepest_lr, found.suggested_lr) == (None, None)
    assert "never fell: raise --to" in explain(found, high=1e3, experiment=["quickstart"])[0]


def test_reading_in_words():
    exploded = "\n".join(explain(Suggestion(4.0, 100.0, 4.0), high=1e3, experiment=["quickstart"]))
    assert "exploded at 100; a tenth of that is 10" in exploded
    assert "bigbatch tune search --config quickstart --space schedule.base_lr=log:1:100 " in exploded
    calm = "\n".join(explain(Suggestion(4.0, None, 4.0), high=50, experiment=["quickstart"]))
    assert "did not explode up to 50: raise --to" in calm
    assert "log:1:50" in calm


def test_suggested_search_is_of_the_experiment_as_it_was_overridden():
    experiment = ["quickstart", "--data.root", "my data", "--data.mean=[0, 0, 0]"]
    command = shlex.split(explain(Suggestion(4.0, 100.0, 4.0), high=1e3, experiment=experiment)[-1])
    assert command[:3] == ["bigbatch", "tune", "search"]
    found = parse_search(command[3:])
    assert found.config == ("--config", *experiment)
    assert found.space == ("schedule.base_lr=log:1:100",)


class Reached(Exception):
    """Raised at the point where the ranks would meet."""


@pytest.mark.parametrize("words", [[], ["--schedule.range_test", "runs/older"], ["--schedule.range_test=runs/older"]])
def test_range_needs_no_earlier_one(words, tmp_path, monkeypatch):
    """Nor does the suggested search: a range test of another recipe is the reason for repeating it."""
    file = tmp_path / "mine.yaml"
    file.write_text("base: quickstart\n" + ("" if words else "schedule: {range_test: runs/older}\n"))
    experiment = [str(file), *words, "--data.flip", "false"]
    started = []

    def meet(config, env):
        started.append(config)
        raise Reached

    monkeypatch.setattr(range_test, "bind_rank", lambda *_: None)
    monkeypatch.setattr(range_test, "join_job", meet)
    # from below the end of the schedule, which is 0.0001
    options = ["--from", "1e-5", "--to", "2", "--steps", "20", "--out", str(tmp_path / "out")]
    with pytest.raises(Reached):
        range_test.main(["--config", *experiment, *options])
    assert (started[0].schedule.range_test, started[0].data.flip) == (None, False)
    kept = [str(file), "--data.flip=false"]
    command = shlex.split(explain(Suggestion(4.0, 100.0, 4.0), high=1e3, experiment=kept)[-1])
    search = parse_search([*command[3:], "--study", str(tmp_path / "study")])
    assert search.complete_config({"schedule.base_lr": "4"}).data.flip is False
    twice = replace(search, config=(*search.config, "--schedule.range_test=runs/older"))
    with pytest.raises(ConfigError, match=naming("schedule.base_lr both state the rate")):
        twice.check()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--from", "0", "--to", "1", "--steps", "50"], ("--from 0 --to 1: ",)),
        (["--from", "2", "--to", "1", "--steps", "50"], ("--from 2 --to 1: ",)),
        (["--from", "1", "--to", "nan", "--steps", "50"], ("--from 1 --to nan: ",)),
        (["--from", "1", "--to", "2", "--steps", "19"], ("--steps 19 ", " 20")),
        *((["--from", "1", "--to", "2", "--steps", f"{10**k}"], ("--steps 1000", "10000")) for k in (5, 9, 12, 400)),
        (["--from", "1", "--to", "2", "--steps", "20", "--run.epoch", "2"], (" run.epoch;", " run.epochs")),
    ],
)
def test_tune_range_refuses_options(options, named, tmp_path):
    with pytest.raises(ConfigError, match=naming(*named)):
        range_test.main(["--config", "quickstart", "--out", str(tmp_path), *options])


def test_folder_that_takes_nothing_is_refused_before_training(monkeypatch):
    trained = []
    monkeypatch.setattr(range_test, "few_steps", lambda *_, **__: trained.append(0))
    with pytest.raises(RunFolderError, match=naming(" /proc/none: ")):
        range_test.main(
            ["--config", "quickstart", "--from=1", "--to=2", "--steps=20", "--out=/proc/none", *TINY_OPTIONS]
        )
    assert not trained


def test_reading_is_told_where_it_cannot_be_written(capsys):
    """A disk that has filled up meanwhile takes no training of a hundred large batches with it."""
    curve = range_test._Curve(SimpleNamespace(rank=0), num_steps=STEPS)
    curve.lrs, curve.losses = LRS, [1 + 1.3 / (1 + (lr / 2.0) ** 2) for lr in LRS]
    arguments = argparse.Namespace(out=Path("/proc/none"), config="quickstart", low=LRS[0], high=LRS[-1])
    config = load_config(["--config", "quickstart"])
    with pytest.raises(RunFolderError, match=naming(" /proc/none/range.json: ")):
        range_test._finish(curve, config, arguments=arguments, overrides=[])
    told = capsys.readouterr().out
    assert "suggested: " in told
    assert "plot: " not in told


def test_loss_that_is_not_finite_at_the_first_step_is_an_error():
    curve = range_test._Curve(SimpleNamespace(rank=0), num_steps=STEPS)
    curve.exploded_lr = LRS[0]
    arguments = argparse.Namespace(out=Path("/proc/none"), config="quickstart", low=LRS[0], high=LRS[-1])
    with pytest.raises(TuneError, match=naming("not finite at the first step", "before any update")):
        range_test._finish(curve, load_config(["--config", "quickstart"]), arguments=arguments, overrides=[])


@pytest.mark.long
def test_range_of_two_ranks_finds_where_the_loss_explodes(tmp_path):
    settings = [*TINY_OPTIONS, "--run.divergence_steps=1"]  # does not end the test
    options = ["--from", "0.1", "--to", "1e6", "--steps", "40", "--out", str(tmp_path / "out")]
    done = bigbatch("tune", "range", "--config", "quickstart", *settings, *options, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/range.json").read_text())
    rises = exponential(0.1, 1e6, steps=40)
    assert found["lr"] == pytest.approx([rises(step) for step in range(len(found["lr"]))])
    assert found["loss"][0] == pytest.approx(math.log(10), rel=0.2)  # ten classes, no knowledge
    assert found["smoothed_loss"] == pytest.approx(smooth(found["loss"]))
    assert 10 < found["exploded_lr"] == pytest.approx(rises(len(found["lr"])))
    assert (tmp_path / "out/range.png").stat().st_size > 1000
    assert f"exploded at {found['exploded_lr']:.4g}" in done.stdout
    assert "bigbatch tune search --config quickstart --data.loader=synthetic --data.num_" in done.stdout


def test_explosion_at_the_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "set_up_process", lambda communicator, **_: None)
    options = ["--from", "1e6", "--to", "1e9", "--steps", "40", "--out", str(tmp_path / "out")]
    with pytest.raises(TuneError, match=naming("--from 1e+06")):
        range_test.main(["--config", "quickstart", *TINY_OPTIONS, "--run.divergence_steps=1", *options])
    assert not any((tmp_path / "out").iterdir())
