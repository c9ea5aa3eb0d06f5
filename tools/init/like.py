"""What a recipe of `bigbatch init` starts from: a packaged experiment, a run folder's weights, or those of timm."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.file import load_config, packaged_configs
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.strict_yaml import as_yaml

FINETUNE = "finetune"
"""Packaged experiment that recipes for other weights extend."""
TIMM = "timm:"
Stated = dict[str, dict[str, tuple[Any, str]]]
"""Section -> key -> value, and why."""


def words_of(stated: Stated) -> list[str]:
    """Return the values as options of the command line."""
    return [f"--{section}.{key}={as_yaml(v)}" for section, keys in stated.items() for key, (v, _) in keys.items()]


def starting_point(like: str) -> tuple[str, Stated]:
    """Return the packaged experiment to extend, and the keys of the model and weights that like names.

    like: a packaged experiment, a run folder or timm:NAME. Raises: ConfigError; CheckpointError; RunFolderError.
    """
    if like in packaged_configs():
        return like, {}
    if like.startswith(TIMM):
        return FINETUNE, _of_timm(like)
    if not Path(like).is_dir():
        raise ConfigError(
            f"--like {like}: is no packaged experiment, run folder or timm:NAME; `bigbatch config list` names the first"
        )
    return FINETUNE, _of_run(Path(like))


def _of_timm(like: str) -> Stated:
    from bigbatch.trainer.models.libraries import timm_input

    try:
        mean, std, size = timm_input(like.removeprefix(TIMM))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"--like {like}: {error}") from error
    name = like.partition(".")[0]  # of timm:resnet50.a1_in1k the model is resnet50
    return _stated({"name": name}, like, mean=mean, std=std, size=size, factors=None)


def _of_run(run: Path) -> Stated:
    from bigbatch.trainer.checkpoint.checkpoint import best_or_newest
    from bigbatch.trainer.folder.folder import RunDir, load_run_config

    config = load_run_config(RunDir(run), [], prog="bigbatch init", imports=["model.name"])
    weights = str(best_or_newest(RunDir(run).checkpoints, remedy="name another one by --like"))
    model = {key: value for key, value in asdict(config.model).items() if key in ("name", "options") and value}
    data, factors = config.data, config.optimizer.lr_factors
    return _stated(model, weights, mean=data.mean, std=data.std, size=data.image_size, factors=factors)


def _stated(
    model: dict[str, Any],
    weights: str,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    size: int,
    factors: dict[str, Any] | None,
) -> Stated:
    named = {key: (value, "") for key, value in model.items()}
    data = {"image_size": (size, ""), "mean": ([*mean], "of the weights"), "std": ([*std], "of the weights")}
    stated: Stated = {"data": data, "model": {**named, "weights": (weights, "")}}
    heads = _heads(load_config(["--config", FINETUNE, *words_of(stated)]))
    why = "as in that run" if factors else "the new layer learns, the others follow"
    stated["optimizer"] = {"lr_factors": (factors or {**{f"{head}.*": 1.0 for head in heads}, "*": 0.1}, why)}
    return stated


def _heads(config: Config) -> list[str]:
    """Return the names of the model's last layers."""
    from torch import nn

    from bigbatch.trainer.build.model import build_classifier
    from bigbatch.trainer.models.exchange import heads_of

    return heads_of(build_classifier(config, nn.BatchNorm2d))
