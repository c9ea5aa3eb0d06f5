"""Each part of benchmarks.gpu.day at its full size, as on a GPU: every config that it states is legal. Nothing runs."""

import json
import shutil
import subprocess
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.suite import (
    checks,
    cifar,
    exact_sums,
    job,
    kernels,
    parts,
    recipes,
    scripts,
    steps,
    torchvision_peer,
    training,
)
from benchmarks.gpu.suite.context import FULL, Context
from benchmarks.gpu.suite.images import small_images
from benchmarks.gpu.suite.report import TARGETS
from bigbatch.tools.doctor import command as doctor
from bigbatch.trainer.config.file import load_config, packaged_configs
from bigbatch.trainer.config.schema import try_values

WITHOUT_CONFIG = {"calibration", "tests", "decode", "lars", "inference", "recompute", "reducer", "precisions"}
"""Parts that state no config of bigbatch; of most, the options of a script are checked."""

CHECKED: list[str] = []
"""Names of the configs that a part stated."""


class Anything(dict[Any, Any]):
    """A record that holds every key."""

    def __missing__(self, key: object) -> Any:
        return Anything()


class Checked:
    """Stands in for a benchmark's job: the config is loaded and checked for one rank, and no step runs."""

    def __init__(self, settings: job.Settings, *, config: str = job.CONFIG, with_nccl: bool = False) -> None:
        self.config = check(["--config", config, *job.as_options(settings)])
        self.plan = SimpleNamespace(global_batch_size=self.config.batch.global_batch_size)
        split = SimpleNamespace(num_samples=1)
        self.communicator = self.train_split = self.eval_split = split
        statistics = SimpleNamespace(running_N=torch.zeros(1))
        model = SimpleNamespace(parameters=lambda: [torch.zeros(1)])
        self.parts = SimpleNamespace(model=model, statistics=statistics, normalize=None)

    def run(self, steps: int) -> None:
        pass

    run_reading_the_loss = run

    def close(self) -> None:
        pass


def check(words: list[str]) -> Any:
    """Load a config as its command does. Raises: ConfigError."""
    config = load_config(words)
    assert not isinstance(try_values(config, {}, world_size=1), str)
    CHECKED.append(words[1])
    return config


def command(*words: str, **how: object) -> None:
    """Stand in for a command of bigbatch: check its config, and write what the part reads afterwards."""
    if words[:2] == ("data", "generate"):
        small_images(Path(words[2]).parent)
    elif words[0] == "doctor":
        arguments, overrides = doctor._parser().parse_known_args(words[1:])
        check(["--config", arguments.config, *overrides])
    else:
        folder = Path(check([*words[1:]]).run.directory)
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"top1": 0.5, "seconds": 1.0}))


def process(words: list[str], **how: object) -> Any:
    """Stand in for a process that trains until its first step."""
    if "train" in words:
        folder = Path(check(words[words.index("train") + 1 :]).run.directory)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "time": time.time()}) + "\n")
    return SimpleNamespace(stdout="tests/gpu/test_saving.py: 3", returncode=0)


def script(module: str, options: list[str], context: Context) -> Anything:
    """Stand in for another benchmark: parse its options, and check the config that it hands to `bigbatch train`."""
    parsed = import_module(module).parse(["--out", str(context.scratch / "out.json"), *map(str, options)])
    if overrides := getattr(parsed, "overrides", None):
        check([*overrides, "--data.loader=synthetic", "--data.num_synthetic_samples=100000"])
    return Anything()


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    none = job.Contestant(lambda steps: None, 1)
    CHECKED.clear()
    for module in (job, training, exact_sums):
        monkeypatch.setattr(module, "Job", Checked)
    for module in (checks, scripts):
        monkeypatch.setattr(module, "bigbatch", command)
        monkeypatch.setattr(module, "run_script", script)
    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(exact_sums, "digest", lambda tensors: torch.zeros(1, dtype=torch.int64))
    monkeypatch.setattr(steps, "measure_peaks", lambda *_, **__: 1.0)
    monkeypatch.setattr(torchvision_peer, "peer", lambda *_, **__: none)
    monkeypatch.setattr(training, "evaluate", lambda *_, **__: None)
    monkeypatch.setattr(training.build_input, "eval_batches", lambda *_: ())
    monkeypatch.setattr(kernels, "row_of", lambda *_: {"step": "none"})
    monkeypatch.setattr(training, "like_imagenet", lambda scratch, num_images: small_images(scratch))


@pytest.mark.parametrize("name", [n for n in parts.parts_of(FULL) if n != "calibration" and "prototypes" not in n])
def test_configs_of_a_part_are_legal(name: str, stubbed: None, tmp_path: Path) -> None:
    device = torch.device("cuda" if name.startswith("sanitizer") else "cpu")
    images = {"data": small_images(tmp_path), "cifar": small_images(tmp_path, side=32)}
    context = Context(size=FULL, device=device, scratch=tmp_path, seeds=1, **images)
    found = parts.parts_of(FULL)[name].measure(context)
    assert not any("not available" in why for why in found.left_out.values())
    assert bool(CHECKED) == (name not in WITHOUT_CONFIG)


def test_every_imagenet_recipe_is_in_a_part_with_a_target() -> None:
    names = [each for each in packaged_configs() if each.startswith("imagenet/")]
    assert sorted(each for group in recipes.recipes().values() for each in group) == names
    judged = {target.figure for target in TARGETS if target.least == 0.97}
    assert judged == {(f"recipes/{name}", recipes.RATIO) for name in recipes.recipes()}


def test_step_of_a_recipe_is_the_one_that_auto_chooses(tmp_path: Path) -> None:
    context = Context(size=FULL, device=torch.device("cpu"), scratch=tmp_path)
    settings, words = recipes.settings_of("imagenet/resnet50_8k", context)
    own, one = (settings[each] for each in (recipes.OWN, recipes.ONE_GHOST))
    assert words == "ghost batches of 64 images, microbatch 256, compiled"
    assert (own["batch.microbatch_size"], own["batch.bn_span"], own["compute.compile"]) == (256, 64, "default")
    assert (one["batch.microbatch_size"], one["batch.bn_span"], one["compute.compile"]) == (256, 256, "default")
    assert cifar.RECIPE not in recipes.recipes()
