"""Headers of tar archives in bounded memory: tarfile believes the lengths that they claim, and keeps all members."""

import tarfile
from collections.abc import Iterator

MAX_HEADER_BYTES = 1 << 16
"""A long name or a pax header takes less; a path has at most 4,096 bytes."""
MAX_GLOBAL_HEADERS = 20
"""Keys that count for all members; `git archive` writes one. Python 3.13 holds four times their bytes at once."""
MAX_MEMBERS = 4_000_000
"""Of one archive: three times those of ImageNet, in less than 1 GB."""

_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class BoundedTarInfo(tarfile.TarInfo):
    """Refuses headers that are read into memory whole and would fill it; maps of sparse files are not read at all."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        """Do as tarfile does, which leaves this to subclasses. Raises: ReadError."""
        if self.type in _EXTENSIONS and not 0 <= self.size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes, more than {MAX_HEADER_BYTES:,}")
        if len(tar.pax_headers) > MAX_GLOBAL_HEADERS:
            raise tarfile.ReadError(f"more than {MAX_GLOBAL_HEADERS} global headers")
        try:
            return super()._proc_member(tar)  # type: ignore[misc]
        except RecursionError as error:  # tarfile calls itself for what lies behind such a header
            raise tarfile.ReadError("too many headers of one member") from error

    def _proc_sparse(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        self.sparse = b""  # issparse() goes by whether there is a map
        return self._proc_builtin(tar)  # type: ignore[attr-defined]

    def _proc_gnusparse_10(self, info: tarfile.TarInfo, *_: object) -> None:
        """Note that info is sparse, the map of which its data begin with."""
        info.sparse = b""


def read_headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members in order and forget each. Raises: tarfile's errors."""
    num_members = 0
    while (info := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]
        num_members += 1
        if num_members > MAX_MEMBERS:
            raise tarfile.ReadError(f"more than {MAX_MEMBERS:,} members")
        yield info
