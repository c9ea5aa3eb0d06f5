"""Order of images: the list of a split and its global order, as pure functions of (seed, epoch)."""

import errno
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError, StorageError, printable
from bigbatch.files import IMAGE_BYTES, TooLong, read_plain
from bigbatch.trainer.input.base import Request
from bigbatch.trainer.input.image_files import (
    IMAGE_SUFFIXES,
    RENAME_CLASS,
    list_below,
    list_split,
    require_one_spelling,
    spelling_variants,
)


@dataclass(frozen=True)
class ImageIndex:
    """Lists the images of one split in class folders, sorted by class and then by file name: an ImageSource."""

    root: str
    """Folder of the split; paths are relative to it."""
    classes: tuple[str, ...]
    paths: Sequence[str]
    labels_N: np.ndarray
    """Position of each image's class in classes, int64."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Kind -> number of files that look like images, but are not read."""

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, position: int) -> str:
        """Return the path of the image at position."""
        return f"{self.root}/{self.paths[position]}"

    def read(self, position: int) -> bytes:
        """Return the image's bytes. Raises: StorageError naming the path."""
        return read_file(self.name(position))

    def sizes(self, positions_B: np.ndarray) -> None:
        return None

    def close(self) -> None:
        """Do nothing: nothing stays open between reads."""


def read_file(path: str) -> bytes:
    """Return the bytes of an image. Raises: StorageError naming path; DataError for one above its limit."""
    try:
        return read_plain(path, most=IMAGE_BYTES)
    except OSError as error:
        kind = DataError if isinstance(error, TooLong) else StorageError
        raise kind(f"{path}: {read_problem(error)}") from error


def read_problem(error: OSError, *, file: str = "it") -> str:
    """Return why reading failed, and what to do."""
    if isinstance(error, TooLong):
        return f"is no image: {error}"
    if error.errno == errno.EMFILE:
        return "too many open files; raise the limit, for example by `ulimit -n 65536`"
    return f"cannot be read ({error.strerror or error}); was {file} moved since the start?"


def read_index(root: Path, split: str, *, classes: Sequence[str] | None = None) -> ImageIndex:
    """List root/split/<class>/<image>. classes: those of the training split, which this split must have.

    Raises: DataError for a missing or unreadable folder, an empty class, or classes that differ.
    """
    folder = Path(root) / split
    if not folder.is_dir():
        makes = f"generate {root}" if str(root) == "data/shapes" else "prepare"  # the quick start's, or a known one
        expected = f"expected {split}/<class>/<image>, or *{split}*.tar, below {root} (bigbatch data {makes})"
        raise DataError(f"{folder}: no such folder; {expected} or another --data.root")
    top = list_split(folder)
    found = top.folders
    if not found:
        raise DataError(f"{folder}: holds no class folders; expected {split}/<class>/<image>")
    require_one_spelling(folder, found)
    if classes is not None and list(classes) != list(found):
        require_same_classes(folder, found=found, expected=classes)
    paths: list[str] = []
    counts = []
    left_out = Counter({kind: len(files) for kind, files in top.left_out().items()})
    for name in found:
        below = list_below(folder / name)
        if below.unlisted:
            raise DataError(below.unlisted[0])
        left_out.update({kind: len(files) for kind, files in below.left_out().items()})
        if not below.images:
            unread = below.unread
            but = f", but {len(unread):,} files such as {unread[0]}, which no loader reads" if unread else ""
            raise DataError(f"{folder / name}: holds no {', '.join(IMAGE_SUFFIXES)}{but}; fill or remove the folder")
        paths.extend(f"{name}/{image}" for image in below.images)
        counts.append(len(below.images))
    labels_N = np.repeat(np.arange(len(found), dtype=np.int64), counts)
    return ImageIndex(str(folder), classes=tuple(found), paths=paths, labels_N=labels_N, left_out=left_out)


