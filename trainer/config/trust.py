"""Which import paths of an experiment may be imported: what the user wrote, and what libraries are known to hold."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.dotted import is_dotted
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.score import metric_entries

TRUST = "--trust-code"
"""Option of the commands that take --section.key."""
TRUST_HELP = "import what the run folder names outside of torch, torchvision, timm and bigbatch: its code is run"
RUN_CONFIG = "config.yaml"
"""The complete config in a run folder."""
BESIDE = ("checkpoints/step-*", "metrics.jsonl")
"""Each shows that a folder is a run folder, whatever its config is called."""
WEIGHTS = (".pt", ".pth", ".safetensors")
"""Files that show it of a config.yaml right beside them."""
KNOWN_MODULES = (
    *("bigbatch.trainer.models", "bigbatch.trainer.optim", "torch.nn", "torch.optim"),
    *("torchvision.models", "torchvision.ops", "timm.layers", "timm.loss", "timm.models", "timm.optim"),
)
"""Modules, and those below them, in which a run folder may name things: they hold models, losses and optimizers, and
what is called of them is checked by its kind (docs/decisions/127)."""


def is_of_run(path: Path) -> bool:
    """Tell whether a file lies in a run folder, or below one, by its own path or by that which its links lead to."""
    return any(
        any(map(_is_run_folder, place.parents)) or (place.name == RUN_CONFIG and _holds_weights(place.parent))
        for place in (Path(os.path.abspath(path)), path.resolve())
    )


def _holds_weights(folder: Path) -> bool:
    return any(any(folder.glob(f"*{suffix}")) for suffix in WEIGHTS)


def _is_run_folder(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in BESIDE)


def import_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of an experiment that names something to import, and the import path."""
    named = {"model.name": config.model.name, "optimizer.name": config.optimizer.name}
    for key, name in {**named, "optimizer.loss": config.optimizer.loss}.items():
        if is_dotted(name):
            yield key, name
    for _, name, _ in metric_entries(config.run.metrics):
        yield "run.metrics", name


def require_trusted(config: Config, of_runs: Mapping[str, Path]) -> None:
    """Refuse import paths outside of KNOWN_MODULES in keys that run folders state; nothing is imported for it.

    of_runs: those keys, and where each is stated. Raises: ConfigError naming all of them.
    """
    strange = [(key, name) for key, name in import_paths(config) if key in of_runs and not _is_known(name)]
    if strange:
        files = ", ".join(dict.fromkeys(str(of_runs[key]) for key, _ in strange))
        names = ", ".join(f"{key}: {name}" for key, name in strange)
        raise ConfigError(
            f"{files} names code to import ({names}): a run folder may come from others, so nothing was imported. If "
            f"you trust that code, name it in a config of your own or by options such as --{strange[0][0]}, or add "
            f"{TRUST} to a command that takes it"
        )


def _is_known(name: str) -> bool:
    module = name.rpartition(".")[0]
    return module == "bigbatch" or f"{module}.".startswith(tuple(f"{known}." for known in KNOWN_MODULES))
