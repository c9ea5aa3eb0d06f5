"""A rank's window travels as numbers: what comes back is what was sent, and sums over ranks keep each rank's shares."""

from dataclasses import fields, replace

import pytest
import torch

from bigbatch.trainer.step.window import WindowSums

SHARES = ("waited_P", "exposed_P")
SCALARS = {
    field.name: float(place) for place, field in enumerate(fields(WindowSums), start=1) if field.name not in SHARES
}
FIRST = WindowSums(**SCALARS, waited_P=(0.25, 0.0, 0.0), exposed_P=(0.5, 0.0, 0.0))
CPU = torch.device("cpu")


def test_window_sums_come_back_from_their_pack() -> None:
    assert WindowSums.unpack(FIRST.pack(CPU)) == FIRST


def test_window_sums_over_ranks_keep_the_shares_of_each() -> None:
    second = WindowSums(**SCALARS, waited_P=(0.0, 0.125, 0.0), exposed_P=(0.0, 0.75, 0.0))
    found = WindowSums.unpack(FIRST.pack(CPU) + second.pack(CPU))
    assert (found.waited_P, found.exposed_P) == ((0.25, 0.125, 0.0), (0.5, 0.75, 0.0))
    assert {name: getattr(found, name) for name in SCALARS} == {name: 2 * each for name, each in SCALARS.items()}


def test_window_sums_tell_the_share_that_the_grid_lost() -> None:
    assert replace(FIRST, num_lost=3.0, num_nonzero=12.0).grid_underflow_fraction == 0.25
    assert replace(FIRST, num_nonzero=0.0).grid_underflow_fraction is None


def test_window_sums_refuse_numbers_that_are_not_of_whole_ranks() -> None:
    with pytest.raises(AssertionError):
        WindowSums.unpack(FIRST.pack(CPU)[:-1])
