"""A packed data set near the GPU: copied to a node's own disk or memory, with every byte checked on its way.

One process of a node copies; those that come meanwhile wait for it. A split is whole when its index.json is there,
which comes last.
"""

import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bigbatch.boot import boot_id
from bigbatch.errors import ConfigError, DataError
from bigbatch.files import replacing, write_whole
from bigbatch.locks import open_lock, share_lock, try_lock, wait_lock
from bigbatch.trainer.datasets.pack import UNFINISHED, sweep_unfinished
from bigbatch.trainer.datasets.verify_shards import sha256_of
from bigbatch.trainer.input.shards import (
    AGAIN,
    ENTRIES,
    FACTS,
    SETTINGS,
    Shard,
    SplitIndex,
    is_packed,
    parse_facts,
    read_packed,
)
from bigbatch.trainer.machine.cgroup import lies_in_memory, memory_left

SPLITS = ("train", "val")
MADE = re.compile(rf"shard-\d{{6}}\.tar|{ENTRIES}|\.staged|\..*{UNFINISHED}")
"""Names of what stage writes into a split, beside index.json."""
CHUNK_BYTES = 8 << 20
PRIVATE, OTHERS_WRITE = 0o700, stat.S_IWGRP | stat.S_IWOTH
LOCK, USERS, NOTE = ".stage.lock", ".stage.users", ".staged"
_ANOTHER = "delete its folder to stage anew, or name another DST"


@dataclass(frozen=True)
class StageSummary:
    """Says what a call of stage found and did."""

    num_images: int
    num_shards: int
    bytes_copied: int
    bytes_kept: int
    """Of an earlier call, whose SHA-256 was compared again; 0 where a look at the sizes was enough."""
    seconds: float
    """Without the wait for another process."""

    @property
    def gb_per_s(self) -> float:
        """Return the rate of checking, 1e9 bytes per second, whether copied or kept."""
        return (self.bytes_copied + self.bytes_kept) / 1e9 / self.seconds

    def __str__(self) -> str:
        head, speed = f"{self.num_images} pictures in {self.num_shards} shards", f"{self.gb_per_s:.3g} GB/s"
        if self.bytes_copied:
            earlier = f" ({self.bytes_kept / 1e9:.4g} GB by an earlier call)" if self.bytes_kept else ""
            return f"{head}, {self.bytes_copied / 1e9:.4g} GB copied{earlier} in {self.seconds:.1f} s, {speed}"
        checked = f", {self.bytes_kept / 1e9:.4g} GB checked again in {self.seconds:.1f} s, {speed}"
        return f"{head}, complete already{checked if self.bytes_kept else ''}"


@dataclass(frozen=True)
class _Split:
    source: Path
    target: Path
    index: bytes
    """Of the source's index.json."""
    facts: SplitIndex
    files: tuple[Shard, ...]
    """All that comes before index.json: the shards and index.npy."""


