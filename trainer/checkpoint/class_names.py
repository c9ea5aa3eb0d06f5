"""Class names in checkpoints, in the order of the labels, and their comparison with a data set's."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from bigbatch.errors import CheckpointError, DamagedCheckpoint, shortened
from bigbatch.trainer.config.file import read_dumped

KEPT_AS = "classes"
"""Key of a checkpoint's state."""


def digest(names: Sequence[str]) -> str:
    """Return the SHA-256 of the names as a JSON list in the order of the labels."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def describe(names: Sequence[str] | None) -> str:
    """Return the class names' digest as text, which ranks compare."""
    return "no class names" if names is None else f"class names of SHA-256 {digest(names)}"


def to_keep(names: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the checkpoint's entry for the class names; None for data without names."""
    return None if names is None else {"names": list(names), "sha256": digest(names)}


def kept_names(state: Mapping[str, Any], *, source: str) -> tuple[str, ...] | None:
    """Return the class names in a checkpoint's state; None for data without names.

    Raises: DamagedCheckpoint if their number or digest is wrong.
    """
    kept = state.get(KEPT_AS)
    if kept is None:
        return None
    names = kept.get("names") if isinstance(kept, Mapping) else None
    found = require_names(names, num_classes=read_dumped(state["config"])["data.num_classes"], source=source)
    if kept.get("sha256") != digest(found):
        raise DamagedCheckpoint(f"{source} is damaged: its class names have another SHA-256 than it states")
    return found


def require_names(names: object, *, num_classes: int, source: str) -> tuple[str, ...]:
    """Return the names. Raises: DamagedCheckpoint unless they are num_classes different texts."""
    listed = tuple(names) if isinstance(names, list | tuple) else ()
    if all(isinstance(name, str) for name in listed) and len(listed) == len(set(listed)) == num_classes:
        return listed
    raise DamagedCheckpoint(
        f"{source} is damaged: its class names are {shortened(names)}, not a list of {num_classes} different names"
    )


def require_same_names(trained: Sequence[str], found: Sequence[str], *, source: str, root: str, remedy: str) -> None:
    """Raise CheckpointError with the first difference if the data in root has other class names than source."""
    for label, (there, here) in enumerate(zip_longest(trained, found)):
        if there != here:
            raise CheckpointError(
                f"the classes in {root} are not those of {source}: label {label} is {_named(there)} there and "
                f"{_named(here)} here. {remedy}"
            )


def _named(name: str | None) -> str:
    return "no class" if name is None else shortened(name)
