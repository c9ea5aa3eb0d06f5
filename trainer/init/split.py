"""Split images into training and validation: a share of each class, by a hash of path and seed."""

import hashlib
import os
from collections.abc import Mapping, Sequence


def split_classes(
    by_class: Mapping[str, Sequence[str]], *, val_share: float, seed: int
) -> dict[str, dict[str, list[str]]]:
    """Return {"train": ..., "val": ...} by class: of each class the share of its images with the lowest hashes.

    The hash is of (seed, path). A class of two or more has one at least in both splits; a class of one trains.
    """
    splits: dict[str, dict[str, list[str]]] = {"train": {}, "val": {}}
    for name, paths in by_class.items():
        ranked = sorted(paths, key=lambda path: _draw(path, seed))
        num_val = min(len(paths) - 1, max(1, round(val_share * len(paths))))
        splits["val"][name], splits["train"][name] = ranked[:num_val], ranked[num_val:]
    return splits


def _draw(path: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}/".encode() + os.fsencode(path), digest_size=16).digest()
