"""The config of a run folder that may have moved, with its images: loaded if a command names a run folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbatch.errors import DataError
from bigbatch.parts import load
from bigbatch.trainer.config.dotted import names_list
from bigbatch.trainer.config.file import Experiment
from bigbatch.trainer.config.trust import RUN_FOLDER_MARKS

RUN_LIST = "images.json"
"""Copy of the list that data.root or data.list names, in the run folder."""
REQUIRE_SAME_LIST = "bigbatch.trainer.input.listed.require_same_list"


def in_its_folder(experiment: Experiment, overrides: Mapping[str, Any], *, compares_list: bool) -> Experiment:
    """Return the experiment of a run folder with run.directory at that folder, and its copy of a list.

    The original list stays in data.root if it is there. The copy is also used if overrides name a folder of images
    without splits of its own in data.root. A folder in which no run has begun stays as it is.

    Raises: DataError, with compares_list, if the copy is missing, or the original cannot be read or lists other images.
    """
    folder, before = experiment.path.parent, experiment.stated
    if not any(any(folder.glob(mark)) for mark in RUN_FOLDER_MARKS):
        return experiment
    stated = {**before, "run.directory": str(folder)}
    copy = folder / RUN_LIST
    compares_list = compares_list and "run.directory" not in overrides  # else of another run
    key = "data.list" if stated.get("data.list") else "data.root"
    if compares_list and not copy.is_file() and not {key, "data.list"} & {*overrides}:
        has_list = key == "data.list" or names_list(str(stated.get("data.root")))
        if has_list and {**stated, **overrides}.get("data.loader") != "synthetic":
            raise DataError(f"{copy} is missing, this run's list of images: restore it, or name one by --{key}")
    if copy.is_file() and "data.list" not in overrides:
        if "data.root" in overrides:
            stated["data.list"] = str(copy) if _is_of_images_alone(Path(overrides["data.root"])) else None
        elif stated.get("data.list"):
            stated["data.list"] = str(copy)
        elif not names_list(str(stated.get("data.root"))):
            pass  # the copy is of an earlier list, which a folder has replaced
        elif not (original := Path(stated["data.root"])).is_file():
            stated["data.root"] = str(copy)
        elif compares_list and not original.samefile(copy):
            load(REQUIRE_SAME_LIST)(original, copy)
    moved = {key: "run folder" for key, value in stated.items() if key not in before or value != before[key]}
    return replace(experiment, stated=stated, origins={**experiment.origins, **moved})


def _is_of_images_alone(root: Path) -> bool:
    has_splits = any((root / split).exists() for split in ("train", "val"))
    return root.is_dir() and not has_splits and not any(root.glob("*.tar"))
