"""The config's checks, and that each remedy they name is legal: the catalogue of this room's messages."""

import ast
import math
import re
from contextlib import suppress
from itertools import product
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

import bigbatch.trainer
from bigbatch.comm.algorithms.by_name import ALGORITHMS, AUTO
from bigbatch.comm.connect import BACKENDS
from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.build.optimizer import NATIVE
from bigbatch.trainer.build.plan import SCHEDULES, make_schedule_of
from bigbatch.trainer.config import sections as config_sections
from bigbatch.trainer.config.batch import divide_batch
from bigbatch.trainer.config.checks import SMALLEST_IMAGE
from bigbatch.trainer.config.fields import POSITIVE
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.kinds import OPTION_KEYS, OPTIONS, nest_options, with_default_options
from bigbatch.trainer.config.schema import KEYS, Config, lookup, typed, with_defaults, with_values
from bigbatch.trainer.models import MODELS
from bigbatch.trainer.models.resnet import ResNet
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

SECTIONS = get_type_hints(Config)
# Legal, small and no recipe; a new key needs no line here.
BASE = with_defaults(
    {
        "run.directory": "runs/test",
        "run.epochs": 10,
        "run.log_every_steps": 1,
        "run.keep_checkpoints": 1,
        "run.resume": "never",
        "data.resident_on": None,
        "data.loader": "torchvision",
        "data.root": "data/test",
        "data.num_classes": 10,
        "data.image_size": 32,
        "data.crop_area_min": 0.5,
        "data.eval_crop_fraction": 1.0,
        "data.mean": (0.5, 0.5, 0.5),
        "data.std": (0.25, 0.25, 0.25),
        "data.num_threads": 1,
        "data.prefetch_batches": 1,
        "data.patience_seconds": 0.25,
        "data.max_megapixels": 178.0,
        "data.bind_numa": False,
        "data.probe_seconds": 0.0,
        "model.name": "resnet9",
        "model.options.width": 8,
        "batch.microbatch_size": 64,
        "optimizer.weight_decay": 0.0,
        "schedule.warmup_epochs": 2.0,
        "comm.algorithm": "native",
        "comm.threshold_bytes": 1,
        "comm.buffer_bytes": 1,
        "comm.warn_seconds": 1.0,
        "comm.timeout_seconds": 2.5,
    }
)
STEP = {
    "schedule.name": "step",
    "schedule.end_lr": None,
    "schedule.options": {"gamma": 0.1, "milestone_epochs": (4.0, 8.0)},
}
TUNED = {
    "comm.table": "tuned.json",
    "comm.threshold_bytes": None,
    "comm.buffer_bytes": None,
    "comm.algorithm": "hybrid",
}
HALF_WIRE = {"comm.wire_dtype": "float16", "comm.predivide": 8.0, "comm.timeline_steps": (3, 3)}
RESIDENT = {"data.loader": "resident", "data.resident_on": "device", "data.crop": "padded", "data.crop_area_min": None}


def make_config(changes: dict[str, object] | None = None) -> Config:
    changes = nest_options(changes or {})
    values = {**BASE, **changes}
    for section in OPTIONS:
        name, options = f"{section}.name", f"{section}.options"
        own = BASE[options] if values[name] == BASE[name] else changes.get(options)
        values[options] = with_default_options(section, values[name], {**(own or {}), **(changes.get(options) or {})})
    sections: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return Config(**{name: SECTIONS[name](**given) for name, given in sections.items()})


