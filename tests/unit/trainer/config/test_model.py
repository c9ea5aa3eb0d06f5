"""Names of models that are none, and settings of models that contradict each other, are refused."""

import re
import sys

import pytest
from error_texts import naming

from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.sections import MODELS
from tests.unit.trainer.config.test_schema import make_config, refusal

FOREIGN = {"model.name": "no_such_package.models.Net"}


@pytest.mark.parametrize("name", ["no_such_package.Net", "timm:resnet50.a1_in1k", "torchvision:resnet18"])
def test_model_name_of_another_package_is_not_imported_to_be_checked(name: str) -> None:
    assert make_config({**FOREIGN, "model.name": name, "model.options": {"width": 3}}).model.name == name
    assert "no_such_package" not in sys.modules


@pytest.mark.parametrize(("name", "nearest"), [("resnet51", "resnet50"), ("AlexNet", "alexnet_bn")])
def test_model_name_that_is_unknown_gets_the_nearest(name: str, nearest: str) -> None:
    message = refusal({"model.name": name})
    assert message.startswith(f"model.name={name} ")
    assert re.search(naming(f" {', '.join(MODELS)};", f" {nearest}", "timm:resnet18", "mypackage.models.Net"), message)


@pytest.mark.parametrize("name", [".", "models.", ".Net", "a b.c", "./net.py", "timm:", ":resnet18", "keras:resnet50"])
def test_model_name_is_not_foreign_by_a_sign_alone(name: str) -> None:
    message = refusal({**FOREIGN, "model.name": name})
    assert message.startswith(f"model.name={name} ")
    assert " timm:resnet18, " in message


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("num_classes", "data.num_classes"),
        ("weights", "model.weights"),
        ("pretrained", "model.weights"),
        ("checkpoint_path", "model.weights"),
    ],
)
def test_model_options_say_nothing_that_other_keys_say(argument: str, key: str) -> None:
    message = refusal({**FOREIGN, "model.options": {argument: 1}})
    assert re.search(naming("model.options ", f" {argument}: ", f" {key} "), message)


def test_model_of_another_package_has_no_known_blocks() -> None:
    message = refusal({**FOREIGN, "compute.recomputed_blocks": 1})
    assert re.search(naming("compute.recomputed_blocks=1", "model.name=no_such_package.models.Net", "0"), message)


def test_model_options_go_through_a_command_line_and_a_file(tmp_path) -> None:
    words = ["--model.name=own.Net", '--model.options={"a": null}', "--model.options.b=[1]"]
    config = load_config(["--config", "quickstart", *words])
    assert config.model.options == {"a": None, "b": [1]}
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(["--config", str(tmp_path / "saved.yaml")]) == config
