"""Stage a packed data set: copy it to a node's own disk or memory, and verify every byte.

One process of a node copies, while others wait for it. A split is whole once it has its index.json, which is written
last.
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

from bigbatch.errors import DataError
from bigbatch.files import read_plain, replacing, sha256_of, write_whole
from bigbatch.locks import open_lock, share_lock, try_lock, wait_lock
from bigbatch.trainer.datasets.pack import UNFINISHED, sweep_unfinished
from bigbatch.trainer.datasets.processes import Advance, require_workers, show_nothing
from bigbatch.trainer.input.listed import SPLITS
from bigbatch.trainer.input.shard_files import INDEX, SETTINGS, STAGED, is_packed
from bigbatch.trainer.input.shards import ENTRIES, REPACK, Shard, SplitIndex, parse_split_index, read_packed
from bigbatch.trainer.input.webdataset import find_shards
from bigbatch.trainer.machine.limits import lies_in_memory, memory_left
from bigbatch.words import count

LOCK, USERS = ".stage.lock", ".stage.users"
CHECKED, IN_PART = b"checked and on disk\n", b"copied in part\n"
"""Contents of the file STAGED beside a copy; a copy without it, made by other means, is verified first."""
STAGED_NAMES = re.compile(rf"shard-\d{{6}}\.tar|{ENTRIES}|{re.escape(STAGED)}|\..*{UNFINISHED}")
"""Names of the files that stage writes into a split, besides index.json."""
CHUNK_BYTES = 8 << 20
_REMEDY = "delete its folder to stage again, or name another DST"


@dataclass(frozen=True)
class StageSummary:
    """Result of a call of stage."""

    num_images: int
    num_shards: int
    bytes_copied: int
    bytes_kept: int
    """Bytes of an earlier call that were verified again by SHA-256; 0 if their sizes were enough."""
    seconds: float
    """Duration without the wait for another process."""

    @property
    def gb_per_s(self) -> float:
        """Return the rate of verification in 1e9 bytes per second, of copied and kept bytes."""
        return (self.bytes_copied + self.bytes_kept) / 1e9 / self.seconds

    def __str__(self) -> str:
        head = f"{count(self.num_images, 'image')} in {count(self.num_shards, 'shard')}"
        speed = f"{self.gb_per_s:.3g} GB/s"
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
    """Bytes of the source's index.json."""
    facts: SplitIndex
    files: tuple[Shard, ...]
    """Files copied before index.json: the shards and index.npy."""


def stage(
    source: Path,
    target: Path,
    *,
    splits: Sequence[str] = SPLITS,
    num_workers: int = 1,
    on_progress: Advance = show_nothing,
    on_wait: Callable[[], object] = lambda: None,
) -> StageSummary:
    """Copy those splits that the packed data set source has to target, or finish an earlier call.

    num_workers threads copy. on_progress gets (bytes done, bytes in all); on_wait is called before the wait for
    another process that stages into target. Raises: ConfigError for an impossible num_workers; DataError
    for a source that is not packed, cut, edited or gone, and for a target that is another user's, holds something
    else, is too small or cannot be written.
    """
    require_workers(num_workers)
    if find_shards(source):
        how = "copy the folder by other means, such as cp -r, and name the copy in data.root"
        raise DataError(f"{source}: holds WebDataset shards, which have no checksums: {how}")
    # index.json alone: if all is staged already, a thousand nodes read nothing else from the source
    plans = [_plan(source / split, target / split) for split in splits if (source / split).is_dir()]
    if not plans:
        raise DataError(f"{source}: holds none of {', '.join(splits)}; name the DST of `bigbatch data pack`")
    # lock before looking at the copy: another process may have completed it meanwhile
    with _only_process(target, on_wait) as was_private:
        start = time.monotonic()
        todo = [plan for plan in plans if not (was_private and _is_complete(plan))]
        for plan in todo:
            _remove_cut_files(plan)
        _require_room(target, todo)
        total = sum(file.num_bytes for plan in todo for file in plan.files)
        done = {True: 0, False: 0}
        if total:
            on_progress(0, total)
        for plan in todo:
            with _naming_target(plan.target / STAGED):  # shards without an index would be taken for WebDataset's
                write_whole(plan.target / STAGED, IN_PART, mark=UNFINISHED)
            for file, is_copied in _copy_all(plan, num_workers=num_workers):
                done[is_copied] += file.num_bytes
                on_progress(sum(done.values()), total)
            for name, data in ((INDEX, plan.index), (STAGED, CHECKED)):
                with _naming_target(plan.target / name):
                    write_whole(plan.target / name, data, mark=UNFINISHED, sync=True)
        return StageSummary(
            num_images=sum(plan.facts.num_images for plan in plans),
            num_shards=sum(len(plan.facts.shards) for plan in plans),
            bytes_copied=done[True],
            bytes_kept=done[False],
            seconds=time.monotonic() - start,
        )


@contextmanager
def using_copy(target: Path, *, keep: bool) -> Iterator[None]:
    """Keep the staged copy in target while the block runs; with keep=False the last process to leave removes it.

    The copy may be staged later. Ignores a target that cannot be locked, which stage() reports. Other files stay.
    """
    users = None
    with suppress(OSError):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    """Remove the copy, unless another process stages or uses it. Raises: OSError."""
    # a failed attempt gives up this process's shared lock, so of ranks that end together the last one gets it
    if not try_lock(users):
        return
    with open_lock(target / LOCK) as lock:
        if not try_lock(lock):
            return
        for split in (target / name for name in SPLITS):
            if split.is_symlink() or not split.is_dir():
                continue
            # index.json first, so that a partly removed split never looks whole
            made = [split / INDEX, *(path for path in split.iterdir() if STAGED_NAMES.fullmatch(path.name))]
            for path in made:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder has other files
                split.rmdir()


