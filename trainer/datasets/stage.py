"""Stage a packed data set: copy it to a node's own disk or memory, and verify every byte.

One process of a node copies, while others wait for it. The file STAGED of a split that is copied holds the source's
index.json; index.json itself is written last, and marks a whole split. A copy by other means is verified, and kept.
A copy that users share is made in a hidden folder, which is renamed when it is whole.
"""

import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bigbatch.errors import DataError
from bigbatch.files import is_own_file, mode_of_own, open_plain, read_plain, replacing, sha256_of, write_whole
from bigbatch.locks import open_lock, share_lock, try_lock, wait_lock
from bigbatch.trainer.datasets.pack import UNFINISHED, sweep_unfinished
from bigbatch.trainer.datasets.processes import Advance, require_workers, show_nothing
from bigbatch.trainer.datasets.publish import SHARED_FOLDER, begun_folder, hide, publish
from bigbatch.trainer.input.base import SPLITS
from bigbatch.trainer.input.data_root import INDEX, STAGED, is_packed
from bigbatch.trainer.input.owners import WRITABLE, distrust, distrusted, distrusted_above, trusted_uids, user_name
from bigbatch.trainer.input.shards import ENTRIES, REPACK, Shard, SplitIndex, parse_split_index, read_packed, unreadable
from bigbatch.trainer.input.webdataset import find_shards
from bigbatch.trainer.machine.limits import lies_in_memory, memory_left
from bigbatch.words import count

USERS = ".stage.users"
CHECKED = b"checked and on disk\n"
"""Content of STAGED in verified copies by other means."""
CHUNK_BYTES = 8 << 20


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
        if not self.bytes_copied + self.bytes_kept:
            return f"{head}, complete already"
        kept = f"{self.bytes_kept / 1e9:.4g} GB" if self.bytes_kept else ""
        copied = f"{self.bytes_copied / 1e9:.4g} GB copied" + (f" ({kept} were there already)" if kept else "")
        done = copied if self.bytes_copied else f"complete already, {kept} checked"
        return f"{head}, {done} in {self.seconds:.1f} s, {self.gb_per_s:.3g} GB/s"


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
    shared_by: Sequence[str] | None = None,
    num_workers: int = 1,
    on_progress: Advance = show_nothing,
    on_wait: Callable[[], object] = lambda: None,
) -> StageSummary:
    """Copy those splits that the packed data set source has to target, or finish an earlier call.

    shared_by: share the copy with all users of the node, and use one of these users; None: a copy of one's own.
    num_workers threads copy. on_progress gets (bytes done, bytes in all), from one of them at a time; on_wait is
    called before the wait for another process that stages into target. Raises: ConfigError for an impossible
    num_workers; DataError for a source that is not packed, cut, edited or gone, and for a target that is another
    user's, holds something else, is too small or cannot be written.
    """
    require_workers(num_workers)
    if find_shards(source):
        how = "copy the folder by other means, such as cp -r, and name the copy in data.root"
        raise DataError(f"{source}: holds WebDataset shards, which have no checksums: {how}")
    # index.json alone: if all is staged already, a thousand nodes read nothing else from the source
    plans = [_plan(source / split, target / split) for split in splits if (source / split).is_dir()]
    if not plans:
        raise DataError(f"{source}: holds none of {', '.join(splits)}; name the DST of `bigbatch data pack`")
    is_shared, uids = shared_by is not None, trusted_uids(shared_by or ())
    if is_shared and all(_is_complete(plan, uids, is_shared=True) and not _is_own(plan.target) for plan in plans):
        _require_target(target, uids)
        return _summary(plans, copied=(0, 0), seconds=0.0)  # perhaps in a folder where this user may not write
    # lock before looking at the copy: another process may have completed it meanwhile
    with _only_process(target, on_wait, uids if is_shared else None):
        start, mode = time.monotonic(), target.stat().st_mode
        # if others can write there, sizes do not prove that the files are whole
        is_open = bool(mode & WRITABLE and not mode & stat.S_ISVTX)
        todo = [plan for plan in plans if not _is_complete(plan, uids, is_shared=is_shared) or is_open]
        begun = [replace(plan, target=begun_folder(plan.target)) for plan in todo] if is_shared else todo
        for plan in todo:
            read_packed(plan.source)  # to find a missing or cut shard now, not after an hour
        for plan in (*todo, *begun):
            _require_free(plan)
        for plan in begun:
            plan.target.mkdir(mode=0o700 if is_shared else 0o755, exist_ok=True)
            if not _is_own(plan.target):
                raise _foreign(f"{plan.target}: is a link, or belongs to another user")
            sweep_unfinished(plan.target)
        _require_room(target, begun)
        if is_open:  # in /tmp others keep their right to write
            target.chmod(mode & ~WRITABLE)
        if is_shared:
            todo = [replace(b, target=hide(b.target, plan.target)) for b, plan in zip(begun, todo, strict=True)]
        for plan in todo:
            _begin(plan)
        copied = _copy_all(todo, num_workers=num_workers, on_progress=on_progress)
        for plan in todo:
            _finish(plan)
        if is_shared:
            made = {plan.source: plan.target for plan in todo}
            for plan in plans:
                publish(made.get(plan.source, plan.target), plan.target)
        return _summary(plans, copied=copied, seconds=time.monotonic() - start)


