"""Orders from the doctor to a probe, and its answers: lines of JSON in two files of a local folder.

Files, since all ranks of a probe read the same orders, and no launcher passes its standard input on to all.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.files import open_to_append

LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Exchange:
    """Files of one probe."""

    folder: Path

    @property
    def config(self) -> Path:
        """Return the path of the config that the probe measures: a complete YAML."""
        return self.folder / "config.yaml"

    def order(self, what: str, **details: Any) -> None:
        """Write the doctor's next order."""
        _append(self._orders, {"what": what, **details})

    def answer(self, facts: dict[str, Any]) -> None:
        """Write the probe's answer, on its first rank."""
        _append(self._answers, facts)

    def orders(self, *, goes_on: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield orders as they arrive, until goes_on is false while none is waiting."""
        num_seen = 0
        while True:
            found = _read(self._orders)
            if num_seen < len(found):
                yield found[num_seen]
                num_seen += 1
            elif goes_on():
                time.sleep(LOOK_SECONDS)
            else:
                return

    def find_answer(self, number: int) -> dict[str, Any] | None:
        """Return the answer of that number, from 0; None if it has not arrived."""
        found = _read(self._answers)
        return found[number] if number < len(found) else None

    @property
    def _orders(self) -> Path:
        return self.folder / "orders"

    @property
    def _answers(self) -> Path:
        return self.folder / "answers"


def is_running(process_id: int) -> bool:
    """Tell whether a process of this host runs."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and belongs to another user
        return True
    return True


def _append(path: Path, facts: dict[str, Any]) -> None:
    with open_to_append(path) as file:
        file.write((json.dumps(facts) + "\n").encode())


def _read(path: Path) -> list[dict[str, Any]]:
    """Read whole lines: one may be half written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