def _plan(source: Path, target: Path) -> _Split:
    if not is_packed(source):
        raise DataError(f"{source}: is not packed; run `bigbatch data pack SRC DST` first, then stage its DST")
    path = source / INDEX
    try:
        if target.exists() and target.samefile(source):
            raise DataError(f"{target}: is the folder to copy from; name another DST")
        index = read_plain(path)
        facts = parse_split_index(index.decode("utf-8", "replace"), path=path)
        entries = Shard(ENTRIES, (source / ENTRIES).stat().st_size, facts.entries_sha256)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror}); {REPACK}") from error
    return _Split(source, target, index, facts, (*facts.shards, entries))


@contextmanager
def _only_process(target: Path, on_wait: Callable[[], object]) -> Iterator[bool]:
    """Hold a lock on target in the block; yield whether no other user could write there before.

    If others could, sizes do not prove that files are whole. The kernel frees the lock when its process ends. The wait
    has no time limit, because the process with the lock shows its progress.
    """
    with _naming_target(target):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_lock(target / LOCK)
    with lock:
        try:
            wait_lock(lock, on_wait=on_wait)
        except OSError as error:
            advice = "name a folder on a disk, or in the memory, of this node"
            raise DataError(f"{target}: cannot be locked ({error.strerror}); {advice}") from error
        with _naming_target(target):
            facts = target.stat()
            if facts.st_uid != os.geteuid():
                raise DataError(f"{target}: belongs to another user, so its images may change; name another DST")
            was_private = not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not was_private:
                target.chmod(0o700)
        yield was_private


def _is_complete(split: _Split) -> bool:
    """Return whether a split was staged from this source, by its index and the sizes of its files."""
    try:
        is_ours = read_plain(split.target / INDEX) == split.index
        if not is_ours or read_plain(split.target / STAGED) != CHECKED:
            return False
        read_packed(split.target)
    except (OSError, DataError):  # missing or broken files are copied again
        return False
    return True


def _remove_cut_files(split: _Split) -> None:
    """Remove cut files in the target. Raises: DataError for files there that are not the source's."""
    read_packed(split.source)  # to find a missing or cut shard now, not after an hour
    index, ours = split.target / INDEX, {STAGED, *(file.name for file in split.files)}
    with _naming_target(split.target):
        split.target.mkdir(exist_ok=True)
        if index.exists():
            if read_plain(index) != split.index:
                raise DataError(f"{index}: differs from that of {split.source}; {_REMEDY}")
            ours |= {INDEX, SETTINGS}  # a copy by other means brings pack.json
        foreign = sorted(p.name for p in split.target.iterdir() if p.name not in ours and p.suffix != UNFINISHED)
        if foreign:
            raise DataError(f"{split.target}: holds {foreign[0]}, which does not come from {split.source}; {_REMEDY}")
        sweep_unfinished(split.target)
        for file in split.files:
            path = split.target / file.name
            if path.exists() and path.stat().st_size != file.num_bytes:
                path.unlink()


def _require_room(target: Path, splits: Sequence[_Split]) -> None:
    missing = sum(f.num_bytes for split in splits for f in split.files if not (split.target / f.name).exists())
    free: float = shutil.disk_usage(target).free
    advice = "make room, or name another DST"
    if lies_in_memory(target) and (left := memory_left()) < free:
        # the kernel would kill the job for more memory
        free, advice = left, "its files count as memory of this job: ask for more, or name a DST on a disk"
    if missing > free:
        numbers = f"{missing / 1e9:.4g} GB must be copied, {free / 1e9:.4g} GB are free"
        raise DataError(f"{target}: {numbers}; {advice}")


def _copy_all(split: _Split, *, num_workers: int) -> Iterator[tuple[Shard, bool]]:
    """Fetch all files; yield each, and whether it was copied. An error or Ctrl-C cancels unfinished copies."""
    stop = threading.Event()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="bigbatch-stage") as threads:
        futures = {threads.submit(_copy, split, file, stop=stop): file for file in split.files}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            # running copies check it between chunks; waiting ones are cancelled
            stop.set()
            threads.shutdown(cancel_futures=True)


def _copy(split: _Split, file: Shard, *, stop: threading.Event) -> bool:
    """Copy a whole file and verify its SHA-256; return False if an earlier call left it intact."""
    source, target, digest = split.source / file.name, split.target / file.name, hashlib.sha256()
    with _naming_target(target):
        if target.exists():
            if sha256_of(target) == file.sha256:
                return False
            target.unlink()  # at once: if index.json exists already, the split must not look whole
        # synced, so that a power cut does not leave the full size without the content
        with replacing(target, mark=UNFINISHED, sync=True) as copy:
            for chunk in _chunks(source):
                if stop.is_set():
                    raise CancelledError
                digest.update(chunk)
                copy.write(chunk)
            if digest.hexdigest() != file.sha256:
                raise DataError(f"{source}: its bytes are not those that were packed; delete it and {REPACK}")
    return True


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore it and stage again") from error


@contextmanager
def _naming_target(path: Path) -> Iterator[None]:
    """Turn system errors into a DataError naming the target."""
    try:
        yield
    except OSError as error:
        advice = "fix that and run the same command again: what is copied is kept"
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error