def _summary(plans: Sequence["_Split"], *, copied: tuple[int, int], seconds: float) -> StageSummary:
    return StageSummary(
        num_images=sum(plan.facts.num_images for plan in plans),
        num_shards=sum(len(plan.facts.shards) for plan in plans),
        bytes_copied=copied[0],
        bytes_kept=copied[1],
        seconds=seconds,
    )


@contextmanager
def using_copy(target: Path, *, keep: bool) -> Iterator[None]:
    """Keep the staged copy in target while the block runs; with keep=False the last process to leave removes it.

    The copy may be staged later. Ignores a target that cannot be locked, which stage() reports. Other files stay, and a
    copy by other means.
    """
    users = None
    with suppress(OSError):
        _make_folder(target)
        users = open_lock(target / USERS)
        share_lock(users)
    try:
        yield
    finally:
        if users is not None:
            with users, suppress(OSError):
                # a failed attempt gives up this process's shared lock: of ranks that end together the last one gets it
                if not keep and try_lock(users):
                    _remove(target)


def _remove(target: Path) -> None:
    """Remove the splits that stage() copied to target, unless another process stages there. Raises: OSError."""
    with open_folder(target) as lock:
        if not try_lock(lock):
            return
        for split in (target / name for name in SPLITS):
            if split.is_symlink() or not (split / STAGED).is_file() or read_plain(split / STAGED) == CHECKED:
                continue
            # STAGED last: shards without it and without an index would be taken for WebDataset's
            made = split / INDEX, split / ENTRIES, *split.glob("shard-*.tar"), *split.glob(f".*{UNFINISHED}")
            for path in (*made, split / STAGED):
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
        raise unreadable(Path(error.filename or path), error) from error
    return _Split(source, target, index, facts, (*facts.shards, entries))


def _make_folder(target: Path) -> None:
    """Make target, for this user alone, and the folders above it, which other users cannot change. Raises: OSError."""
    for folder in reversed(target.parents):
        folder.mkdir(SHARED_FOLDER, exist_ok=True)
    target.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, to lock it: users who may only read it can share this lock. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _only_process(target: Path, on_wait: Callable[[], object], shared_by: frozenset[int] | None) -> Iterator[None]:
    """Hold a lock on target in the block. Raises: DataError that names the path, for system errors of the block, too.

    shared_by: users who share the copy; None for a copy of one's own. The kernel frees the lock when its process ends.
    The wait has no time limit, because the process with the lock shows its progress.
    """
    try:
        _make_folder(target)
        with open_folder(target) as lock:
            try:
                wait_lock(lock, on_wait=on_wait)
            except OSError as error:
                advice = "name a folder on a disk, or in the memory, of this node"
                raise DataError(f"{target}: cannot be locked ({error.strerror}); {advice}") from error
            _require_target(target, shared_by)
            yield
    except OSError as error:
        path, reason = error.filename2 or error.filename or target, error.strerror or error
        if isinstance(error, FileExistsError):
            reason = "it is no folder"
        advice = "fix that and run the same command again: what is copied is kept"
        raise DataError(f"{path}: cannot be used ({reason}); {advice}") from error


def _require_target(target: Path, shared_by: frozenset[int] | None) -> None:
    """Raise DataError if another user can move what is staged in target; make a shared one readable. Raises: OSError.

    Root's folder with the sticky bit, such as /tmp or one with mode 1777 that an administrator prepared, is safe.
    """
    facts = target.stat()
    if facts.st_uid == os.geteuid():
        if shared_by is not None and facts.st_mode & SHARED_FOLDER != SHARED_FOLDER:
            target.chmod(stat.S_IMODE(facts.st_mode) | SHARED_FOLDER)
    elif reason := distrust(facts, {0, *(shared_by or ())}):
        raise _foreign(f"{target}: {reason}")
    elif shared_by is None and not facts.st_mode & stat.S_ISVTX:
        raise _foreign(f"{target}: belongs to another user ({user_name(facts.st_uid)})")
    if shared_by is not None:
        if target.is_symlink():
            raise DataError(f"{target}: is a link, which may change; name the folder itself")
        if reason := distrusted_above(target, shared_by):
            advice = "name another DST, run chmod go-w there, or name the folder's owner with --owner (data.shared_by)"
            raise DataError(f"{reason}, so {target} may be exchanged; {advice}")
        closed = next((path for path in target.absolute().parents if not path.stat().st_mode & stat.S_IXOTH), None)
        if closed:
            raise DataError(f"{target}: other users cannot reach it through {closed}; name another DST, or chmod o+x")


