"""Compare the points of a sweep with the data sets on which they train, and the files with which they start."""

from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import ConfigError, DataError, tell
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import Point, PointRefusals
from bigbatch.trainer.build.images import (
    Images,
    count_steps_per_epoch,
    num_train_samples,
    open_images,
    require_num_classes,
)
from bigbatch.trainer.config.schema import Config

LIBRARIES_OF_WEIGHTS = ("torchvision:", "timm:")


def require_images(plan: SweepPlan, points: Sequence[Point], *, starts: bool) -> None:
    """Check batch, epochs and classes of the points by their images, and their files, as each run does at its start.

    Lists each data set once. What is missing here, or in an object store, is only reported if the points run on
    other hosts, or if they are only shown (starts is false), perhaps for another machine.
    Raises: ConfigError, a line for each reason why points cannot be trained.
    """
    wrong, unseen, listed = PointRefusals(), set[str](), dict[str, Images | DataError | None]()
    for point in points if plan.script is None else ():
        root = point.config.data.root
        absent = {f"{key}={file}": file for key, file in _files(point.config) if not Path(file).exists()}
        unseen.update(absent)
        if lost := [each for each, file in absent.items() if starts and not _runs_elsewhere(plan, file)]:
            wrong.add(ConfigError(*(f"{each}: there is no such file" for each in lost)), point.number, point.values)
            continue
        may_be_missing = not starts or _runs_elsewhere(plan, root)
        is_unseen = "://" in root or (may_be_missing and not Path(root).exists())
        if is_unseen and point.config.data.loader != "synthetic":
            unseen.add(f"data.root={root}")
            continue
        try:
            _require_images(point.config, listed)
        except (ConfigError, DataError) as error:
            wrong.add(error, point.number, point.values)
    wrong.raise_all(len(points))
    for missing in sorted(unseen):
        tell(f"warning: {missing} is not on this host, and was not compared with the points")


def _files(config: Config) -> list[tuple[str, str]]:
    """Return key and path of the files that each rank reads at its start; names such as timm:resnet50 are none."""
    data_list = ("data.list", config.data.list)
    stated = (data_list, ("model.weights", config.model.weights), ("comm.table", config.comm.table))
    return [(key, file) for key, file in stated if file and not file.startswith(LIBRARIES_OF_WEIGHTS)]


def _runs_elsewhere(plan: SweepPlan, root: str) -> bool:
    return plan.has_other_hosts and not Path(root).absolute().is_relative_to(Path.cwd())


def _require_images(config: Config, listed: dict[str, Images | DataError | None]) -> None:
    name = "" if config.data.loader == "synthetic" else f"{config.data.root}\0{config.data.list or ''}"
    if name not in listed:
        try:
            listed[name] = open_images(config)
        except DataError as error:
            listed[name] = error
    images = listed[name]
    if isinstance(images, DataError):
        raise images
    if images is not None:
        require_num_classes(config, images[0])
    count_steps_per_epoch(config, num_samples=num_train_samples(config, images))
