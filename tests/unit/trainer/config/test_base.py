"""One YAML upon another, defaults below, options above: what holds, and where it comes from."""

import re
from pathlib import Path

import pytest
import yaml
from error_texts import naming

from bigbatch.errors import ConfigError, Refusals
from bigbatch.trainer.config.file import PACKAGED, load_config, packaged_configs, read_stated, resolve
from bigbatch.trainer.config.schema import KEYS, lookup, with_defaults

OF_OTHERS = ("clusters", "sweeps")
RECIPES = sorted(path for path in PACKAGED.rglob("*.yaml") if path.parent.name not in OF_OTHERS)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_base_yields_to_the_nearest_statement(tmp_path):
    first = write(tmp_path / "a/first.yaml", "run:\n  epochs: 20\n  seed: 1\n  log_every_steps: 7\n")
    second = write(tmp_path / "a/second.yaml", "base: first.yaml\nrun:\n  epochs: 21\n  seed: 2\n")
    recipe = write(tmp_path / "b/recipe.yaml", "base: ../a/second.yaml\nrun:\n  epochs: 22\n")
    resolved = resolve(["--config", recipe, "--data.root", "here"])
    config, origins = resolved.config, resolved.origins
    assert (config.run.epochs, origins["run.epochs"]) == (22, f"recipe {recipe}")
    assert (config.run.seed, origins["run.seed"]) == (2, f"base {tmp_path}/b/../a/second.yaml")
    assert config.run.log_every_steps == 7
    assert Path(origins["run.log_every_steps"].removeprefix("base ")).resolve() == Path(first).resolve()
    assert (config.data.root, origins["data.root"]) == ("here", "command line")
    assert (config.run.resume, origins["run.resume"]) == ("auto", "default")
    assert config.run.directory == "runs/recipe"
    assert resolve(["--config", second]).origins["run.seed"] == f"recipe {second}"


@pytest.mark.parametrize("base", ["quickstart", "bases/mlperf"])
def test_base_may_be_packaged(base, tmp_path):
    config = load_config(["--config", write(tmp_path / "mine.yaml", f"base: {base}\nrun:\n  directory: x/{{name}}\n")])
    packaged = load_config(["--config", base])
    assert config.optimizer == packaged.optimizer
    assert config.data == packaged.data
    assert config.run.directory == "x/mine"


def test_base_is_no_experiment_alone():
    assert not [name for name in packaged_configs() if name.startswith("bases/")]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_base_in_a_circle_is_refused(length, tmp_path):
    paths = [tmp_path / f"{number}.yaml" for number in range(length)]
    for path, following in zip(paths, [*paths[1:], paths[0]], strict=True):
        write(path, f"base: {following.name}\n")
    message = refusal("--config", str(paths[0]))
    assert message.startswith(f"{paths[-1]}: base ")
    assert "0.yaml" in message


@pytest.mark.parametrize("base", ["quikstart", "[1]", "{}", "5"])
def test_base_that_there_is_not(base, tmp_path):
    recipe = write(tmp_path / "recipe.yaml", f"base: {base}\n")
    assert refusal("--config", recipe).startswith(f"{recipe}: base '")


def test_base_is_checked_too(tmp_path):
    base = write(tmp_path / "base.yaml", "run:\n  epohcs: 3\n")
    recipe = write(tmp_path / "recipe.yaml", "base: base.yaml\n")
    message = refusal("--config", recipe)
    assert message.startswith(f"{base}: ")
    assert re.search(naming(" run.epohcs;", " run.epochs"), message)


LARS = {"nesterov": False, "trust_coefficient": 0.001, "eps": 0.0, "momentum_form": "lr_inside"}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {"optimizer.options": LARS, "optimizer.loss_scale": None}),
        ({"optimizer.name": "sgd"}, {"optimizer.options": {"nesterov": False}, "optimizer.momentum": 0.9}),
        (
            {"optimizer.name": "adamw"},
            {"optimizer.momentum": None, "optimizer.options": {"betas": (0.9, 0.999), "eps": 1e-8}},
        ),
        ({"optimizer.name": "a.B"}, {"optimizer.momentum": None, "optimizer.options": None}),
        ({"optimizer.precision": "fp16"}, {"optimizer.loss_scale": 65536.0, "optimizer.loss_scale_growth_steps": 2000}),
        ({"model.name": "resnet50"}, {"model.options": {"zero_gamma": True, "blurpool": False}}),
        ({"model.name": "timm:resnet18"}, {"model.options": None}),
        ({"optimizer.name": "adamw", "optimizer.momentum": 0.5}, {"optimizer.momentum": 0.5}),
        ({"optimizer.momentum": None}, {"optimizer.momentum": None}),
    ],
)
def test_with_defaults_gives_them_where_their_key_has_a_meaning(stated, expected):
    """What is stated stays, right or wrong: the checks refuse it."""
    values = with_defaults(stated)
    assert {key: values[key] for key in expected} == expected
    assert tuple(values) == tuple(KEYS)


