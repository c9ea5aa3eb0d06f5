"""The class names that a run keeps in its checkpoints, in the order of the labels; whether a data set has the same."""

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
    """Return the SHA-256 of a label mapping: of its names, in the order of the labels, as a list in JSON."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def describe(names: Sequence[str] | None) -> str:
    """Return what ranks compare of the class names of what they read."""
    return "no class names" if names is None else f"class names of SHA-256 {digest(names)}"


def to_keep(names: Sequence[str] | None) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of the class names; None for data that has none."""
    return None if names is None else {"names": list(names), "sha256": digest(names)}


def kept_names(state: Mapping[str, Any], *, source: str) -> tuple[str, ...] | None:
    """Return the class names that a checkpoint's state keeps; None if it keeps none, as in older releases.

    Raises: DamagedCheckpoint unless they are as many as the run had classes, and have the digest beside them.
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
    """Return the names. Raises: DamagedCheckpoint unless they are a list of num_classes different texts."""
    listed = tuple(names) if isinstance(names, list | tuple) else ()
    if all(isinstance(name, str) for name in listed) and len(listed) == len(set(listed)) == num_classes:
        return listed
    raise DamagedCheckpoint(
        f"{source} is damaged: its class names are {shortened(names)}, not a list of {num_classes} different names"
    )


def require_same_names(trained: Sequence[str], found: Sequence[str], *, source: str, root: str, remedy: str) -> None:
    """Raise CheckpointError, with the first difference, unless the data in root has the names that source has."""
    for label, (there, here) in enumerate(zip_longest(trained, found)):
        if there != here:
            raise CheckpointError(
                f"the classes in {root} are not those of {source}: label {label} is {_named(there)} there and "
                f"{_named(here)} here. {remedy}"
            )


def _named(name: str | None) -> str:
    return "no class" if name is None else shortened(name)
