"""The simulator's predictions for a sweep's points, as `bigbatch sweep --predict` recorded them in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.trainer.folder.folder import RunDir, read_recorded
from bigbatch.words import is_number

NAME = "predicted.json"


@dataclass(frozen=True)
class PredictedRate:
    """Images per second of a point, with a 90% interval."""

    rate: float
    low: float
    high: float


def write_predictions(folder: Path, rates: Mapping[int, PredictedRate], *, cluster: str) -> None:
    """Record predictions by the point's number. Raises: RunFolderError."""
    points = {str(number): vars(each) for number, each in rates.items()}
    RunDir(folder).write_json(folder / NAME, {"cluster": cluster, "points": points})


def read_predictions(folder: Path) -> dict[int, PredictedRate]:
    """Read recorded predictions; empty if there are none. Raises: RunFolderError if they are damaged."""
    return read_recorded(folder / NAME, _parse, remedy="repeat the sweep with --predict") or {}


def _parse(record: Any) -> dict[int, PredictedRate]:
    found = {int(number): PredictedRate(**each) for number, each in record["points"].items()}
    for number, each in found.items():
        if number < 0 or not all(map(is_number, vars(each).values())) or not 0 < each.low <= each.rate <= each.high:
            raise ValueError("rates that are not in order")
    return found