def test_load_config_drops_what_a_file_states_for_another_choice(tmp_path):
    """A recipe of LARS, trained by SGD: its trust coefficient goes. What one file states of its own choice stays."""
    recipe = write(tmp_path / "recipe.yaml", "optimizer:\n  options: {trust_coefficient: 0.002}\n")
    assert load_config(["--config", recipe]).optimizer.options == {**LARS, "trust_coefficient": 0.002}
    assert load_config(["--config", recipe, "--optimizer.name", "sgd"]).optimizer.options == {"nesterov": False}
    message = refusal("--config", recipe, "--optimizer.name", "sgd", "--optimizer.options.trust_coefficient", "0.1")
    assert re.search(naming("optimizer.options.trust_coefficient", "optimizer.name=sgd"), message)


def test_load_config_merges_options_of_one_choice_and_drops_those_of_another(tmp_path):
    base = write(tmp_path / "base.yaml", "model:\n  name: resnet9\n  options:\n    width: 16\n")
    recipe = write(tmp_path / "recipe.yaml", "base: base.yaml\nmodel:\n  options:\n    pool_first: false\n")
    held = load_config(["--config", recipe, "--model.options.celu_alpha", "0.3"]).model.options
    assert (held["width"], held["pool_first"], held["celu_alpha"]) == (16, False, 0.3)
    resolved = resolve(["--config", recipe, "--model.name", "resnet18"])
    assert resolved.config.model.options == {"zero_gamma": True, "blurpool": False}
    assert resolved.origins["model.options"] == "default"
    assert load_config(["--config", base, "--model.options", "null"]).model.options["width"] == 64


def test_load_config_keeps_the_options_that_the_next_choice_has_too():
    held = load_config(["--config", "imagenet/fast_resnet50_16", "--model.name", "resnet101"]).model.options
    assert held == {"zero_gamma": False, "blurpool": True}


@pytest.mark.parametrize(
    ("text", "words", "options"),
    [
        ("base: quickstart\nmodel:\n  options.width: 32\n", (), {"width": 32}),
        ("base: cifar10_10epochs\nmodel:\n  options.celu_alpha: null\n", (), {"celu_alpha": None}),  # turns it off
        ("base: cifar10_10epochs\n", ("--model.options.celu_alpha", "null"), {"celu_alpha": None}),
    ],
)
def test_load_config_takes_options_by_their_section(text, words, options, tmp_path):
    held = load_config(["--config", write(tmp_path / "recipe.yaml", text), *words]).model.options or {}
    assert options.items() <= held.items()


@pytest.mark.parametrize("key", ["model.width", "optimizer.trust_coefficient", "schedule.power"])
def test_load_config_names_the_option_that_a_key_without_options_means(key):
    section, name = key.split(".")
    assert f"the nearest legal one is {section}.options.{name}" in refusal("--config", "quickstart", f"--{key}=1")


def test_load_config_takes_no_section_by_the_name_of_an_option(tmp_path):
    recipe = write(tmp_path / "recipe.yaml", "base: quickstart\nmodel.options.width:\n  a: 32\n")
    assert re.search(naming(recipe, "unknown key model.options.width"), refusal("--config", recipe))


def test_load_config_of_a_step_schedule_needs_milestones():
    words = ("--config", "quickstart", "--schedule.name", "step", "--schedule.warmup_epochs", "0")
    assert "schedule.options.milestone_epochs" in refusal(*words)
    load_config([*words, "--schedule.options.milestone_epochs", "[]"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(PACKAGED)))
def test_recipe_states_what_makes_it_that_recipe(path):
    """Each value differs from what would hold without it, or has a comment: its source, or why."""
    text = path.read_text()
    content = yaml.safe_load(text)
    base = content.pop("base", None)
    below = read_stated(PACKAGED / f"{base}.yaml", Refusals()).stated if base else {}
    stated = read_stated(path, Refusals()).stated
    deciders = {key.decider for key in KEYS.values()}
    held = with_defaults(below | {key: value for key, value in stated.items() if key in deciders})
    held |= {key: value for key, value in with_defaults(below).items() if key in deciders}
    for section, values in content.items():
        for name in values:
            commented = re.search(
                rf"^  {name}:.* # |^ +#.*\n  {name}: |^  {name}:\n    .* # ", text[text.index(f"\n{section}:") :], re.M
            )
            assert commented or stated[f"{section}.{name}"] != held[f"{section}.{name}"], f"{section}.{name}"


def test_resolve_names_origins_that_exist():
    for name in packaged_configs():
        resolved = resolve(["--config", name])
        for key, origin in resolved.origins.items():
            kind, _, where = origin.partition(" ")
            assert kind == "default" or (kind in ("base", "recipe") and (PACKAGED / where).is_file()), key
            assert (
                kind != "default"
                or key == "run.directory"
                or key.endswith(".options")
                or lookup(resolved.config, key) in (None, KEYS[key].default)
            )


@pytest.mark.parametrize("text", ["root: '*secret*'\n", "a: *secret\n", "secret: 1\nsecret: 2\n", "secret: [\n"])
def test_base_that_is_no_recipe_is_not_quoted(text: str, tmp_path: Path) -> None:
    write(tmp_path / "shadow", text)
    said = refusal("--config", write(tmp_path / "recipe.yaml", "base: shadow\n"))
    assert re.search(r"shadow(, which is no recipe| is not readable YAML$)", said)
    assert "secret" not in said
