"""Classify images with a trained model: `bigbatch predict`, and the same in Python."""

import argparse
import csv
import errno
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import nn

from bigbatch.cells import text_cell
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import SOME_FAILED, ConfigError, DataError, StorageError, print_line, tell
from bigbatch.files import as_json, is_stream, open_named, require_nameable
from bigbatch.paths import as_path
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.job import join_job, without_choices
from bigbatch.trainer.build.model import explain_refusal_
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.show_progress import show_progress
from bigbatch.trainer.folder.folder import writing
from bigbatch.trainer.inference import accuracy as evaluation
from bigbatch.trainer.inference.arguments import read_trained, trained_parser
from bigbatch.trainer.inference.folding import for_inference
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.input.base import SPLITS
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.image_files import IMAGE_SUFFIXES, list_below
from bigbatch.trainer.input.order import read_file
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, in_forward
from bigbatch.words import count, whole

IMPORTS = ("model.name", "data.loader")
"""Keys whose code a prediction imports."""
MIN_FOR_PROGRESS = 100
"""Fewest images whose progress is shown."""
NO_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENXIO,
)
"""Errors of a path that another attempt meets again."""


@dataclass(frozen=True)
class Prediction:
    """Lists the most probable classes of one image, the first one first, and their probabilities."""

    image: Path
    classes: tuple[str, ...]
    """Names that the run keeps in its checkpoints; numbers from 0 if the weights come without."""
    probabilities: tuple[float, ...]


class Classifier:
    """A trained model with the preprocessing of the validation images."""

    def __init__(self, config: Config, weights: Path) -> None:
        """Load the weights and join a job of one rank. Raises: ConfigError; CheckpointError."""
        if config.data.loader == "synthetic":
            raise ConfigError("data.loader=synthetic reads no images: give the keys of data as for real ones")
        env = read_process_env()
        if env.world_size > 1:
            raise ConfigError(
                f"predict works in one process, this job has {env.world_size}: start it without a launcher"
            )
        self._config = without_choices(config, world_size=1)
        plain, loaded = make_plain_model(config, weights=weights)
        if loaded.note:
            tell(loaded.note)
        if loaded.classes is None:
            tell(f"{weights} keeps no class names: classes are numbers, from 0")
        self._names = loaded.classes or tuple(map(str, range(config.data.num_classes)))
        self._communicator: Communicator = join_job(self._config, env)[0]
        self._model: nn.Module = for_inference(
            plain,
            device=self._communicator.device,
            dtype=COMPUTE_DTYPES[config.optimizer.precision],
            channels_last=config.compute.channels_last,
        )
        explain_refusal_(self._model, name=config.model.name)

    def __call__(
        self, images: Sequence[Path | str], *, top: int = 5, unreadable: Callable[[Path, str], None] | None = None
    ) -> Iterator[Prediction]:
        """Return the top classes of each image, in order.

        unreadable: called with an image that cannot be read, and why; the image has no prediction then. None: such an
        image raises DataError.
        """
        paths = [Path(image) for image in images]
        for path in paths if unreadable is None else ():
            if not path.is_file():
                raise DataError(f"{path}: {'is a folder: name its images' if path.is_dir() else 'no such image'}")
        return self._predict(paths, min(top, len(self._names)), unreadable) if paths else iter(())

    @torch.no_grad()
    def _predict(
        self, paths: list[Path], top: int, unreadable: Callable[[Path, str], None] | None
    ) -> Iterator[Prediction]:
        config, data = self._config, self._config.data
        if data.loader == "resident":  # which takes images of one size
            data = replace(data, loader="torchvision", crop="resized", crop_area_min=1.0, resident_on=None)
        index = NamedImages(paths, side=config.data.image_size)
        size = min(config.batch.microbatch_size, len(index))  # little padding is decoded
        config = replace(
            config,
            batch=replace(config.batch, microbatch_size=size, global_batch_size=size, bn_span=size),
            augment=replace(config.augment, mixup_alpha=0.0, cutmix_alpha=0.0),  # nothing to mix a single image with
            data=replace(data, max_skipped=None if unreadable is None else len(paths)),
        )
        split = build_input.split_of(config, self._communicator, index)
        normalize = build_input.make_normalize(config, self._communicator)
        with closing(split.loader):
            for batch in build_input.eval_batches(config, self._communicator, split):
                images_BCHW = normalize(batch.images_BCHW)
                with in_forward(config.optimizer.precision, device=self._communicator.device):
                    logits_BK = evaluation.predict(self._model, images_BCHW, flip=config.data.eval_flip)
                shares_BT, classes_BT = logits_BK.softmax(1).topk(top)
                faults = {image.position: image.reason for image in batch.replaced}
                rows = zip(batch.request.indices_B.tolist(), shares_BT.tolist(), classes_BT.tolist(), strict=True)
                for position, shares, classes in rows:
                    if position == len(paths):  # the substitute, which is last, and padding
                        break
                    if unreadable is not None and position in faults:
                        unreadable(paths[position], faults[position])
                    else:
                        yield Prediction(paths[position], tuple(self._names[each] for each in classes), tuple(shares))

    def close(self) -> None:
        """Close the communicator."""
        self._communicator.close()