def refusals(changes: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_config(changes)
    return str(caught.value).split("\n")


def refusal(changes: dict[str, object]) -> str:
    (only,) = refusals(changes)
    return only


@pytest.mark.parametrize(
    "changes", [STEP, RESIDENT, TUNED, HALF_WIRE, {"schedule.warmup_epochs": 10}, {"schedule.end_lr": 1.0}]
)
def test_config_is_legal_at_the_edge(changes):
    config = make_config(changes)
    assert {key: lookup(config, key) for key in changes} == changes


def test_config_refuses_numbers_outside_of_the_range_of_each_key():
    """In a tuple one such number is enough; an option is given to a model, optimizer or schedule that has it."""
    for name, key in {**KEYS, **OPTION_KEYS}.items():
        section, _, option = name.partition(".options.")
        owner = {f"{section}.name": each for each, options in OPTIONS.get(section, {}).items() if option in options}
        number = -1.0 if "float" in str(key.kind) else -1
        value = (number, 0.5) if "tuple" in str(key.kind) else number
        for legal in key.ranges:
            assert f"{name}={value} must be {legal.legal}" in refusals({**owner, name: value})


@pytest.mark.parametrize(
    ("key", "value", "legal"),
    [
        ("run.epochs", 0, "positive and at most 1e9"),
        ("run.epochs", 10**9 + 1, "positive and at most 1e9"),
        ("data.patience_seconds", float("inf"), "positive and at most 1e9"),
        ("schedule.base_lr", float("nan"), "positive and at most 3.4e38"),
        ("schedule.base_lr", 3.5e38, "positive and at most 3.4e38"),
        ("optimizer.weight_decay", 1001.0, "0 or more, and at most 1000"),
        ("data.max_megapixels", 179.0, "above 0 and at most 178"),
        ("augment.mixup_alpha", float("nan"), "0 or more, and at most 1e9"),
        ("augment.erasing_probability", 1.5, "at least 0 and at most 1"),
        ("data.mean", (0.5, 0.5, -0.5), "at least 0 and at most 1"),
        ("run.target_top1", 76.1, "above 0 and at most 1"),
        ("optimizer.ema_decay", -0.1, "at least 0 and below 1"),
        ("compute.cpu_threads", 100_000, "positive and at most 4096"),
        ("data.num_threads", 100_000, "positive and at most 4096"),
        ("data.prefetch_batches", 100_000, "positive and at most 4096"),
        ("run.seed", 2**63, "0 or more, and below 2**63"),
    ],
)
def test_config_ranges_have_two_ends(key, value, legal):
    assert refusal({key: value}) == f"{key}={value} must be {legal}"


HUGE = (2**63 - 1, 10**40, 1e308, float("nan"), float("inf"))
ODD = (-1, -1.0, 0, *HUGE, "", None, [], {})


def test_config_refuses_odd_values_of_each_key_in_a_line_or_takes_them():
    """No traceback, no loop and no memory of the size of the number; a number that is taken is one that fp32 holds."""
    start, keys, taken, said = load_config(["--config", "quickstart"]), KEYS | OPTION_KEYS, set(), []
    for key, value in product(keys, ODD):
        try:
            config = with_values(start, {key: typed(key, value)})
        except ConfigError as error:
            said.append((key.replace(".options", ""), str(error).replace(".options", "")))
            continue
        if value in HUGE:
            taken.add(key)
        rate = make_schedule_of(config, SimpleNamespace(steps_per_epoch=4))
        assert all(math.isfinite(rate(step)) for step in range(4 * config.run.epochs)), (key, value)
    assert [(key, text) for key, text in said if key not in text or max(map(len, text.splitlines())) > 400] == []
    assert {key for key in taken if keys[key].ranges != (POSITIVE,)} == {"run.seed"}


def test_config_ranges_leave_no_number_unchecked():
    """Every int or float of the config has its range beside it."""
    checked = {name for name, key in KEYS.items() if key.ranges}
    numbers = {
        f"{section}.{key}"
        for section, fields in SECTIONS.items()
        for key, type_ in get_type_hints(fields).items()
        if {int, float} & {type_, *get_args(type_), *(a for t in get_args(type_) for a in get_args(t))}
    }
    assert checked == numbers


SYNTHETIC = {"data.loader": "synthetic", "data.num_synthetic_samples": 64}
SIZES = ((0, 16), (4, 32))


@pytest.mark.parametrize("mode", ["fast", "1.5", "true"])
def test_message_names_both_forms_of_a_compute_mode(mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "quickstart", f"--compute.mode={mode}"])
    assert str(caught.value) == f"compute.mode={mode} must be one of 'auto', 'eager' or a whole number"


@pytest.mark.parametrize("timeout", [2.5, 10.0, 600.0])
def test_patience_ends_before_the_other_ranks_lose_theirs(timeout):
    """2 * (patience + 1): a read may fail for so long, and then not return."""
    changes = {"comm.timeout_seconds": timeout, "data.patience_seconds": timeout}
    message = refusal(changes)
    assert message.startswith(f"data.patience_seconds={timeout:g} is too long: the other ranks give up after ")
    assert f"comm.timeout_seconds={timeout:g}: " in message
    least, longest = map(
        float, re.search(r"to at least (.*), or data.patience_seconds to at most (.*)$", message).groups()
    )
    make_config({**changes, "comm.timeout_seconds": least})
    assert 2 * (longest + 1) == timeout
    make_config({**changes, "data.patience_seconds": longest})
    assert "is too long" in refusal({**changes, "data.patience_seconds": longest + 0.01})
    assert refusal({"comm.timeout_seconds": 2.0}).endswith("set that to at least 3")
    make_config({**changes, **SYNTHETIC})  # which reads nothing that could be late


