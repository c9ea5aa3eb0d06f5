"""Are packed shards what was packed? Every byte is read again, and every entry compared with the tar member."""

import hashlib
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError
from bigbatch.trainer.datasets.archives import BoundedTarInfo, read_headers
from bigbatch.trainer.datasets.processes import in_parallel
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.shards import AGAIN, ENTRIES, is_packed, key_number, read_packed

CHUNK_BYTES = 1 << 20
_FIELDS = "(offset, length, height, width, label)"


@dataclass(frozen=True)
class _Stated:
    """Describes a shard as its index does."""

    path: Path
    sha256: str
    positions_M: np.ndarray
    """Of its pictures, in the split."""
    entries_M: np.ndarray


def verify(root: Path, *, num_workers: int = 1, on_progress: Callable[[int, int], None] | None = None) -> int:
    """Read all shards of all packed splits of root again; return how many pictures there are.

    on_progress gets (shards done, shards in all). Raises: DataError naming what is missing, cut, edited or
    wrong; ConfigError for an impossible setting.
    """
    folders = sorted(folder for folder in root.glob("*") if folder.is_dir() and is_packed(folder))
    if not folders:
        raise DataError(f"{root}: holds no packed split; name the DST of `bigbatch data pack`")
    shards = [shard for folder in folders for shard in _stated_shards(folder)]
    for num_done, _ in enumerate(in_parallel(_verify_shard, shards, num_workers=num_workers), 1):
        if on_progress:
            on_progress(num_done, len(shards))
    return sum(len(shard.positions_M) for shard in shards)


def _stated_shards(folder: Path) -> list[_Stated]:
    """Return the shards that index.json states. Raises: DataError, as opening the split for training does."""
    index, stated = read_packed(folder), []
    for number, shard in enumerate(index.facts.shards):
        positions_M = np.flatnonzero(index.entries_N["shard"] == number)
        stated.append(_Stated(folder / shard.name, shard.sha256, positions_M, index.entries_N[positions_M]))
    return stated


def _verify_shard(stated: _Stated) -> None:
    path, num_images = stated.path, len(stated.positions_M)
    try:
        if sha256_of(path) != stated.sha256:
            raise DataError(f"{path}: its bytes are not those that were packed; delete it and {AGAIN}")
        with tarfile.open(path, "r:", tarinfo=BoundedTarInfo) as tar:
            members = list(read_headers(tar))
            if len(members) != 2 * num_images:
                raise DataError(f"{path}: {_problem(f'{len(members) // 2} pictures', str(num_images))}")
            # each picture is followed by its label
            pairs = zip(members[::2], members[1::2], strict=True)
            for position, entry, pair in zip(stated.positions_M, stated.entries_M, pairs, strict=True):
                _verify_image(tar, entry, position=int(position), members=pair)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and {AGAIN}") from error


def _verify_image(
    tar: tarfile.TarFile, entry: np.void, *, position: int, members: tuple[tarfile.TarInfo, tarfile.TarInfo]
) -> None:
    """Check one picture. Raises: DataError unless the entry of position is true of these members."""
    image, _ = members
    name = f"{tar.name!s}: {image.name}"
    data, label = (tar.extractfile(member).read() for member in members)  # type: ignore[union-attr]
    size = encoded_size(data, path=name, max_pixels=int(entry["height"]) * int(entry["width"]))
    found = (image.offset_data, image.size, *size, label.decode())
    *numbers, stated_label = (int(entry[key]) for key in ("offset", "length", "height", "width", "label"))
    stated = (*numbers, str(stated_label))
    if not image.name.startswith(f"{key_number(position)}-"):
        raise DataError(f"{name}: {_problem('it here', f'picture {position}')}")
    if found != stated:
        raise DataError(f"{name}: {_problem(f'{found} as {_FIELDS}', str(stated))}")


def _problem(found: str, stated: str) -> str:
    return f"the shard holds {found}, {ENTRIES} states {stated}; delete the shard and {AGAIN}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises: OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
