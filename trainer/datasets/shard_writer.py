"""One tar shard from its pictures: the same plan and the same pictures give the same bytes, whole or not at all."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from bigbatch.errors import ConfigError, DataError
from bigbatch.files import replacing
from bigbatch.trainer.input.formats import MAX_PIXELS, PNG_START, encoded_size, is_webp, open_image
from bigbatch.trainer.input.order import read_file
from bigbatch.trainer.input.shards import BLOCK_BYTES, Shard, key_number, shard_name

UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class PackRecipe:
    """Decides the bytes of the shards, beside the pictures."""

    shard_bytes: int = 512_000_000
    """Most bytes of a shard, counted as the pictures come; a larger picture gets a shard of its own."""
    max_side: int | None = None
    """A picture whose shorter side exceeds it is shrunk to it; None leaves all as they are."""
    quality: int = 90
    """Of the JPEGs that shrunk pictures become."""
    max_pixels: int = MAX_PIXELS
    """A picture that states more is refused; it decides no bytes."""

    def __post_init__(self) -> None:
        legal = {
            "shard_bytes": (self.shard_bytes >= 1, "1 or more"),
            "max_side": (self.max_side is None or self.max_side >= 1, "1 or more pixels"),
            "quality": (1 <= self.quality <= 100, "1 to 100"),
        }
        for key, (is_legal, hint) in legal.items():
            if not is_legal:
                raise ConfigError(f"{key}={getattr(self, key)} is not possible; give {hint}")

    def made(self) -> dict[str, int | None]:
        """Return it as index.json states it; the quality only where something can be shrunk."""
        quality = None if self.max_side is None else self.quality
        return {"shard_bytes": self.shard_bytes, "max_side": self.max_side, "quality": quality}


def record_name(number: int) -> str:
    """Return the name of the Record beside an unfinished split's shard."""
    return f".shard-{number:06d}.json"


@dataclass(frozen=True)
class ShardPlan:
    """Names the pictures of one shard: positions first, first + 1, ... of the split."""

    number: int
    first: int
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    @property
    def name(self) -> str:
        return shard_name(self.number)


@dataclass(frozen=True)
class ShardRecord:
    """Describes a finished shard, with (offset, length, height, width) of each of its pictures."""

    shard: Shard
    rows: list[list[int]]


def tar_member(name: str, data: bytes) -> tuple[bytes, bytes]:
    """Return a header, and data padded to whole blocks; no time, no owner: name and data decide the bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return header, data.ljust(padded(len(data)), b"\0")


def padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def shrink(data: bytes, *, path: str, max_side: int | None, quality: int, max_pixels: int = MAX_PIXELS) -> bytes:
    """Return data itself, or the picture as a JPEG with its shorter side at max_side; decodes it in either case.

    Antialiased (Lanczos), aspect kept, in grey or RGB. EXIF goes, and with it the orientation: the loaders
    ignore it, so what is stored stays as it was. Raises: DataError naming path.
    """
    image = open_image(data, path=path, max_pixels=max_pixels)
    short = min(image.size)
    if max_side is None or short <= max_side:
        return data
    image = image if image.mode == "L" else image.convert("RGB")
    width, height = (round(side * max_side / short) for side in image.size)
    buffer = io.BytesIO()
    try:
        image.resize((width, height), Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=quality)
    except (OSError, ValueError) as error:  # no side of a JPEG exceeds 65,500 pixels
        reason = f"shrunk to {width} x {height} it cannot be saved as JPEG ({error})"
        raise DataError(f"{path}: {reason}; remove it, or give another --max-side") from error
    return buffer.getvalue()


def write_shard(folder: Path, recipe: PackRecipe, plan: ShardPlan) -> ShardRecord:
    """Write one tar file and its record, each whole or not at all. Raises: DataError."""
    digest, rows, num_bytes = hashlib.sha256(), [], 0
    with new_shard_file(folder / plan.name) as file:
        for header, block, size in _members(recipe, plan):
            if size is not None:
                # the offset of the picture itself, behind its header: readers seek there
                rows.append([num_bytes + len(header), *size])
            for part in (header, block):
                file.write(part)
                digest.update(part)
                num_bytes += len(part)
    record = ShardRecord(Shard(plan.name, num_bytes, digest.hexdigest()), rows)
    # after the shard, which counts as finished once it has a record
    with new_shard_file(folder / record_name(plan.number)) as file:
        file.write(json.dumps(asdict(record)).encode())
    return record


def _members(recipe: PackRecipe, plan: ShardPlan) -> Iterator[tuple[bytes, bytes, tuple[int, int, int] | None]]:
    """Yield (header, padded data, (length, height, width) of a picture or None) of all that the tar file holds."""
    for position, (path, label) in enumerate(zip(plan.paths, plan.labels, strict=True), plan.first):
        data = shrink(
            read_file(path),
            path=path,
            max_side=recipe.max_side,
            quality=recipe.quality,
            max_pixels=recipe.max_pixels,
        )
        # readers end the key at the first dot; the number makes it unique, whatever the folder held
        key = f"{key_number(position)}-{Path(path).stem.replace('.', '_')}"
        suffix = "png" if data.startswith(PNG_START) else "webp" if is_webp(data) else "jpg"
        size = encoded_size(data, path=path, max_pixels=recipe.max_pixels)
        yield *tar_member(f"{key}.{suffix}", data), (len(data), *size)
        yield *tar_member(f"{key}.cls", str(label).encode()), None
    yield b"", bytes(2 * BLOCK_BYTES), None  # the end mark


@contextmanager
def new_shard_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that stands under path when it is whole and on disk. Raises: DataError with the path."""
    try:
        with replacing(path, suffix=UNFINISHED, sync=True) as file:
            yield file
    except OSError as error:
        # each pack sweeps up what it takes for the rest of one that was killed
        is_swept = isinstance(error, FileNotFoundError)
        todo = "is another pack writing here? let one end" if is_swept else "make room"
        advice = f"{todo}, then run the same command again: finished shards are kept"
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error


def sweep_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left in folder."""
    for left in folder.glob(f".*{UNFINISHED}"):
        left.unlink(missing_ok=True)
