"""An experiment in fewer epochs, the options by which two differ, and the log lines about a short schedule."""

import dataclasses

import pytest

from bigbatch.trainer.config.file import dump_config, load_config, packaged_configs
from bigbatch.trainer.config.schedule import schedule_notes
from bigbatch.trainer.config.short_run import differences, shorten


def test_short_run_shrinks_what_is_stated_in_epochs(tmp_path):
    schedule = {"name": "step", "options.milestone_epochs": "[10,15]", "options.gamma": 0.1, "end_lr": "null"}
    words = [f"--schedule.{key}={value}" for key, value in schedule.items()]
    words += ["--run.epochs=20", "--data.train_sizes=[[0,128],[1,144],[15,160]]", "--schedule.warmup_epochs=2"]
    long = load_config(["--config", "imagenette", *words])
    short = shorten(long, epochs=4, evaluate_each=True, directory=tmp_path)
    assert (short.run.epochs, short.run.eval_every_epochs, short.run.directory) == (4, 1, str(tmp_path))
    assert short.schedule.warmup_epochs == pytest.approx(0.4)
    assert short.schedule.options["milestone_epochs"] == pytest.approx((2, 3))
    assert short.data.train_sizes == ((0, 144), (3, 160))  # the second size falls on epoch 0.2
    assert shorten(long, epochs=4, evaluate_each=False, directory=tmp_path).run.eval_every_epochs == 4


@pytest.mark.parametrize("name", packaged_configs())
def test_short_run_of_every_recipe(name, tmp_path):
    long = load_config(["--config", name])
    for epochs in {1, 2, long.run.epochs // 3 + 1, long.run.epochs - 1}:
        schedule = shorten(
            long, epochs=epochs, evaluate_each=True, directory=tmp_path
        ).schedule  # checked as it is made
        share = epochs / long.run.epochs
        assert schedule.warmup_epochs == pytest.approx(long.schedule.warmup_epochs * share)
        if long.schedule.decay_epochs is not None:
            assert schedule.decay_epochs == pytest.approx(long.schedule.decay_epochs * share)


def test_warmup_of_the_whole_run_can_be_shortened(tmp_path):
    quick = load_config(["--config", "quickstart"])
    for whole in (2, 25):  # 25 * (7 / 25) is above 7
        long = dataclasses.replace(
            quick,
            run=dataclasses.replace(quick.run, epochs=whole),
            schedule=dataclasses.replace(quick.schedule, warmup_epochs=whole),
        )
        for epochs in range(1, whole):
            short = shorten(long, epochs=epochs, evaluate_each=True, directory=tmp_path)
            assert short.schedule.warmup_epochs == pytest.approx(epochs)


def test_short_run_lasts_to_its_end(tmp_path):
    stops = ("--run.target_top1", "0.5", "--run.stop_metric", "loss", "--run.stop_after_evaluations", "1")
    long = load_config(["--config", "quickstart", *stops, "--run.divergence_steps", "7"])
    run = shorten(long, epochs=4, evaluate_each=True, directory=tmp_path).run
    stops = (run.target_top1, run.stop_metric, run.stop_after_evaluations, run.divergence_steps)
    assert stops == (None, None, None, None)


def test_average_shrinks_with_the_run(tmp_path):
    """Else the short run would be refused: it has not so many steps."""
    quick = load_config(["--config", "quickstart"])
    steps = {"optimizer.ema_decay": 0.9, "optimizer.ema_every_steps": 4}
    words = [word for key, value in steps.items() for word in (f"--{key}", str(value))]
    long = load_config(["--config", "quickstart", "--run.epochs", str(3 * quick.run.epochs), *words])
    short = shorten(long, epochs=quick.run.epochs, evaluate_each=True, directory=tmp_path)
    assert short.optimizer.ema_every_steps == 1
    assert shorten(quick, epochs=1, evaluate_each=True, directory=tmp_path).optimizer.ema_every_steps is None


def test_options_of_a_trial_make_its_config(tmp_path):
    base = load_config(["--config", "imagenette"])
    other = load_config(["--config", "imagenette", "--model.options.width", "8", "--data.mean", "[0.1,0.2,0.3]"])
    short = shorten(other, epochs=2, evaluate_each=True, directory=tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(dump_config(base))
    options = differences(base, short)
    assert load_config(["--config", str(path), *options]) == short
    assert options[:4] == ["--run.directory", str(tmp_path), "--run.epochs", "2"]
    assert differences(base, base) == []


@pytest.mark.parametrize(("epochs", "is_told"), [(12, False), (3, False), (2, True)])
def test_schedule_of_a_run_that_ends_with_its_warm_up_is_told(epochs: int, is_told: bool) -> None:
    """quickstart's warm-up is 2 epochs: a run of 1 epoch is refused, and one of 2 was accepted silently."""
    config = load_config(["--config", "quickstart", f"--run.epochs={epochs}"])
    notes = schedule_notes(config.schedule, epochs=config.run.epochs)
    assert bool(notes) == is_told
    if is_told:
        assert "schedule.warmup_epochs=2 of run.epochs=2" in notes[0]
        assert notes[0].endswith("--schedule.warmup_epochs 0.4")
