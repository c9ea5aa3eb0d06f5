"""Losses and metrics of no form, and settings that contradict an own loss, are refused; nothing is imported for it."""

import re
import sys

import pytest
from error_texts import naming

from bigbatch.trainer.config.file import dump_config, load_config
from tests.unit.trainer.config.test_schema import make_config, refusal

OWN = {"optimizer.loss": "no_such_package.Loss", "optimizer.label_smoothing": 0.0}


def test_loss_of_another_package_is_not_imported_to_be_checked() -> None:
    assert make_config({**OWN, "optimizer.loss_options": {"gamma": 2}}).optimizer.loss == "no_such_package.Loss"
    assert "no_such_package" not in sys.modules


@pytest.mark.parametrize("name", ["focal", ".", "losses.", ".Focal", "a b.c", ""])
def test_loss_name_of_no_form_is_refused(name: str) -> None:
    assert re.search(
        naming(f"optimizer.loss={name} ", "cross_entropy", "mypackage."), refusal({**OWN, "optimizer.loss": name})
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer.loss_options": {"gamma": 2}}, ("optimizer.loss_options={'gamma': 2}", "cross_entropy", "null")),
        ({**OWN, "optimizer.label_smoothing": 0.1}, ("optimizer.label_smoothing=0.1", "no_such_package.Loss", "to 0")),
        ({**OWN, "run.divergence_steps": 5}, ("run.divergence_steps=5", "no_such_package.Loss", "null")),
    ],
)
def test_loss_contradictions_are_refused(settings: dict[str, object], named: tuple[str, ...]) -> None:
    assert re.search(naming(*named), refusal(settings))


@pytest.mark.parametrize(
    "metrics",
    [
        {"a b": "m.F"},
        {3: "m.F"},
        {"f1": "F"},
        {"f1": 3},
        {"f1": {"options": {}}},
        {"f1": {"name": "m.F", "option": {}}},
        {"f1": {"name": "m.F", "options": [1]}},
    ],
)
def test_metrics_of_no_form_are_refused(metrics: dict[object, object]) -> None:
    message = refusal({"run.metrics": metrics})
    assert message.startswith("run.metrics: ")
    assert str(next(iter(metrics))) in message


def test_metrics_go_through_a_command_line_and_a_file(tmp_path) -> None:
    config = load_config(["--config", "quickstart", "--run.metrics={a: m.F, b: {name: m.G, options: {k: [1]}}}"])
    assert config.run.metrics == {"a": "m.F", "b": {"name": "m.G", "options": {"k": [1]}}}
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(["--config", str(tmp_path / "saved.yaml")]) == config