def test_config_models_are_those_that_are_built():
    assert list(config_sections.MODELS) == list(MODELS)


def test_config_optimizers_and_schedules_are_those_that_are_built():
    assert list(config_sections.OPTIMIZERS) == list(NATIVE)
    assert list(config_sections.SCHEDULES) == list(SCHEDULES)
    assert all(map(callable, map(load, (*NATIVE.values(), *SCHEDULES.values()))))


def test_resnets_are_those_that_are_built_as_such():
    built = [name for name, path in MODELS.items() if getattr(load(path), "func", None) is ResNet]
    assert built == list(config_sections.RESNETS)


@pytest.mark.parametrize("name", MODELS)
def test_smallest_image_is_the_smallest_that_the_model_takes(name):
    smallest = SMALLEST_IMAGE.get(name, 1)
    make_config({"model.name": name, "data.image_size": smallest})
    with torch.device("meta"), torch.no_grad():  # shapes alone
        model = load(MODELS[name])(num_classes=3).eval()
        model(torch.zeros(1, 3, smallest, smallest))
        if smallest == 1:
            return
        with pytest.raises(RuntimeError, match="too small"):
            model(torch.zeros(1, 3, smallest - 1, smallest - 1))
    too_small = refusal({"model.name": name, "data.image_size": smallest - 1})
    assert too_small.endswith(f"is too small for model.name={name}: give at least {smallest}")


@pytest.mark.parametrize(
    ("section", "key", "known"),
    [
        ("optimizer", "precision", COMPUTE_DTYPES),
        ("comm", "backend", BACKENDS),
        ("comm", "algorithm", (AUTO, *ALGORITHMS)),
    ],
)
def test_config_choices_are_those_that_the_code_knows(section, key, known):
    type_ = get_type_hints(SECTIONS[section])[key]
    literal = next((t for t in get_args(type_) if get_args(t)), type_)
    assert set(get_args(literal)) == set(known)


def keys_read(tree: ast.AST) -> set[str]:
    """section.key for each access x.section.key, and y.key where y is the section's name or stands for it."""
    aliases = {name: name for name in SECTIONS}
    types = {section.__name__: name for name, section in SECTIONS.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in types:
            aliases[node.arg] = types[node.annotation.id]
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for target, value in pairs:
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and value.attr in SECTIONS:
                    aliases[target.id] = value.attr
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            found.add(f"{aliases.get(name, name)}.{node.attr}")
    return found


def test_config_keys_are_all_read_outside_of_the_config():
    room = Path(bigbatch.trainer.__file__).parent
    sources = [path for path in room.rglob("*.py") if not re.match(r"config(_\w+)?\.py", path.name)]
    found = set().union(*(keys_read(ast.parse(path.read_text())) for path in sources))
    handed_on = {name for name, key in KEYS.items() if key.decider == "optimizer.name"}  # by build/optimizer.py
    handed_on.add("run.operator_files")  # only a switch, by observe/observer.py
    assert set(KEYS) - found - handed_on == set()


def takes_whole(kind):
    return kind is int or any(takes_whole(inner) for inner in get_args(kind))


@pytest.mark.parametrize("value", [2**20, 10**9, 10**12])
def test_huge_number_of_each_key_is_read_or_refused_at_once(value):
    """A config may come from elsewhere: no check counts up to its numbers."""
    named = [name for name, key in {**KEYS, **OPTION_KEYS}.items() if takes_whole(key.kind)]
    assert len(named) > 40
    for name in named:
        started = process_time()
        with suppress(ConfigError):
            make_config({name: typed(name, value)})
        assert process_time() - started < 1, name


@pytest.mark.parametrize("sizes", list(product((7, 999_999_937, 10**9), repeat=3)))
def test_remedy_for_huge_batches_is_found_at_once(sizes):
    """999,999,937 is prime."""
    whole, part, span = sizes
    changes = {"batch.global_batch_size": whole, "batch.microbatch_size": part, "batch.bn_span": span}
    started = process_time()
    with suppress(ConfigError):
        divide_batch(make_config({**changes, "batch.virtual_ranks": whole}).batch, world_size=3)
    with suppress(ConfigError):
        divide_batch(make_config(changes).batch, world_size=3)
    assert process_time() - started < 1
