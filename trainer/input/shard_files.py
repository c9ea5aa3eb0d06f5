"""Read parts of shard files: a file is opened at its first read, and few stay open."""

import errno
import os
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from bigbatch.errors import StorageError
from bigbatch.files import open_plain_sized
from bigbatch.trainer.input.order import read_problem

WEBDATASET_INDEX = "webdataset.index"
"""File beside WebDataset's shards that holds their index."""
TAR_BLOCK_BYTES = 512
"""Headers and contents of a tar file fill whole blocks of this size."""

Stamp = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""


class ShardReader(Protocol):
    """Reads parts of the shards of a split, from any thread."""

    def read(self, shard: int, length: int, offset: int, *, name: Callable[[], str], again: str) -> bytes:
        """Read length bytes of a shard. For messages: name of the image; again, the remedy if the shard was cut.

        Raises: StorageError.
        """

    def close(self) -> None:
        """Release open files; a later read opens them again."""


class _ShardFile:
    """File that closes after its last reader: no reader's descriptor is closed, or reused for another file."""

    def __init__(self, path: str) -> None:
        self._descriptor, _ = open_plain_sized(path)

    def stamp(self) -> Stamp:
        return stamp_of(os.fstat(self._descriptor))

    def read(self, length: int, offset: int) -> bytes:
        """Read length bytes, or fewer at the file's end; reads on if a file system returns a part. Raises: OSError."""
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length and (more := os.pread(self._descriptor, length - len(data), offset + len(data))):
            data += more
        return data

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # it could be opened
            os.close(self._descriptor)


def stamp_of(facts: os.stat_result) -> Stamp:
    """Return the stamp of a file, from os.stat."""
    return facts.st_size, facts.st_mtime_ns


class ShardFiles:
    """ShardReader of local files."""

    def __init__(self, paths: Sequence[str], *, stamps: Sequence[Stamp] | None = None) -> None:
        """Open no shard yet. stamps: if given, a shard with another stamp is refused."""
        self._paths, self._stamps = paths, stamps
        # a third of the limit: training has two splits, and sockets and libraries need the rest
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 65536 if soft == resource.RLIM_INFINITY else max(1, soft // 3)
        self._open = lru_cache(most)(lambda shard, _: self._new(shard))
        self._errors: Counter[int] = Counter()
        """Number of read errors of each shard: after one only that shard is opened again."""

    def read(self, shard: int, length: int, offset: int, *, name: Callable[[], str], again: str) -> bytes:
        try:
            data = self._opened(shard).read(length, offset)
        except OSError as error:
            self._errors[shard] += 1  # opened again next time: a stale handle stays stale, but its path may work
            raise StorageError(f"{name()}: {read_problem(error, file='the shard')}") from error
        if len(data) != length:
            raise StorageError(f"{name()}: the shard was cut since the start; {again}")
        return data

    def _opened(self, shard: int) -> _ShardFile:
        while True:
            try:
                return self._open(shard, self._errors[shard])
            except OSError as error:
                if error.errno != errno.EMFILE or not self._open.cache_info().currsize:
                    raise
            # if the process may open no more files, the open ones of these make room
            self._open.cache_clear()

    def _new(self, shard: int) -> _ShardFile:
        file = _ShardFile(self._paths[shard])
        if self._stamps is not None and file.stamp() != self._stamps[shard]:
            raise shard_replaced(self._paths[shard])
        return file

    def close(self) -> None:
        self._open.cache_clear()


def shard_replaced(name: str) -> StorageError:
    """Return the error for a shard that has changed since it was indexed."""
    remedy = "run the same command, which indexes it, or put the index of the new shards beside them"
    return StorageError(f"{name}: the shard was replaced since it was indexed; {remedy}")
