"""Are packed shards what was packed? Every byte is read again, and every entry compared with the tar member."""

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bigbatch.trainer.data.encoded import picture_size
from bigbatch.trainer.data.processes import in_parallel
from bigbatch.trainer.data.shards import AGAIN, ENTRIES, Shard, is_packed, key_number, read_entries, read_packed
from bigbatch.trainer.errors import ConfigError, DataError

CHUNK_BYTES = 1 << 20
_FIELDS = "(offset, length, height, width, label)"


def verify(root: Path, *, num_workers: int = 1, on_progress: Callable[[int, int], None] | None = None) -> int:
    """Re-read all shards of all packed splits of root; how many pictures there are.

    on_progress gets (shards done, shards in all). Raises: DataError naming what is missing, cut, edited or
    wrong; ConfigError for an impossible setting.
    """
    if num_workers < 1:
        raise ConfigError(f"num_workers={num_workers} is not possible; give 1 or more")
    folders = sorted(folder for folder in root.glob("*") if folder.is_dir() and is_packed(folder))
    if not folders:
        raise DataError(f"{root}: holds no packed split; name the DST of `bigbatch data pack`")
    num_pictures, tasks = 0, []
    for folder in folders:
        num_pictures += len(read_packed(folder))
        facts, _ = read_entries(folder)
        tasks += [(folder, number, shard) for number, shard in enumerate(facts.shards)]
    for num_done, _ in enumerate(in_parallel(_verify_shard, tasks, num_workers=num_workers), 1):
        if on_progress:
            on_progress(num_done, len(tasks))
    return num_pictures


def _verify_shard(task: tuple[Path, int, Shard]) -> None:
    folder, number, shard = task
    path = folder / shard.name
    try:
        if sha256_of(path) != shard.sha256:
            raise DataError(f"{path}: its bytes are not those that were packed; delete it and {AGAIN}")
        _, entries_N = read_entries(folder)
        positions = np.flatnonzero(entries_N["shard"] == number).tolist()
        with tarfile.open(path, "r:") as tar:
            members = tar.getmembers()
            if len(members) != 2 * len(positions):
                raise DataError(f"{path}: {_problem(f'{len(members) // 2} pictures', f'{len(positions)}')}")
            for position, picture, label in zip(positions, members[::2], members[1::2], strict=True):
                _verify_picture(tar, entries_N[position], position=position, members=(picture, label))
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and {AGAIN}") from error


def _verify_picture(
    tar: tarfile.TarFile, entry: np.void, *, position: int, members: tuple[tarfile.TarInfo, tarfile.TarInfo]
) -> None:
    """Raises: DataError unless the entry of position is true of these members."""
    picture, _ = members
    name = f"{tar.name!s}: {picture.name}"
    data, label = (tar.extractfile(member).read() for member in members)  # type: ignore[union-attr]
    found = (picture.offset_data, picture.size, *picture_size(data, path=name), label.decode())
    *numbers, stated_label = (int(entry[key]) for key in ("offset", "length", "height", "width", "label"))
    stated = (*numbers, str(stated_label))
    if not picture.name.startswith(f"{key_number(position)}-"):
        raise DataError(f"{name}: {_problem('it here', f'picture {position}')}")
    if found != stated:
        raise DataError(f"{name}: {_problem(f'{found} as {_FIELDS}', str(stated))}")


def _problem(found: str, stated: str) -> str:
    return f"the shard holds {found}, {ENTRIES} states {stated}; delete {ENTRIES} and {AGAIN}"


def sha256_of(path: Path) -> str:
    """Raises: OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
