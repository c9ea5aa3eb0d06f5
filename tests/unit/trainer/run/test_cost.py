"""What a run has cost over all of its starts, by hand."""

from typing import Any

import pytest

from bigbatch.trainer.run.cost import Spent, spent_in_all

HOUR = 3600.0


def start(hour: float, ranks: int) -> dict[str, Any]:
    return {"kind": "start", "time": HOUR * hour, "job": {"world_size": ranks}}


def passed(hour: float, joules: float | None) -> dict[str, Any]:
    return {"kind": "train", "time": HOUR * hour, "energy_joules": joules}


@pytest.mark.parametrize(
    ("records", "spent"),
    [
        ([], Spent(0, 0, 0)),
        ([start(3, 8), passed(4, 5.0), {"kind": "eval", "time": HOUR * 4.5}], Spent(1.5, 12, 5)),
        # the second start, five hours later, has twice the ranks
        ([start(3, 8), passed(4, 5.0), start(9, 16), passed(9.5, 7.0)], Spent(1.5, 16, 12)),
        ([start(3, 8), passed(4, None), start(9, 16), passed(9.5, 7.0)], Spent(1.5, 16, None)),
    ],
)
def test_cost_starts_add_up(records: list[dict[str, Any]], spent: Spent) -> None:
    assert spent_in_all(records) == spent
