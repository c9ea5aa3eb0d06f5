"""A key's value is its value wherever the option stands: never the run folder, an experiment or an image."""

import argparse
from pathlib import Path

import pytest
import yaml
from error_texts import naming

from bigbatch import cli
from bigbatch.errors import ConfigError, UserError
from bigbatch.experiments import sweep
from bigbatch.experiments.batch import recommend
from bigbatch.tools.replay import replay
from bigbatch.tools.simulate import command as simulate
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.inference.arguments import read_trained, trained_parser

VALUES = ["my data", "-1", "-1e-3", "-a b", "", "a=b c", "é ü", "--two dashes", " ", "~x y"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("run", nargs="?")
    made.add_argument("--out")
    made.add_argument("--json", action="store_true")
    return made


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("run", ["RUN", "my runs/one", "-my run", None])
def test_a_value_is_parsed_alike_in_every_place(value: str, run: str | None) -> None:
    forms = [[f"--data.root={value}"]] + ([] if value.startswith("--") else [["--data.root", value]])
    for key in forms:
        place = [] if run is None else [run]
        for argv in ([*key, *place], [*place, *key], [*key, "--json", *place], ["--out=my file", *place, *key]):
            arguments, others = parse_beside_keys(parser(), argv)
            assert (arguments.run, others) == (run, [f"--data.root={value}"])
        assert parse_beside_keys(parser(), [*key, "--", "-odd", "--run.b=c d"]) == (
            argparse.Namespace(run="-odd", out=None, json=False),
            [f"--data.root={value}", "--run.b=c d"],
        )


def test_options_that_are_not_there_and_further_arguments_come_back() -> None:
    argv = ["--lr", "my rate", "RUN", "--data-root=my data", "b c", "--trust-code", "d", "--virtual-ranks", "2"]
    arguments, others = parse_beside_keys(parser(), argv)
    assert arguments.run == "RUN"
    assert others == ["--lr=my rate", "--data-root=my data", "b c", "--trust-code", "d", "--virtual-ranks=2"]


@pytest.mark.parametrize("words", [["--out", "--data.root", "x", "RUN"], ["--out"]])
def test_an_option_of_a_command_does_not_take_the_next_argument(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_beside_keys(parser(), words)


@pytest.mark.parametrize("value", ["my data", "-mine", "a=b c", "- x"])
def test_train_takes_the_same_values(value: str) -> None:
    assert load_config(["--data.root", value, "--config", "quickstart"]).data.root == value
    assert load_config(["--config", "quickstart", f"--data.root={value}"]).data.root == value


def test_train_takes_numbers_below_zero() -> None:
    with pytest.raises(ConfigError, match=naming("schedule.base_lr=-0.001")):
        load_config(["--config", "quickstart", "--schedule.base_lr", "-1e-3"])


def test_config_show_evaluate_and_predict_take_a_folder_with_a_space(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["quickstart", "--data.root", "my data"], ["--data.root=my data", "--config", "quickstart"]):
        assert cli.main(["config", "show", *words]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["data"]["root"] == "my data"
    for takes_images in (False, True):
        own = trained_parser("bigbatch evaluate", description="", others="IMAGE ..." if takes_images else "")
        images = ["my image.jpg", "b.jpg"] if takes_images else []
        argv = ["--data.root=my data", "--config", "quickstart", *images[:1], "--weights", "my w.pt", *images[1:]]
        arguments, config, weights = read_trained(own, argv)
        assert (arguments.run, config.data.root, weights) == (None, "my data", Path("my w.pt"))
        assert arguments.others == ([Path(each) for each in images] if takes_images else None)


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (replay.main, ["--step=1", "my run"]),
        (recommend.main, ["my run", "--epochs=1", "--out=my out"]),
        (sweep.main, ["my run", "--dry-run"]),
        (simulate.main, ["my run", "--cluster=dgx_a100"]),
        (lambda argv: cli.main(["evaluate", *argv]), ["my run"]),
        (lambda argv: cli.main(["predict", *argv]), ["my run", "my image.jpg"]),
        (lambda argv: cli.main(["export", *argv]), ["my run", "--format=onnx", "--out=a.onnx"]),
    ],
)
def test_each_command_on_a_run_names_the_run_that_is_missing(
    main, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for key in (["--data.root", "my data"], ["--data.root=my data"]):
        text = ""
        try:
            assert main([*key, *argv]) == 1
        except UserError as error:
            text = str(error)
        text += capsys.readouterr().err
        assert "my run" in text
        assert "my data" not in text


def test_an_unknown_option_is_named_and_not_its_value(tmp_path: Path) -> None:
    for words in (["--data-root=my data", "RUN"], ["--lr", "3", "RUN"], ["RUN", "--check", "c"]):
        name = words[words[0] == "RUN"].partition("=")[0][2:]
        (tmp_path / "config.yaml").write_text("base: quickstart\n")
        argv = [str(tmp_path) if word == "RUN" else word for word in words]
        with pytest.raises(ConfigError, match=naming(f"unknown key {name}")):
            read_trained(trained_parser("bigbatch evaluate", description=""), argv)