def describe_left_out(root: Path | str, *indices: object) -> str | None:
    """Return the line that counts the files which look like images and are not read, or None if there are none."""
    total: Counter[str] = Counter()
    for index in indices:
        total.update(getattr(index, "left_out", {}))
    if not total:
        return None
    num, kinds = total.total(), ", ".join(f"{count:,} {kind}" for kind, count in total.most_common())
    files = f"{num:,} file{'s are' if num > 1 else ' is'} left out"
    return printable(f"{files}: {kinds}; `bigbatch data check {shlex.quote(str(root))}` names them")


def require_same_classes(folder: Path | str, *, found: Sequence[str], expected: Sequence[str]) -> None:
    """Raise DataError unless both have the same names in the same order, since labels are positions."""
    problems = [
        f"{kind} {len(names)} class(es): {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for kind, names in (
            ("lacks", sorted(set(expected) - set(found))),
            ("has in excess", sorted(set(found) - set(expected))),
        )
        if names
    ]
    if problems:
        if twice := spelling_variants({*found, *expected}):
            raise DataError(f"{folder}: {'; '.join(problems)}; {twice[0]} are spellings of one class: {RENAME_CLASS}")
        raise DataError(f"{folder}: {'; '.join(problems)}; give it the same classes as the training split")
    for label, (name, other) in enumerate(zip(found, expected, strict=True)):
        if name != other:
            raise DataError(
                f"{folder}: has its classes in another order than the training split (label {label} is {name} here, "
                f"and {other} there): write both splits in one form"
            )


def epoch_order(epoch: int, *, seed: int, num_samples: int) -> np.ndarray:
    """Return the order of an epoch: a permutation of num_samples positions (int64), from (seed, epoch) alone.

    Sorts raw Philox words instead of calling Generator.permutation: numpy promises that a bit generator's
    stream never changes (NEP 19), but not that a shuffle's does, and a resumed run may meet a newer numpy.
    """
    words_N = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(num_samples)
    return np.argsort(words_N, kind="stable").astype(np.int64, copy=False)


def train_requests(
    *,
    seed: int,
    num_samples: int,
    global_batch_size: int,
    microbatch_size: int,
    microbatches: Sequence[int],
    start_step: int,
    end_step: int,
    extra: Callable[[int], Sequence[int]] | None = None,
    order: Callable[[int], np.ndarray] | None = None,
) -> Iterator[Request]:
    """Yield this rank's microbatches of the steps start_step..end_step-1, counted from the start of training.

    Each epoch has num_samples // global_batch_size steps, and drops the rest of its order, which is the same for all
    world sizes. microbatches: this rank's, by their index in the global batch; extra: step -> further ones after these.
    order: epoch -> its indices; None: epoch_order. Raises: ValueError, at the first draw, if an epoch has no step.
    """
    if num_samples < global_batch_size:
        raise ValueError(f"num_samples {num_samples} is less than global_batch_size {global_batch_size}")
    steps_per_epoch = num_samples // global_batch_size
    order = lru_cache(maxsize=1)(order or partial(epoch_order, seed=seed, num_samples=num_samples))
    for step in range(start_step, end_step):
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        for microbatch in (*microbatches, *(extra(step) if extra else ())):
            first = step_in_epoch * global_batch_size + microbatch * microbatch_size
            indices_B = order(epoch)[first : first + microbatch_size]
            yield Request(epoch=epoch, indices_B=indices_B, valid_B=np.ones(microbatch_size, bool))


def eval_requests(*, num_samples: int, microbatch_size: int, rank: int, world_size: int) -> Iterator[Request]:
    """Yield this rank's microbatches of one pass in which every image is valid exactly once over all ranks.

    All ranks get the same number of full microbatches, because a collective may follow each. Places beyond the end of
    the split repeat its last image, with valid_B False.
    """
    stride = microbatch_size * world_size
    # the rank's offset shifts start and end, so that all ranks have the same number of iterations
    for start in range(rank * microbatch_size, num_samples + rank * microbatch_size, stride):
        positions_B = np.arange(start, start + microbatch_size, dtype=np.int64)
        valid_B = positions_B < num_samples
        yield Request(epoch=0, indices_B=np.minimum(positions_B, num_samples - 1), valid_B=valid_B)
