"""Data sets in an object store or on a web server: packed splits, or WebDataset's shards."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from bigbatch.errors import StorageError
from bigbatch.parts import load
from bigbatch.trainer.input.base import SPLITS, ImageSource
from bigbatch.trainer.input.data_root import INDEX, Cache
from bigbatch.trainer.input.order import require_same_classes
from bigbatch.trainer.input.shard_files import WEBDATASET_INDEX
from bigbatch.trainer.input.shards import ENTRIES, PackedIndex, SplitIndex, parse_entries, parse_split_index
from bigbatch.trainer.input.storage import RemoteShards, Storage

if TYPE_CHECKING:
    from bigbatch.trainer.input.webdataset_index import Index


class RemoteRoot:
    """Root at an address; finds its shards once, for all splits and calls."""

    def __init__(self, url: str, *, cache: Cache | None = None, retries: bool = False) -> None:
        """Connect, and read nothing yet. cache, retries: see RemoteShards. Raises: ConfigError."""
        self._url, self._storage = url, Storage(url)
        self._cache, self._retries = cache, retries

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
        reopen = partial(_open_again, self._url, split, cache=self._cache, retries=self._retries)
        found: ImageSource
        if facts := self._packed_facts(split):
            shards = [(f"{split}/{shard.name}", shard.num_bytes, shard.sha256) for shard in facts.shards]
            entries_N, files = self._entries(split, facts), self._files(split, shards)
            found = PackedIndex(f"{self._url}/{split}", facts=facts, entries_N=entries_N, files=files, reopen=reopen)
        else:
            self._index.require(split, where=self._url)
            shards = [(name, size, str(version)) for name, (size, version) in self._index.shards[split]]
            make = load("bigbatch.trainer.input.webdataset.WebDatasetSplit")
            found = make(self._url, split, self._index, files=self._files(split, shards), reopen=reopen)
        if classes is not None:
            require_same_classes(self._url, found=found.classes, expected=classes)
        return found

    def classes(self, split: str) -> tuple[str, ...] | None:
        if facts := self._packed_facts(split):
            return facts.classes
        if any(map(self._packed_facts, SPLITS)):
            return None
        return self._index.classes if split in self._index.shards else None

    @cached_property
    def _index(self) -> "Index":
        index: Index = load("bigbatch.trainer.input.webdataset.read_remote_webdataset")(self._storage)
        return index

    def _files(self, split: str, shards: Sequence[tuple[str, int, str]]) -> RemoteShards:
        return RemoteShards(self._storage, shards, split=split, cache=self._cache, retries=self._retries)

    def _packed_facts(self, split: str) -> SplitIndex | None:
        """Return the index.json of a packed split; None if there is none."""
        path = f"{self._url}/{split}/{INDEX}"
        try:
            text = self._storage.fetch(f"{split}/{INDEX}").decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            others = (WEBDATASET_INDEX, *(f"{each}/{INDEX}" for each in SPLITS if each != split))
            if isinstance(error, PermissionError) and any(map(self._storage.holds, others)):
                return None
            raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
        return parse_split_index(text, path=path)

    def _entries(self, split: str, facts: SplitIndex) -> np.ndarray:
        path = f"{self._url}/{split}/{ENTRIES}"
        try:
            return parse_entries(self._storage.fetch(f"{split}/{ENTRIES}"), facts, path=path)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror})") from error


def _open_again(url: str, split: str, *, cache: Cache | None, retries: bool) -> ImageSource:
    return RemoteRoot(url, cache=cache, retries=retries).open(split)