class NamedImages:
    """ImageSource of image files anywhere, without known classes; a black image after the last replaces bad ones."""

    classes: tuple[str, ...] = ()

    def __init__(self, paths: Sequence[Path], *, side: int) -> None:
        self._paths = paths
        self.labels_N = np.zeros(len(paths) + 1, np.int64)
        buffer = io.BytesIO()
        Image.new("RGB", (side, side)).save(buffer, "PNG")
        self._substitute = buffer.getvalue()

    def __len__(self) -> int:
        return len(self.labels_N)

    def name(self, position: int) -> str:
        """Return the path as the user wrote it."""
        return str(self._paths[position]) if position < len(self._paths) else "the image after the last"

    def read(self, position: int) -> bytes:
        """Return the image's bytes. Raises: DataError for a file that is not there; StorageError."""
        if position == len(self._paths):
            return self._substitute
        try:
            return read_file(self.name(position))
        except StorageError as error:
            if isinstance(cause := error.__cause__, OSError) and cause.errno in NO_FILE:  # later as well
                raise DataError(f"{self.name(position)}: cannot be read ({cause.strerror})") from error
            raise

    def sizes(self, positions_B: np.ndarray) -> None:
        return None

    def close(self) -> None:
        """Do nothing: nothing stays open between reads."""


