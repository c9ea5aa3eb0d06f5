"""What beyond.py compares: equal trials in equally wide ranges, legal experiments, and time that is equal."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.largebatch import beyond, plot_beyond, step_cost
from benchmarks.largebatch.ablation_cases import OPTIMIZERS, SPAN, TUNING_SEED, write_experiment
from benchmarks.largebatch.beyond_cases import COMPARED, FORMS, available, case, epochs_in_equal_time, next_rate
from benchmarks.largebatch.form_command import chosen_form
from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.config.file import load_config

FORM = FORMS["cifar10", "medium"]


@pytest.mark.parametrize("name", COMPARED)
def test_a_search_begins_with_the_middle_and_the_quarters_of_two_decades(name: str) -> None:
    low, high = OPTIMIZERS[name].lr_low, OPTIMIZERS[name].lr_high
    assert math.log10(high / low) == pytest.approx(2)
    tried: dict[float, float | None] = {}
    for share in (1 / 2, 1 / 4, 3 / 4):
        rate = next_rate(name, tried)
        assert math.log(rate / low) / math.log(high / low) == pytest.approx(share)
        tried[rate] = 0.1


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.3, 0.2, 0.1), 10**-1.5),  # between the best and the better neighbour
        ((0.3, 0.1, 0.2), 10**-0.5),
        ((0.2, 0.3, 0.1), 0.001),  # a step beyond the end
        ((0.2, None, 0.3), 10.0),
        ((None, None, None), 10**-1.5),  # the first of equals, and the lower of its equal neighbours
    ],
)
def test_a_search_goes_on_beside_the_best(
    accuracies: tuple[float | None, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rates 10 ** -1, 10 ** -2 and 10 ** 0, in that order; in closed form."""
    monkeypatch.setitem(OPTIMIZERS, "lars", replace(OPTIMIZERS["lars"], lr_low=1e-3, lr_high=10.0))
    tried = dict(zip((0.1, 0.01, 1.0), accuracies, strict=True))
    assert next_rate("lars", tried) == pytest.approx(expected)


@pytest.mark.parametrize(("milliseconds", "epochs"), [(10.0, 10), (10.5, 10), (20.0, 5), (11.0, 9), (1000.0, 1)])
def test_equal_time_is_that_of_the_reference(milliseconds: float, epochs: int) -> None:
    assert epochs_in_equal_time(FORM, milliseconds, reference=10.0) == epochs


def test_available_leaves_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.largebatch.beyond_cases.find_spec", lambda name: None)
    assert available() == ["lars", "lamb", "nesterov", "muon", "shampoo"]


@pytest.mark.parametrize("name", COMPARED)
def test_experiments_are_legal(name: str, tmp_path) -> None:
    for epochs in (None, 5):
        each = case(FORM, name, 512, epochs=epochs)
        path = write_experiment(
            FORM, each, data=tmp_path, directory=tmp_path / each.folder, seed=TUNING_SEED, base_lr=0.1
        )
        config = load_config(["--config", str(path)])
        assert (config.run.epochs, config.schedule.warmup_epochs) == ((5, 1.0) if epochs else (10, 2.0))
        assert (each.family, config.batch.global_batch_size) == ("time" if epochs else "batch", 512)


def test_every_batch_is_of_whole_ghost_batches_and_makes_a_step() -> None:
    for form in FORMS.values():
        assert all(batch % SPAN == 0 and batch <= form.num_train for batch in form.batches)


def test_a_form_that_a_data_set_does_not_have_is_refused() -> None:
    options = beyond.parse(["--dataset", "shapes", "--form", "full"])
    with pytest.raises(SystemExit, match="shapes has no form full: choose --form short"):
        chosen_form(options, FORMS)


def test_compare_tunes_runs_and_repeats_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training: each call makes three steps, and lamb, whose update takes long, diverges."""
    calls = []

    def fake_train(path, *, hooks, quiet):
        config = load_config(["--config", str(path)])
        calls.append((config.optimizer.name, config.run.seed))
        for done in (1, 2, 3):
            hooks.on_step(done)
        if config.optimizer.name == "lamb":
            raise TrainingDiverged("it did")
        Path(config.run.directory, "summary.json").write_text('{"top1": 0.25, "seconds": 1.0}')
        Path(config.run.directory, "metrics.jsonl").write_text("")

    monkeypatch.setattr(beyond.bigbatch, "train", fake_train)
    monkeypatch.setattr(beyond, "update_milliseconds", lambda *_: {"lamb": 1e6, "nesterov": 1.0})
    form = replace(FORM, batches=(128,), trials=3, seeds=(0, 1))
    results = beyond.compare(form, ["lamb", "nesterov"], tmp_path)
    of_lamb, of_sgd = ([(name, TUNING_SEED)] * 3 + [(name, seed) for seed in form.seeds] for name in ("lamb", "sgd"))
    assert calls == [*of_lamb, *of_sgd, *of_lamb[3:]]
    assert "| lamb 128, 1 epochs | 128 | 1 |" in beyond.markdown(results, title="x")
    assert results["cases"]["nesterov 128"]["top1_percent"]["mean"] == 25.0
    assert results["cases"]["lamb 128"]["diverged"] == 2
    count = len(calls)
    beyond.compare(form, ["lamb", "nesterov"], tmp_path)
    assert len(calls) == count
    assert "| nesterov 128 | 128 | 10 |" in beyond.markdown(results, title="x")


def test_the_picture_has_a_panel_of_equal_time() -> None:
    """In which the case of fewer epochs takes the place of its optimizer's, and the others stay."""

    def found(optimizer: str, family: str, percent: float) -> dict[str, object]:
        runs = [{"top1": percent / 100}]
        figures = {"top1_percent": {"mean": percent, "n": 1}, "diverged": 0, "runs": runs}
        return {"optimizer": optimizer, "family": family, "batch": 128, **figures}

    cases = {
        "n": found("nesterov", "batch", 30.0),
        "m": found("muon", "batch", 40.0),
        "m 5": found("muon", "time", 35.0),
    }
    record = {"conditions": {"options": {"dataset": "shapes"}}, "cases": cases}
    panels = plot_beyond.draw([record]).axes
    heights = [{line.get_label(): line.get_ydata()[0] for line in axes.lines} for axes in panels]
    assert heights == [{"nesterov": 30.0, "muon": 40.0}, {"nesterov": 30.0, "muon": 35.0}]


@pytest.mark.slow
def test_an_update_is_timed_for_each_optimizer(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "ROUNDS", 1)
    monkeypatch.setattr(step_cost, "UPDATES", 1)
    found = step_cost.update_milliseconds(FORM, ["lars", "muon"], tmp_path)
    assert list(found) == ["lars", "muon"]
    assert all(milliseconds > 0 for milliseconds in found.values())
