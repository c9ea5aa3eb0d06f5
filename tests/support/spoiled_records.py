"""Damages of a record that a job keeps in a file for later starts."""

import json
from collections.abc import Callable
from typing import Any

Spoiled = Callable[[bytes], bytes]
"""Returns a damaged file's content from that of an intact one."""


def spoil(change: Callable[[dict[str, Any]], object]) -> Spoiled:
    """Change a record's values."""

    def spoiled(data: bytes) -> bytes:
        record = json.loads(data)
        change(record)
        return json.dumps(record).encode()

    return spoiled


NO_RECORDS: tuple[Spoiled, ...] = (
    lambda data: b"",
    lambda data: data[:100],
    lambda data: b"\xff\xfe\x00",
    lambda data: b"[" * 100_000,
    lambda data: b"[]",
)
