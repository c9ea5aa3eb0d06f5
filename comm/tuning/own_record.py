"""A record that a job measured for itself and keeps in a file for later starts."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.files import parse_json, read_own, write_own

MAX_SHOWN = 100
"""Most characters of a difference, in the line that reports it."""


def find_record(
    paths: Sequence[Path], *, form: str, check: Callable[[dict[str, Any]], object]
) -> tuple[dict[str, Any] | None, str]:
    """Read the first valid file; return its record and origin, or None and the error of each file.

    form: value that a valid record has under the key "format". check: raises ValueError, KeyError or TypeError for a
    record that is not valid here.
    """
    complaints = ""
    for path in paths:
        try:
            record = parse_json(read_own(path))
            if not isinstance(record, dict) or record.get("format") != form:
                raise ValueError(f"it is not of the form {form!r}")
            check(record)
            datetime.fromisoformat(record["date"])  # it is shown
            return record, f"{complaints}{path}, measured {record['date']}"
        except FileNotFoundError:
            continue
        except OSError as error:
            complaints += f"{path} cannot be read ({error.strerror}); "
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            complaints += f"{path} is ignored ({' '.join(str(error).split())}); "
    return None, complaints


def difference_of(there: Any, here: Any, *, name: str = "it") -> str:
    """Return the first fact that differs, with its values if they are short; "" if all are equal."""
    if isinstance(here, dict) and isinstance(there, dict):
        return next(filter(None, (difference_of(there.get(key), here[key], name=key) for key in here)), "")
    if there == here:
        return ""
    values = f"{there!r} there, {here!r} here"
    return f"{name} {values}" if len(values) <= MAX_SHOWN else name


def store_record(path: Path | None, record: dict[str, Any]) -> str:
    """Write the file; return a text that says whether it was stored."""
    if path is None:
        return "not stored: there is no home folder"
    try:
        write_own(path, as_text(record).encode())
    except OSError as error:
        return f"not stored in {path}: {error.strerror}"
    return f"stored in {path} for later starts"


def as_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1) + "\n"


def from_first(communicator: Communicator, value: Any) -> Any:
    """Return rank 0's value, which must be JSON. Collective."""
    return communicator.gather(value if communicator.rank == 0 else None)[0]
