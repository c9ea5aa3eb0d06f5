"""Ownership of a run folder for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigbatch.trainer.folder.owner import Owner, own_claim, take


@contextmanager
def owning(folder: Path) -> Iterator[Owner]:
    """Own a run folder during the block; see take."""
    owner = take(folder, own_claim())
    try:
        yield owner
    except BaseException:
        owner.release(has_failed=True)
        raise
    owner.release()
