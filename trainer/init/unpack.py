"""WebDataset's shards become class folders, which the loaders read and `bigbatch data pack` packs with an index."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from bigbatch.errors import DataError, shortened
from bigbatch.trainer.datasets.archives import read_members
from bigbatch.trainer.datasets.check import ImageFinding
from bigbatch.trainer.datasets.prepare import StoredImage, write_images
from bigbatch.trainer.input.image_files import IMAGE_SUFFIXES, is_hidden
from bigbatch.trainer.input.listed import SPLITS
from bigbatch.trainer.input.shards import is_packed

LABEL = ".cls"
NUM_THREADS = 4
"""Writers: what takes time on a cluster's file system is waiting for it."""


def find_shards(folder: Path) -> list[Path]:
    """Return the tar files of folder and of its train/ and val/, in order, but for those that are packed."""
    folders = (folder / each for each in (".", *SPLITS))
    return sorted(path for each in folders if not is_packed(each) for path in each.glob("[!.]*.tar") if path.is_file())


def unpack(
    shards: Sequence[Path], target: Path, *, on_progress: Callable[[int, int], None], leave_out: bool
) -> list[ImageFinding]:
    """Write target/<label>/<image>, below train/ and val/ where all shards or their folders are called so.

    target appears when it is whole. on_progress gets the bytes of shards. Samples that lack an image or a label are
    found. Raises: DataError for a shard that is damaged, unsafe, or of neither split beside some that are, and a target
    that exists.
    """
    require_new(target)
    splits = [next((s for s in SPLITS if path.name.startswith(s) or path.parent.name == s), None) for path in shards]
    if None in splits and any(splits):  # it may be a test set, which is not to be trained on
        raise DataError(
            f"{shards[splits.index(None)]}: is called neither {' nor '.join(SPLITS)}, as other shards are: name it so, "
            "or move it elsewhere"
        )
    is_split = {*splits} == {*SPLITS}
    lacking: list[str] = []
    parts = (
        (shard, f"{split}/" if is_split else "", _samples(shard, number=number, lacking=lacking))
        for number, (shard, split) in enumerate(zip(shards, splits, strict=True))
    )
    images = ", ".join(IMAGE_SUFFIXES)
    none = f"{shards[0]}: no shard holds an image ({images}) with a {LABEL} beside it"
    write_parts(target, parts, files=shards, on_progress=on_progress, none=none, lacking=lacking)
    kind = f"sample without one image and one {LABEL}"
    return [lacking_finding(kind, shards[0].parent, target, lacking, leave_out=leave_out)]


Part = tuple[Path, str, Iterator[StoredImage]]
"""A file, the folder of its split with a slash, or nothing, and its images by their paths below that."""


def write_parts(
    target: Path,
    parts: Iterable[Part],
    *,
    files: Sequence[Path],
    on_progress: Callable[[int, int], None],
    none: str,
    lacking: Sequence[str],
) -> None:
    """Write the images below target, which appears when it is whole. on_progress gets bytes of all files.

    Raises: DataError, in the words none and with the first of lacking, as parts fill it, where there is no image.
    """
    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in files}
    done, total = 0, sum(sizes.values())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent, ignore_cleanup_errors=True) as own:
            hidden = Path(own, "pictures")  # own is its owner's alone, target takes the umask
            for path, prefix, images in parts:
                below = ((f"{prefix}{name}", data) for name, data in images)
                for _ in write_images(hidden, below, num_threads=NUM_THREADS):
                    pass
                done += sizes[path]
                on_progress(done, total)
            if not hidden.is_dir():
                raise DataError("; ".join((none, *lacking[:1])))
            os.replace(hidden, target)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror}); name another folder") from error


def lacking_finding(kind: str, where: Path, target: Path, lacking: Sequence[str], *, leave_out: bool) -> ImageFinding:
    """Return the samples that were not unpacked."""
    meaning = "left out" if leave_out else f"left out of {target}: to go on with that, bigbatch init {target}"
    return ImageFinding(kind, str(where), tuple(lacking), is_problem=not leave_out, meaning=meaning)


def require_new(target: Path) -> None:
    """Raise DataError if target exists."""
    if os.path.lexists(target):
        raise DataError(f"{target}: exists; to go on with what lies there: bigbatch init {target}")


def _samples(shard: Path, *, number: int, lacking: list[str]) -> Iterator[StoredImage]:
    """Yield the images of a shard: neighbours with equal names up to the first dot are one sample."""
    seen: Counter[str] = Counter()
    key, sample = "", dict[str, bytes]()

    def finish() -> Iterator[StoredImage]:
        images = [suffix for suffix in sample if suffix in IMAGE_SUFFIXES]
        label = sample.get(LABEL, b"").decode(errors="replace").strip()
        if len(images) != 1 or not is_folder_name(label):
            lacking.append(f"{shard.name}: {key}: {', '.join(sample)}, label {shortened(label)}")
            return
        seen[label] += 1
        name = PurePosixPath(key).name[:50]
        yield f"{label}/{number:06d}-{seen[label]:06d}-{name}{images[0]}", sample[images[0]]

    for member in read_members(shard):
        if is_hidden(member.path.name):  # between those of a sample it would part them
            continue
        stem, dot, suffix = member.path.name.partition(".")
        this = str(member.path.with_name(stem)) if stem else str(member.path)
        if this != key and sample:
            yield from finish()
            sample.clear()
        key = this
        wanted = f"{dot}{suffix}".lower()
        sample[wanted] = member.read() if wanted in (LABEL, *IMAGE_SUFFIXES) else b""
    if sample:
        yield from finish()


def is_folder_name(label: str) -> bool:
    """Return whether a label can name a folder that lies below another, on any file system."""
    return label.isprintable() and "/" not in label and not label.startswith(".") and 0 < len(label.encode()) < 200