def stage(
    source: Path,
    target: Path,
    *,
    splits: Sequence[str] = SPLITS,
    num_workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> StageSummary:
    """Copy those of splits that the packed data set source has to target, or finish what an earlier call left.

    num_workers threads copy. on_progress gets (bytes done, bytes in all); on_wait is called where another process
    stages into target, before the wait for its end. Raises: ConfigError for an impossible num_workers; DataError
    for a source that is not packed, cut, edited or gone, and for a target that is another user's, holds something
    else, is too small or cannot be written.
    """
    if num_workers < 1:
        raise ConfigError(f"num_workers={num_workers} is not possible; give 1 or more")
    plans = _plan(source, target, splits=splits)
    # the lock first, then the look: another process may have made it complete meanwhile
    with _only_process(target, on_wait):
        start = time.monotonic()
        is_private = _make_private(target)
        todo = [split for split in plans if not (is_private and _is_complete(split))]
        for split in todo:
            _make_way(split)
        _require_room(target, todo)
        progress = _Progress(sum(file.num_bytes for split in todo for file in split.files), on_progress)
        for split in todo:
            _fetch_all(split, num_workers=num_workers, on_file=progress.add)
            _finish(split)
        return StageSummary(
            num_images=sum(split.facts.num_images for split in plans),
            num_shards=sum(len(split.facts.shards) for split in plans),
            bytes_copied=progress.bytes_copied,
            bytes_kept=progress.bytes_kept,
            seconds=time.monotonic() - start,
        )


@contextmanager
def using_copy(target: Path, *, keep: bool) -> Iterator[None]:
    """Be one of those who use what is, or is to be, staged in target; without keep the last of them removes it.

    What cannot be locked is left to stage to tell of. What else lies there stays, and so do two empty files.
    """
    users = None
    with suppress(OSError):
        target.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        users = open_lock(target / USERS)
        share_lock(users)
    try:
        yield
    finally:
        if users is not None:
            with users, suppress(OSError):
                if not keep:
                    _remove(target, users)


def _remove(target: Path, users: IO[bytes]) -> None:
    """Remove what stage makes, where nobody else stages or uses it. Raises: OSError."""
    with open_lock(target / LOCK) as lock:
        if not (try_lock(lock) and try_lock(users)):
            return
        for split in (target / name for name in SPLITS):
            if split.is_symlink() or not split.is_dir():
                continue
            # index.json first: what is left of a split never looks whole
            made = [split / FACTS, *(path for path in split.iterdir() if MADE.fullmatch(path.name))]
            for path in made:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # something else lies there
                split.rmdir()


class _Progress:
    """Counts bytes, in the thread that called stage."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total, self._on_progress = total, on_progress
        self.bytes_copied = self.bytes_kept = 0
        if on_progress and total:
            on_progress(0, total)

    def add(self, file: Shard, is_copied: bool) -> None:
        self.bytes_copied += file.num_bytes * is_copied
        self.bytes_kept += file.num_bytes * (not is_copied)
        if self._on_progress:
            self._on_progress(self.bytes_copied + self.bytes_kept, self._total)


def _plan(source: Path, target: Path, *, splits: Sequence[str]) -> list[_Split]:
    """Read index.json of each split, and no more: where all is staged already, a thousand nodes ask for it at once."""
    found = [split for split in splits if (source / split).is_dir()]
    if not found:
        raise DataError(f"{source}: holds none of {', '.join(splits)}; name the DST of `bigbatch data pack`")
    return [_plan_split(source / split, target / split) for split in found]


def _plan_split(source: Path, target: Path) -> _Split:
    if not is_packed(source):
        raise DataError(f"{source}: is not packed; run `bigbatch data pack SRC DST` first, then stage its DST")
    path = source / FACTS
    try:
        if target.exists() and target.samefile(source):
            raise DataError(f"{target}: is the folder to copy from; name another DST")
        index = path.read_bytes()
        facts = parse_facts(index.decode("utf-8", "replace"), path=path)
        entries = Shard(ENTRIES, (source / ENTRIES).stat().st_size, facts.entries_sha256)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); {AGAIN}") from error
    return _Split(source, target, index, facts, (*facts.shards, entries))


@contextmanager
def _only_process(target: Path, on_wait: Callable[[], None] | None) -> Iterator[None]:
    """Be the only process of this node in target; the kernel frees the lock however its process ends.

    The wait has no bound of its own: whoever holds the lock shows its progress, and fails where its source does.
    """
    try:
        target.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        lock = open_lock(target / LOCK)
    except OSError as error:
        raise _write_error(target, error) from error
    with lock:
        try:
            if not try_lock(lock):
                if on_wait:
                    on_wait()
                wait_lock(lock)
        except OSError as error:
            advice = "name a folder on a disk, or in the memory, of this node"
            raise DataError(f"{target}: cannot be locked ({error.strerror}); {advice}") from error
        yield


def _make_private(target: Path) -> bool:
    """Let no other user write there any more; tell whether none could. Raises: DataError where it is another user's.

    Sizes and a public note are believed of a folder of ours alone: whoever else could write may have planted them.
    """
    try:
        facts = target.stat()
        if facts.st_uid != os.geteuid():
            raise DataError(f"{target}: belongs to another user, who could change the pictures; name another DST")
        if not facts.st_mode & OTHERS_WRITE:
            return True
        target.chmod(PRIVATE)
    except OSError as error:
        raise _write_error(target, error) from error
    return False


def _is_complete(split: _Split) -> bool:
    """Tell whether a split was staged from this source since the machine started, all sizes being right."""
    try:
        is_ours = (split.target / FACTS).read_bytes() == split.index
        if not is_ours or (split.target / NOTE).read_bytes() != _boot():
            return False
        read_packed(split.target)
    except (OSError, DataError):  # what is missing or broken is made anew
        return False
    return True


def _boot() -> bytes | None:
    """Tell which start of the machine this is; None where the system does not tell.

    Files are not synced, which would make a node wait for its disk: what a power cut takes is copied once more. But
    it may also leave a file with its full size and without its content, so sizes are only believed within one start.
    """
    return boot_id().encode() or None


def _make_way(split: _Split) -> None:
    """Refuse a foreign target, and sweep up what is cut there."""
    read_packed(split.source)  # a shard that is gone or cut is seen now, not after an hour
    try:
        split.target.mkdir(exist_ok=True)
        _refuse_another(split)
        sweep_unfinished(split.target)
        for file in split.files:
            path = split.target / file.name
            if path.exists() and path.stat().st_size != file.num_bytes:
                path.unlink()
    except OSError as error:
        raise _write_error(split.target, error) from error


def _refuse_another(split: _Split) -> None:
    """Raise DataError for another index, complete as it may be, and for any file that is none of the source's."""
    index = split.target / FACTS
    ours = {NOTE, *(file.name for file in split.files)}
    if index.exists():
        if index.read_bytes() != split.index:
            raise DataError(f"{index}: is not that of {split.source}; {_ANOTHER}")
        ours |= {FACTS, SETTINGS}  # a copy by other means brings pack.json
    foreign = sorted(p.name for p in split.target.iterdir() if p.name not in ours and p.suffix != UNFINISHED)
    if foreign:
        raise DataError(f"{split.target}: holds {foreign[0]}, which does not come from {split.source}; {_ANOTHER}")


def _require_room(target: Path, splits: Sequence[_Split]) -> None:
    missing = [f.num_bytes for split in splits for f in split.files if not (split.target / f.name).exists()]
    free, advice = shutil.disk_usage(target).free, "make room, or name another DST"
    left = memory_left() if lies_in_memory(target) else None
    if left is not None and left < free:
        # more would end the job, and not the copy
        free, advice = left, "its files count as memory of this job: ask for more, or name a DST on a disk"
    if sum(missing) > free:
        numbers = f"{sum(missing) / 1e9:.4g} GB are to be copied, {free / 1e9:.4g} GB are free"
        raise DataError(f"{target}: {numbers}; {advice}")


def _fetch_all(split: _Split, *, num_workers: int, on_file: Callable[[Shard, bool], None]) -> None:
    """Fetch all files; on_file gets each, and if it was copied. An error or a Ctrl-C drops copies under way."""
    stop = threading.Event()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="bigbatch-stage") as threads:
        futures = {threads.submit(_fetch, split, file, stop=stop): file for file in split.files}
        try:
            for future in as_completed(futures):
                on_file(futures[future], future.result())
        finally:
            # copies under way look at it between chunks; those that wait are cancelled
            stop.set()
            threads.shutdown(cancel_futures=True)


