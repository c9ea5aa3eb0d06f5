"""Shards in an object store or on a web server, through fsspec: parts are read on demand, and cached on a local disk.

Images come in random order, so a cache that is smaller than the data set keeps a fixed part of it: with eviction, each
block would be lost before its next use. Ranks of a host share the file without a lock: they write equal bytes, and a
block is used only if its CRC-32 matches.
"""

import errno
import hashlib
import logging
import os
import re
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from bigbatch.errors import ConfigError, DataError, StorageError, pip_install, print_line
from bigbatch.files import LIST_BYTES, open_sparse
from bigbatch.trainer.input.data_root import CREDENTIALS, Cache
from bigbatch.trainer.input.owners import others_files, share_folder, trusted_uids, user_name
from bigbatch.trainer.input.tar_headers import refuse_compressed

BLOCK_BYTES, FETCH_BLOCKS = 1 << 16, 16
"""Bytes per block, each with a CRC-32, and blocks per request: its latency is that of a megabyte's transfer."""
VAL_SHARE = 0.1
"""Part of the cache for the validation split."""
RETRY_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to read an index."""
RETRY_SECONDS = 60.0
"""No further attempt begins later than this."""
_EXPIRED = "the session token is expired or damaged: get a new one"
_CLOCK = "this host's clock differs too much from the server's: set it, by NTP"
_REGION = "the bucket is in another region, or behind another endpoint: set AWS_DEFAULT_REGION or AWS_ENDPOINT_URL"
_NO_BUCKET = "there is no such bucket: check its name and the endpoint"
REFUSALS = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"), _EXPIRED),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _CLOCK),
    "InvalidAccessKeyId": "the server does not know the access key: check AWS_ACCESS_KEY_ID and the endpoint",
    "SignatureDoesNotMatch": "the secret key does not fit the access key: check AWS_SECRET_ACCESS_KEY",
    **dict.fromkeys(
        ("AccessDenied", "AllAccessDisabled"), "these credentials may not read or list it: ask the bucket's owner"
    ),
    "InvalidObjectState": "the object is archived (Glacier): restore it first",
    **dict.fromkeys(("NoSuchBucket", "InvalidBucketName"), _NO_BUCKET),
    **dict.fromkeys(("PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed"), _REGION),
    **dict.fromkeys(("IllegalLocationConstraintException", "RecursionError"), _REGION),  # botocore redirects forever
}
"""S3's code of an error that retries cannot change, or the name of the error -> cause and remedy."""
NO_CREDENTIALS = (
    *("PermissionError", "NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "RefreshError"),
)
"""Names of errors on other credentials: they are not retried."""
BAD_SETTINGS = frozenset(("ValueError", "ProfileNotFound", "ConfigParseError", "ParamValidationError"))
"""Names of errors, and of their base classes, on settings that a library cannot use."""
NO_ANSWER = frozenset(("ConnectionError", "ClientConnectionError", "HTTPClientError", "TimeoutError", "FSTimeoutError"))
"""Names of errors, and of their base classes, of a server that does not answer."""


T = TypeVar("T")


CERTIFICATES = (
    "check the address, or name a file with its certificate or authority in the environment: SSL_CERT_FILE, for S3 "
    "AWS_CA_BUNDLE"
)


class Storage:
    """One folder in an object store or on a web server."""

    def __init__(self, url: str) -> None:
        """Connect. Raises: ConfigError if a package is missing."""
        scheme = url.partition(":")[0]
        package = {"s3": "s3fs", "gs": "gcsfs"}.get(scheme, "aiohttp")
        try:
            import fsspec

            # for the environment's proxies, which s3fs uses anyway
            settings = {"client_kwargs": {"trust_env": True}} if package == "aiohttp" else {}
            self._fs: Any = fsspec.filesystem(scheme, **settings)
        except ImportError as error:
            also = f" {package}" if scheme != "s3" else ""
            raise ConfigError(f"data.root={url}: needs {package}: {pip_install('storage')}{also}") from error
        log = logging.getLogger(package)
        if not log.handlers:  # without one, Python prints the errors that gcsfs logs, with the server's words
            log.addHandler(logging.NullHandler())
        self.url = url

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a part of a file below the folder; without end the whole file, if it is at most LIST_BYTES long.

        Raises: FileNotFoundError; PermissionError if the storage refuses these credentials; OSError; StorageError if
        the server ignores start and end, or the whole file has more than LIST_BYTES.
        """
        url, stop = f"{self.url}/{name}", LIST_BYTES + 1 if end is None else end
        try:
            if url.startswith("http"):  # the server may ignore a range, and state no size or a wrong one
                data = self._stream(url, start, end, most=stop - start + 1)  # read to its end, the connection is kept
            else:
                data = bytes(self._fs.cat_file(url, start=start, end=stop))
        except Exception as error:
            raise _without_secrets(error, self._endpoint()) from None  # its text may hold secrets of the request
        if end is None and len(data) > LIST_BYTES:
            raise StorageError(f"{url}: has more than {LIST_BYTES:,} bytes, so it is not an index; remove it")
        if len(data) > stop - start:
            raise StorageError(f"{url}: the server sends whole files, not ranges; use one that supports range requests")
        return data

    def _stream(self, url: str, start: int, end: int | None, *, most: int) -> bytes:
        """Read a part of a file on a web server, or without end the whole file, but at most `most` bytes."""
        from fsspec.asyn import sync

        headers = dict(self._fs.kwargs.get("headers", {}))
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"

        async def read() -> bytes:  # in the library's thread, since a part arrives in some 20 pieces
            parts = bytearray()
            while len(parts) < most and (part := await file._read(most - len(parts))):
                parts += part
            return bytes(parts)

        # block_size=0: as a stream; size=1: so that fsspec does not request the size
        with self._fs.open(url, block_size=0, size=1, headers=headers) as file:
            return sync(self._fs.loop, read)

    def fetch(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Read like read(), and retry for a while: nothing else retries the reads before a run."""
        return _with_retries(lambda: self.read(name, start, end))

    def holds(self, name: str) -> bool:
        """Return whether a file can be read. Without the right to list a bucket, S3 refuses access to missing ones."""
        try:
            return bool(self.fetch(name, 0, 1))
        except OSError:
            return False

    def shards(self, below: str) -> list[tuple[str, int | None, int]]:
        """List the tar files in the subfolder below: name, bytes, and a number that changes with the content.

        A page of a web server states no bytes.

        Raises: as read; DataError if some are compressed.
        """
        found = _with_retries(lambda: self._list(f"{self.url}/{below}".rstrip("/")))
        names = {facts["name"].rpartition("/")[2]: facts for facts in found if facts["type"] == "file"}
        tars = [name for name in sorted(names) if name.endswith(".tar")]
        refuse_compressed(f"{self.url}/{below}".rstrip("/"), names)
        return [(f"{below}/{name}".lstrip("/"), names[name]["size"], _version(names[name])) for name in tars]

    def _list(self, url: str) -> list[dict[str, Any]]:
        try:
            return list(self._fs.ls(url, detail=True, refresh=True))
        except Exception as error:
            raise _without_secrets(error, self._endpoint()) from None

    def _endpoint(self) -> str:
        """Return the address of S3's server, without a user or password; "" if the folder's address states it."""
        with suppress(AttributeError):  # other stores have none
            return re.sub(r"(?<=//)[^/]*@|[?#].*", "", self._fs._s3.meta.endpoint_url)
        return ""


def _with_retries(call: Callable[[], T]) -> T:
    since = time.monotonic()
    for seconds in RETRY_PAUSES:
        try:
            return call()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            if time.monotonic() - since > RETRY_SECONDS:  # without an answer of the server one attempt takes minutes
                raise
            time.sleep(seconds)
    return call()


def _version(facts: Mapping[str, Any]) -> int:
    stated = [str(facts[key]) for key in ("ETag", "etag", "LastModified", "updated") if facts.get(key)]
    return zlib.crc32(" ".join(stated).encode())


def _without_secrets(error: Exception, endpoint: str) -> OSError:
    """Return an error without the library's text, which may contain keys, signed addresses or tokens."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    status = getattr(error, "status", None) or getattr(error, "code", None)  # of aiohttp; of gcsfs
    if str(error).startswith("Forbidden:"):  # gcsfs's OSError for 403
        status = 403
    response = getattr(error.__cause__, "response", None)  # of botocore, behind s3fs's error
    code = str(status or "")
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code") or "")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = code if re.fullmatch(r"[\w.]{1,60}", code) else str(status or "")
    where = (f"HTTP {code}" if code.isdigit() else code or kinds[0]) + (f" of {endpoint}" if endpoint else "")
    if refusal := REFUSALS.get(code) or REFUSALS.get(kinds[0]):
        return PermissionError(errno.EACCES, f"{refusal} ({where})")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    is_untrusted = "SSLError" in kinds and "CERTIFICATE_VERIFY_FAILED" in str(error)  # of botocore
    if is_untrusted or isinstance(
        getattr(error, "certificate_error", None), ssl.SSLCertVerificationError
    ):  # of aiohttp
        return PermissionError(errno.EACCES, f"the server's certificate is not trusted ({where}); {CERTIFICATES}")
    if {code, kinds[0]} & {*NO_CREDENTIALS} or status in (401, 403):
        return PermissionError(errno.EACCES, f"the storage refuses access ({where}); {CREDENTIALS}")
    if not BAD_SETTINGS.isdisjoint(kinds):
        settings = "check the address, for S3 also AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and AWS_PROFILE"
        return PermissionError(errno.EACCES, f"the library cannot use its settings: {settings} ({where})")
    if not NO_ANSWER.isdisjoint(kinds):
        where = f"no server answers, or not in time: check address, endpoint and network ({where})"
    return OSError(errno.EIO, where)


class RemoteShards:
    """ShardReader of shards in a Storage."""

    def __init__(
        self,
        storage: Storage,
        shards: Sequence[tuple[str, int, str]],
        *,
        split: str,
        cache: Cache | None,
        retries: bool = False,
    ) -> None:
        """Fetch nothing yet. shards: (name, bytes, text that changes with the content). Raises: DataError.

        retries: retry reads as Storage.fetch does, until one has failed in the end; a run has its own patience.
        """
        self._storage, self._shards = storage, shards
        self._get = storage.fetch if retries else storage.read
        groups = [-(-num_bytes // (BLOCK_BYTES * FETCH_BLOCKS)) for _, num_bytes, _ in shards]
        self._first_blocks = (FETCH_BLOCKS * np.cumsum([0, *groups])).tolist()
        self._kept: BlockCache | None = None
        if cache is not None and shards:
            share = VAL_SHARE if split == "val" else 1 - VAL_SHARE
            most = int(share * cache.num_bytes) // (BLOCK_BYTES * FETCH_BLOCKS) * FETCH_BLOCKS
            owner = hashlib.sha256(f"{storage.url} {split}".encode()).hexdigest()[:16]
            content = hashlib.sha256(repr(shards).encode()).hexdigest()[:16]
            num_blocks = min(most, self._first_blocks[-1])
            self._kept = BlockCache(cache.folder, owner, content, num_blocks=num_blocks, shared_by=cache.shared_by)

    def read(self, shard: int, length: int, offset: int, *, name: Callable[[], str], again: str) -> bytes:
        try:
            data = self._read(shard, offset, offset + length)
        except PermissionError as error:
            raise StorageError(f"{name()}: {error.strerror}") from None
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._get = self._storage.read
            raise StorageError(f"{name()}: cannot be read ({error.strerror})") from error
        if len(data) != length:
            raise StorageError(f"{name()}: the shard was cut since the start; {again}")
        return data

    def _read(self, shard: int, start: int, end: int) -> bytes:
        file, num_bytes, _ = self._shards[shard]
        first = self._first_blocks[shard]
        block, stop = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        kept = self._kept
        if kept is None or first + stop > kept.num_blocks or end > num_bytes:
            return self._get(file, start, end)
        parts = []
        while block < stop:
            data = kept.get(first + block)
            if data is None:
                group = block // FETCH_BLOCKS * FETCH_BLOCKS
                with kept.lock(first + group):
                    data = kept.get(first + block)  # another thread may have fetched it meanwhile
                    if data is None:
                        at = group * BLOCK_BYTES
                        to = min(at + FETCH_BLOCKS * BLOCK_BYTES, num_bytes)
                        whole = self._get(file, at, to)
                        if len(whole) == to - at:  # otherwise the shard was cut
                            kept.put(first + group, whole)
                        data = whole[(block - group) * BLOCK_BYTES :][:BLOCK_BYTES]
            parts.append(data[: num_bytes - block * BLOCK_BYTES])
            block += 1
        skipped = start % BLOCK_BYTES
        return b"".join(parts)[skipped : skipped + end - start]

    def close(self) -> None:
        """Do nothing: the library keeps its connections, and the cache its one file."""


class BlockCache:
    """Cache of a split's first blocks in a sparse local file: the CRC-32 of each, then the blocks fetched so far."""

    def __init__(
        self, folder: Path, owner: str, content: str, *, num_blocks: int, shared_by: Sequence[str] | None = None
    ) -> None:
        """Open or create the file; remove files of the split's earlier content, which are of no further use.

        A job with another cache size on this host has its own file. shared_by: let all users read the file, and read
        those of these users too. Raises: DataError; ConfigError.
        """
        self.num_blocks = num_blocks
        self._folder = folder
        self._locks = [threading.Lock() for _ in range(64)]
        self._files: list[BinaryIO] = []
        """Files to look for a block in: this user's own, then those of other users."""
        if not num_blocks:
            return
        self._start = -(-4 * num_blocks // 4096) * 4096
        uids, name = trusted_uids(shared_by or ()), f"{owner}-{content}-{num_blocks}"
        try:
            if shared_by is not None:
                share_folder(folder, uids)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / (f"{name}.blocks" if shared_by is None else f"{name}.{os.geteuid()}.blocks")
            for other in folder.glob(f"{owner}-*.blocks"):
                if not other.name.startswith(f"{owner}-{content}-"):
                    with suppress(PermissionError):  # another user's
                        other.unlink(missing_ok=True)
            self._file = open_sparse(path)
            facts = os.fstat(self._file.fileno())
            if facts.st_uid != os.geteuid():  # planted in a folder where all users may write
                raise OSError(errno.EPERM, f"{path.name} belongs to another user ({user_name(facts.st_uid)})")
            os.ftruncate(self._file.fileno(), self._start + num_blocks * BLOCK_BYTES)
            self._files = [self._file]
            if shared_by is not None:
                os.fchmod(self._file.fileno(), 0o644)
                self._files += others_files(folder.glob(f"{name}.*.blocks"), uids)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be used ({error.strerror}); name another folder in data.cache_dir"
            ) from error

    def lock(self, block: int) -> threading.Lock:
        """Return the lock under which a block is fetched."""
        return self._locks[block // FETCH_BLOCKS % len(self._locks)]

    def get(self, block: int) -> bytes | None:
        """Return a block; None if it is missing or damaged."""
        for file in self._files:
            with suppress(OSError):  # the local disk is faulty: read from the storage
                if expected := int.from_bytes(os.pread(file.fileno(), 4, 4 * block), "little"):
                    data = os.pread(file.fileno(), BLOCK_BYTES, self._start + block * BLOCK_BYTES)
                    if _checksum(data) == expected:
                        return data
        return None

    def put(self, block: int, data: bytes) -> None:
        """Write consecutive blocks, the first at `block`; after a disk error keep nothing more."""
        if not self.num_blocks:
            return
        padded = data.ljust(-(-len(data) // BLOCK_BYTES) * BLOCK_BYTES, b"\0")
        parts = (padded[at : at + BLOCK_BYTES] for at in range(0, len(padded), BLOCK_BYTES))
        try:
            os.pwrite(self._file.fileno(), padded, self._start + block * BLOCK_BYTES)
            os.pwrite(self._file.fileno(), b"".join(_checksum(part).to_bytes(4, "little") for part in parts), 4 * block)
        except OSError as error:
            self.num_blocks = 0
            print_line(f"{self._folder}: the cache keeps nothing more ({error.strerror})", file=sys.stderr)


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) or 1  # 0 marks a missing block
