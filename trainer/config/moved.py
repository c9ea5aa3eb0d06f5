"""The config of a run folder that may have moved, with its images: loaded if a command names a run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbatch.errors import DataError, Refusals
from bigbatch.parts import load
from bigbatch.trainer.config.dotted import names_list
from bigbatch.trainer.config.file import Experiment, find_config
from bigbatch.trainer.config.options import parse_options
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.trust import RUN_CONFIG, RUN_FOLDER_MARKS

RUN_LIST = "images.json"
"""Copy of the list that data.root or data.list names, in the run folder."""
REQUIRE_SAME_LIST = "bigbatch.trainer.input.listed.require_same_list"


def in_its_folder(experiment: Experiment, overrides: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a run folder with run.directory at that folder, and its copy of a list.

    The original list stays in data.root if it is there. The copy is also used if overrides name a folder of images
    without splits of its own in data.root. A folder in which no run has begun stays as it is.
    """
    folder, before = experiment.path.parent, experiment.stated
    if not _has_begun(folder):
        return experiment
    stated = {**before, "run.directory": str(folder)}
    copy = folder / RUN_LIST
    if copy.is_file() and "data.list" not in overrides:
        if "data.root" in overrides:
            stated["data.list"] = str(copy) if _is_of_images_alone(Path(overrides["data.root"])) else None
        elif stated.get("data.list"):
            stated["data.list"] = str(copy)
        elif not names_list(str(stated.get("data.root"))):
            pass  # the copy is of an earlier list, which a folder has replaced
        elif not Path(stated["data.root"]).is_file():
            stated["data.root"] = str(copy)
    moved = {key: "run folder" for key, value in stated.items() if key not in before or value != before[key]}
    return replace(experiment, stated=stated, origins={**experiment.origins, **moved})


def require_own_list(config: Config, argv: Sequence[str]) -> Config:
    """Return config; refuse a list of images that is not that of the run folder that argv names.

    argv: the words of which config was loaded. Commands that read images call it; a training compares at its start.
    Raises: DataError if the run's copy is missing, or the original cannot be read or lists other images.
    """
    names, stated = parse_options(argv, prog="bigbatch", takes_config=True, refusals=Refusals())
    path, key = find_config(names[0]), "data.list" if config.data.list else "data.root"
    listed, copy = config.data.list or config.data.root, path.parent / RUN_LIST
    is_of_run = path.name == RUN_CONFIG and _has_begun(path.parent)
    is_stated = bool({key, "data.list", "run.directory"} & stated.keys())
    reads_list = (key == "data.list" or names_list(listed)) and config.data.loader != "synthetic"
    if is_of_run and reads_list and not is_stated:
        if not copy.is_file():
            raise DataError(f"{copy} is missing, this run's list of images: restore it, or name one by --{key}")
        if not copy.samefile(listed):
            load(REQUIRE_SAME_LIST)(Path(listed), copy)
    return config


def _has_begun(folder: Path) -> bool:
    return any(any(folder.glob(mark)) for mark in RUN_FOLDER_MARKS)


def _is_of_images_alone(root: Path) -> bool:
    has_splits = any((root / split).exists() for split in ("train", "val"))
    return root.is_dir() and not has_splits and not any(root.glob("*.tar"))
