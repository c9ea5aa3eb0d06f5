"""What beyond.py compares: equal trials in equally wide ranges, legal experiments, and time that is equal."""

import math
from dataclasses import replace

import pytest

from benchmarks.largebatch import beyond
from benchmarks.largebatch.ablation_cases import OPTIMIZERS, TUNING_SEED, write_experiment
from benchmarks.largebatch.beyond_cases import COMPARED, FORMS, available, case, epochs_in_equal_time, rates
from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.config.file import load_config

FORM = FORMS["cifar10", "short"]


@pytest.mark.parametrize("name", COMPARED)
def test_rates_are_even_over_the_two_decades_of_each(name: str) -> None:
    low, high = OPTIMIZERS[name].lr_low, OPTIMIZERS[name].lr_high
    assert math.log10(high / low) == pytest.approx(2)
    shares = [math.log(rate / low) / math.log(high / low) for rate in rates(name, trials=7)]
    assert shares == pytest.approx([1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8])


@pytest.mark.parametrize(
    ("milliseconds", "epochs"), [(10.0, 10), (10.5, 10), (20.0, 5), (11.0, 9), (1000.0, 1), (None, 10)]
)
def test_equal_time_is_that_of_the_reference(milliseconds: float | None, epochs: int) -> None:
    assert epochs_in_equal_time(FORM, milliseconds, reference=10.0) == epochs


def test_available_leaves_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.largebatch.beyond_cases.find_spec", lambda name: None)
    assert available() == ["lars", "lamb", "nesterov", "muon"]


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


def test_compare_tunes_runs_and_repeats_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training: each call makes two steps, and lamb diverges."""
    calls = []

    def fake_train(path, *, hooks, quiet):
        config = load_config(["--config", str(path)])
        calls.append((config.optimizer.name, config.run.seed))
        for done in (1, 2, 3):
            hooks.on_step(done)
        if config.optimizer.name == "lamb":
            raise TrainingDiverged("it did")
        (path.parent / "summary.json").write_text('{"top1": 0.25, "seconds": 1.0}')
        (path.parent / "metrics.jsonl").write_text("")

    monkeypatch.setattr(beyond.bigbatch, "train", fake_train)
    form = replace(FORM, batches=(128,))
    results = beyond.compare(form, ["lamb", "nesterov"], tmp_path)
    assert calls[: 4 + 3] == [("lamb", TUNING_SEED)] * 4 + [("lamb", seed) for seed in form.seeds]
    assert results["cases"]["nesterov 128"]["top1_percent"]["mean"] == 25.0
    assert results["cases"]["lamb 128"]["diverged"] == 3
    count = len(calls)
    beyond.compare(form, ["lamb", "nesterov"], tmp_path)
    assert len(calls) == count
    assert "| nesterov 128 | 128 | 10 |" in beyond.markdown(results, title="x")