def _fetch(split: _Split, file: Shard, *, stop: threading.Event) -> bool:
    """Fetch a file; False for one that an earlier call left and that is what it should be. Raises: DataError.

    It is read again: from a local disk that costs little, next to the network, and trusts no record of a crash.
    """
    path = split.target / file.name
    try:
        if path.exists():
            if sha256_of(path) == file.sha256:
                return False
            path.unlink()  # at once: where index.json is there already, the split must not look whole
        _copy(split.source / file.name, path, sha256=file.sha256, stop=stop)
    except OSError as error:
        raise _write_error(path, error) from error
    return True


def _copy(source: Path, target: Path, *, sha256: str, stop: threading.Event) -> None:
    """Copy a file whole, with that SHA-256, or not at all. Raises: DataError; OSError from the target."""
    digest = hashlib.sha256()
    with replacing(target, mark=UNFINISHED) as file:
        for chunk in _chunks(source):
            if stop.is_set():
                raise CancelledError
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != sha256:
            raise DataError(f"{source}: its bytes are not those that were packed; delete it and {AGAIN}")


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); bring it back and stage again") from error


def _finish(split: _Split) -> None:
    """Write index.json, with which the split is whole; the note spares the next call to read it."""
    for name, data in ((FACTS, split.index), (NOTE, _boot() or b"")):
        path = split.target / name
        try:
            write_whole(path, data, mark=UNFINISHED)
        except OSError as error:
            raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> DataError:
    advice = "mend that and run the same command again: what is copied is kept"
    return DataError(f"{path}: cannot be written ({error.strerror or error}); {advice}")