def find_images(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the images that paths name: files, all images below folders, and both splits of lists (.json).

    Raises: DataError for a folder without images, or one that cannot be listed; as open_split for a list.
    """
    for path in paths:
        if path.is_dir():
            below = list_below(path)
            if below.unlisted:
                raise DataError(below.unlisted[0])
            if not below.images:
                raise DataError(f"{path}: holds no {', '.join(IMAGE_SUFFIXES)}: name a folder of images")
            if left_out := [name for names in below.left_out().values() for name in names]:
                tell(f"{path}: {count(len(left_out), 'file')} left out, such as {left_out[0]}: not read as images")
            yield from (path / image for image in below.images)
        elif path.suffix == ".json" and path.is_file():
            for index in (open_split(path, split) for split in SPLITS):
                yield from (Path(index.name(position)) for position in range(len(index)))
        else:
            yield path


def load_classifier(*argv: str) -> Classifier:
    """Load a classifier from the command line's words: a run folder, then keys of its config to override.

    Example: load_classifier("runs/quickstart", "--optimizer.precision=bf16"). Raises: as read_trained and Classifier.
    """
    _, config, weights = read_trained(_parser(), argv, imports=IMPORTS)
    return Classifier(config, weights)


def main(argv: Sequence[str]) -> int:
    """Print the classes of the images that argv names, or write them to a file; return the exit code."""
    parser = _parser()
    arguments, config, weights = read_trained(parser, argv, imports=IMPORTS)
    if not arguments.others:
        parser.error("name one or more images, folders or lists")
    if arguments.top < 1:
        parser.error(f"--top {arguments.top} is not possible: give 1 or more")
    if arguments.csv and arguments.json:
        parser.error("--csv writes a table instead of lines: leave out --json, or --csv")
    images = list(find_images(arguments.others))
    if arguments.csv and arguments.csv.exists() and arguments.csv.resolve() in {each.resolve() for each in images}:
        parser.error(f"--csv {arguments.csv} is one of the images: name another file")
    classify = Classifier(config, weights)
    faults: list[str] = []
    is_quiet = arguments.csv or not sys.stdout.isatty()
    with ExitStack() as opened:
        write = _write_json if arguments.json else _print if not arguments.csv else None
        rows = advance = None
        if arguments.csv:
            opened.enter_context(writing(arguments.csv))
            require_nameable(arguments.csv)
            num_columns = min(arguments.top, config.data.num_classes)
            rows = _csv_rows(opened.enter_context(open_named(arguments.csv)), num_columns)
        if is_quiet and len(images) >= MIN_FOR_PROGRESS:
            advance = opened.enter_context(show_progress("predicting"))
        found = classify(images, top=arguments.top, unreadable=lambda path, reason: faults.append(reason))
        for number, prediction in enumerate(found, 1):
            if write:
                write(prediction)
            if rows:
                rows(prediction)
            if advance:
                advance(number + len(faults), len(images))
    classify.close()
    if arguments.csv:
        say = tell if is_stream(arguments.csv) else print_line  # /dev/stdout has the table alone
        say(f"{arguments.csv}: {count(len(images) - len(faults), 'prediction')}")
    if faults:
        tell(f"{len(faults)} of {count(len(images), 'image')} cannot be read:", *faults)
    return SOME_FAILED if faults else 0


def _print(found: Prediction) -> None:
    answers = zip(found.classes, found.probabilities, strict=True)
    print_line(f"{found.image}: {', '.join(f'{name} {100 * share:.1f}%' for name, share in answers)}")


def _write_json(found: Prediction) -> None:
    answers = zip(found.classes, found.probabilities, strict=True)
    facts = [{"class": name, "probability": share} for name, share in answers]
    print(as_json({"image": str(found.image), "classes": facts}))


def _csv_rows(file: BinaryIO, top: int) -> Callable[[Prediction], None]:
    """Write the head of a table to file; return a function that writes the row of a prediction."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    rows = csv.writer(text, lineterminator="\n")
    ranks = [f"_{rank}" if rank > 1 else "" for rank in range(1, top + 1)]
    rows.writerow(["path", *(f"{name}{rank}" for rank in ranks for name in ("class", "probability"))])

    def write(found: Prediction) -> None:
        answers = zip(map(text_cell, found.classes), (f"{share:.6g}" for share in found.probabilities), strict=True)
        rows.writerow([text_cell(str(found.image)), *(cell for answer in answers for cell in answer)])

    return write


def _parser() -> argparse.ArgumentParser:
    parser = trained_parser(
        "bigbatch predict",
        description="Predict the classes of images, which are resized and cropped as in evaluation. Prints class "
        "names, or numbers if the weights have no names. A folder stands for all images below it, a list of "
        f"`bigbatch init` for those of both splits. Exit code {SOME_FAILED} if some images cannot be read.",
        others="IMAGE|FOLDER|LIST ...",
    )
    parser.add_argument("--top", type=whole, default=5, help="classes to print of each image (default 5)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each image")
    parser.add_argument("--csv", type=as_path, metavar="FILE", help="write a table instead of lines")
    return parser
