"""Files that are whole or not there: written under a hidden name beside their own, then renamed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, mark: str | None = None, suffix: str = "", sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces path in one step when the block ends well, and goes when it does not.

    Until then path stays as it was, and file.name is the hidden name beside it. That is of this writer alone, on any
    node, unless a fixed mark ends it: where a lock leaves one writer, the next run then writes over what a killed one
    left. suffix ends the name where there is no mark. sync brings the bytes to the disk before the step, so that
    a power cut leaves the old file or the new one. Raises: OSError.
    """
    aside = path.with_name(f".{path.name}{mark or f'.{uuid.uuid4().hex}{suffix}'}")
    file = _create(aside)
    try:
        with file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):  # it tells less than what failed
            aside.unlink()
        raise


def write_whole(path: Path, data: bytes, *, mark: str | None = None, sync: bool = False) -> None:
    """Replace a file in one step, as replacing does. Raises: OSError."""
    with replacing(path, mark=mark, sync=sync) as file:
        file.write(data)


def _create(path: Path) -> BinaryIO:
    """Open a file that is new: whoever plants a link under a name that can be guessed would have us write elsewhere."""
    try:
        return open(path, "xb")
    except FileExistsError:
        path.unlink()
        return open(path, "xb")
