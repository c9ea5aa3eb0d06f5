"""What a run has cost over all of its starts, by hand."""

import math
from typing import Any

import pytest

from bigbatch.trainer.report.cost import Spent, durations, total_spent

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
        # six ranks continued half an hour after the last record, in the same processes
        ([start(3, 8), passed(4, 5.0), start(4.5, 6) | {"is_healed": True}, passed(5, 7.0)], Spent(2, 14, 12)),
        # the time of day was set ten days ahead, and back, in the first start; the second one lasted for half an hour
        (
            [
                start(3, 8) | {"elapsed_seconds": 1.0},
                passed(243, 1.0) | {"elapsed_seconds": 1801.0},
                passed(4, 1.0) | {"elapsed_seconds": 3601.0},
                start(9, 2) | {"elapsed_seconds": 2.0},
                passed(9.7, 1.0) | {"elapsed_seconds": 1802.0},
            ],
            Spent(1.5, 9, 3),
        ),
    ],
)
def test_cost_starts_add_up(records: list[dict[str, Any]], spent: Spent) -> None:
    assert total_spent(records) == spent


@pytest.mark.parametrize("time", ["x", True, math.nan, 10**400])
def test_records_without_a_time_that_is_one_are_left_out(time: object) -> None:
    good = [{"kind": "start", "time": 1.0, "job": {}}, {"kind": "eval", "time": 3.0}]
    damaged = {"kind": "eval", "time": time}
    assert list(durations([good[0], damaged, {"kind": "eval"}, good[1]])) == [(good[0], 0.0), (good[1], 2.0)]
