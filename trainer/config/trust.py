"""Import paths that an experiment may import: those that the user wrote, and those of known libraries."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.dotted import class_of_root, is_import_path
from bigbatch.trainer.config.optimizer import named_entries
from bigbatch.trainer.config.schema import Config

TRUST = "--trust-code"
"""Option of the commands that take --section.key."""
TRUST_HELP = "import and run code that the run folder names outside of torch, torchvision, timm and bigbatch"
RUN_CONFIG = "config.yaml"
"""The complete config in a run folder."""
RUN_FOLDER_MARKS = ("checkpoints/step-*", "metrics.jsonl")
"""Each of these files shows that a folder is a run folder, whatever the name of its config."""
WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
"""Files of these suffixes beside a config.yaml show it too."""
KNOWN_MODULES = (
    *("bigbatch.trainer.models", "bigbatch.trainer.optim", "torch.nn", "torch.optim"),
    *("torchvision.models", "torchvision.ops", "timm.layers", "timm.loss", "timm.models", "timm.optim"),
)
"""Modules, with their submodules, that a run folder may import from: they hold models, losses and optimizers. The
caller checks the kind of each object that it calls (docs/decisions/127)."""


def is_of_run(path: Path) -> bool:
    """Return whether a file lies in or below a run folder, by its path or by the path that its links resolve to."""
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if any(any(folder.glob(name)) for folder in place.parents for name in RUN_FOLDER_MARKS):
            return True
        if place.name == RUN_CONFIG and any(any(place.parent.glob(f"*{suffix}")) for suffix in WEIGHT_SUFFIXES):
            return True
    return False


def import_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of an experiment that states an import path, and the path."""
    own_images = class_of_root(config.data.root)
    named = {
        "data.loader": config.data.loader,
        "data.root": own_images[0] if own_images else "",
        "model.name": config.model.name,
        "optimizer.name": config.optimizer.name,
        "optimizer.loss": config.optimizer.loss,
        "schedule.name": config.schedule.name,
    }
    yield from ((key, name) for key, name in named.items() if is_import_path(name))
    for key, entries in (("augment.custom", config.augment.custom), ("run.metrics", config.run.metrics)):
        yield from ((key, name) for _, name, _ in named_entries(entries))
    yield from (("run.loggers", name) for name in config.run.loggers if is_import_path(name))


def require_trusted(config: Config, of_runs: Mapping[str, Path]) -> None:
    """Refuse import paths outside of KNOWN_MODULES in keys that run folders state. Imports nothing.

    of_runs: key -> the file that states it. Raises: ConfigError naming all of them.
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
