"""The images of a run and the steps of its epochs, from its config; without torch, since sweeps check their points."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import IMAGENET_COUNTS
from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.data_root import Cache, DataRoot
from bigbatch.words import count

if TYPE_CHECKING:
    from bigbatch.comm.connection import Connection

Images = tuple[ImageSource, ImageSource]
"""Images of the training and the validation split."""


def data_root(config: Config) -> DataRoot:
    folder = config.data.cache_dir
    cache = None if folder is None else Cache(Path(folder), round(1e9 * config.data.cache_gb), config.data.shared_by)
    return DataRoot(config.data.root, cache=cache, listed=config.data.list)


def open_images(config: Config) -> Images | None:
    """List the images of both splits; None for generated ones. Raises: DataError; ConfigError."""
    if config.data.loader == "synthetic":
        return None
    root = data_root(config)
    train_index = root.open("train")
    return train_index, root.open("val", classes=train_index.classes)


def stage_data(config: Config, connection: "Connection") -> tuple[Config, str | None]:
    """Return the config with data.root at the copy, and a line for the log; unchanged without data.stage. Collective.

    Raises: DataError, as build/staging.py does.
    """
    if config.data.stage is None:
        return config, None
    staged: tuple[Config, str] = load("bigbatch.trainer.build.staging.stage_data")(config, connection)
    return staged


def require_num_classes(config: Config, index: ImageSource) -> None:
    """Raise ConfigError if the images have another number of classes than the config."""
    if len(index.classes) != config.data.num_classes:
        raise ConfigError(
            f"data.num_classes={config.data.num_classes}, but {config.data.root} holds "
            f"{count(len(index.classes), 'class')}"
        )


def num_train_samples(config: Config, images: Images | None) -> int:
    """Return the number of training samples. images: as open_images gives them."""
    if images is not None:
        return len(images[0])
    return num_generated(config, "train")


def num_generated(config: Config, split: Literal["train", "val"]) -> int:
    """Return the number of images of a split that data.loader=synthetic generates."""
    return config.data.num_synthetic_samples or IMAGENET_COUNTS[split]


def count_steps_per_epoch(config: Config, *, num_samples: int) -> int:
    """Return the steps of an epoch, which drops images that do not fill a global batch. Raises: ConfigError."""
    steps_per_epoch = num_samples // config.batch.global_batch_size
    if steps_per_epoch == 0:
        raise ConfigError(
            f"batch.global_batch_size={config.batch.global_batch_size} exceeds the {num_samples} training images"
        )
    every_steps, num_steps = config.optimizer.ema_every_steps, steps_per_epoch * config.run.epochs
    if every_steps is not None and every_steps > num_steps:
        raise ConfigError(
            f"optimizer.ema_every_steps={every_steps} exceeds the {count(num_steps, 'step')} of the run, and would "
            f"have no effect: set it to at most {num_steps}"
        )
    return steps_per_epoch