def _is_own(folder: Path) -> bool:
    return mode_of_own(folder) is not None


def _foreign(what: str) -> DataError:
    shared = "share its copy (`--shared --owner USER`, `data.shared_by: [USER]`) if you trust this user"
    return DataError(f"{what}, so its images may change; name another DST, or {shared}")


def _is_complete(split: _Split, uids: frozenset[int], *, is_shared: bool) -> bool:
    """Return whether a split was staged from this source, by its index and the sizes of its files.

    Raises: DataError if another user than uids can change it.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        is_own = _is_own(split.target)
        if (is_shared or not is_own) and (reason := distrusted(split.target, uids)):
            if is_own:
                return False  # verified again, and then no longer writable for others
            raise _foreign(reason)
    with suppress(OSError, DataError):  # missing or broken files are copied again
        # a copy by other means has no STAGED: it is verified first
        is_verified = read_plain(split.target / STAGED) in (split.index, CHECKED)
        if is_verified and read_plain(split.target / INDEX) == split.index:
            read_packed(split.target)
            return True
    return False


def _require_free(split: _Split) -> None:
    """Raise DataError if the target holds something else. Changes nothing."""
    index, staged = split.target / INDEX, split.target / STAGED
    if index.exists():
        held = None if read_plain(index) == split.index else index
    elif staged.exists():
        held = None if read_plain(staged) in (split.index, CHECKED) else staged
    else:
        there = split.target.iterdir() if split.target.exists() else ()
        held = next((path for path in there if path.suffix != UNFINISHED), None)
    if held:
        remedy = "delete its folder to stage again, or name another DST"
        raise DataError(f"{held}: does not come from {split.source}; {remedy}")


def _begin(split: _Split) -> None:
    """Mark a split as unfinished, unless it has an index: then a missing file keeps it from looking whole."""
    if not (split.target / INDEX).exists():
        write_whole(split.target / STAGED, split.index, mark=UNFINISHED)


def _finish(split: _Split) -> None:
    """Mark a verified split as whole."""
    staged = split.target / STAGED
    if not is_own_file(staged) or read_plain(staged) != split.index:
        write_whole(staged, CHECKED, mark=UNFINISHED, sync=True)  # a copy by other means
    write_whole(split.target / INDEX, split.index, mark=UNFINISHED, sync=True)


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


def _copy_all(splits: Sequence[_Split], *, num_workers: int, on_progress: Advance) -> tuple[int, int]:
    """Fetch all files; return the bytes copied and kept. An error or Ctrl-C cancels unfinished copies."""
    total = sum(file.num_bytes for split in splits for file in split.files)
    done, lock, stop = {True: 0, False: 0}, threading.Lock(), threading.Event()

    def advance(num_bytes: int, is_copied: bool) -> None:
        with lock:
            if stop.is_set():
                raise CancelledError
            done[is_copied] += num_bytes
            on_progress(sum(done.values()), total)

    if total:
        on_progress(0, total)
    with ThreadPoolExecutor(num_workers, thread_name_prefix="bigbatch-stage") as threads:
        copies = [threads.submit(_copy, split, file, advance) for split in splits for file in split.files]
        try:
            for copy in as_completed(copies):
                copy.result()
        finally:
            # running copies find it at their next chunk; waiting ones are cancelled
            stop.set()
            threads.shutdown(cancel_futures=True)
    return done[True], done[False]


def _copy(split: _Split, file: Shard, advance: Callable[[int, bool], None]) -> None:
    """Copy a whole file and verify its SHA-256, unless an earlier call left it intact."""
    source, target, digest = split.source / file.name, split.target / file.name, hashlib.sha256()
    if is_own_file(target) and sha256_of(target) == file.sha256:
        advance(file.num_bytes, False)
        return
    target.unlink(missing_ok=True)  # at once: if index.json exists, the split must not look whole
    # synced, so that a power cut does not leave the full size without the content
    with replacing(target, mark=UNFINISHED, sync=True) as copy:
        for chunk in _chunks(source):
            digest.update(chunk)
            copy.write(chunk)
            advance(len(chunk), True)
        if digest.hexdigest() != file.sha256:
            raise DataError(f"{source}: its bytes are not those that were packed; delete it and {REPACK}")


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open_plain(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore it and stage again") from error
