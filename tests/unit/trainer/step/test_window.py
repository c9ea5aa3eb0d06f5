"""A rank's window travels as numbers: what comes back is what was sent, and sums over ranks keep each rank's shares."""

from dataclasses import fields

import pytest
import torch

from bigbatch.trainer.step.window import WindowSums, straggler_hint, straggler_share

SHARES = ("waited_P", "exposed_P")
SCALARS = {
    field.name: float(place) for place, field in enumerate(fields(WindowSums), start=1) if field.name not in SHARES
}
FIRST = WindowSums(**SCALARS, waited_P=(0.25, 0.0, 0.0), exposed_P=(0.5, 0.0, 0.0))
CPU = torch.device("cpu")


def test_window_sums_over_ranks_keep_the_shares_of_each() -> None:
    assert WindowSums.unpack(FIRST.pack(CPU)) == FIRST
    second = WindowSums(**SCALARS, waited_P=(0.0, 0.125, 0.0), exposed_P=(0.0, 0.75, 0.0))
    found = WindowSums.unpack(FIRST.pack(CPU) + second.pack(CPU))
    assert (found.waited_P, found.exposed_P) == ((0.25, 0.125, 0.0), (0.5, 0.75, 0.0))
    assert {name: getattr(found, name) for name in SCALARS} == {name: 2 * each for name, each in SCALARS.items()}


@pytest.mark.parametrize(
    ("waited", "exposed", "share"),
    [
        ((0.0,), (0.0,), 0.0),
        ((0.1, 0.1), (0.2, 0.2), 0.0),  # the wire alone
        ((0.5, 0.0), (0.1, 0.6), 0.0),  # rank 0 waits for images, rank 1 for rank 0
        ((0.0, 0.0), (0.1, 0.5), 0.2),  # rank 0 computes for longer
        ((0.5, 0.0), (0.1, 0.1), 0.0),  # no negative share where it does not add up
    ],
)
def test_straggler_shares_by_hand(waited: tuple[float, ...], exposed: tuple[float, ...], share: float) -> None:
    assert straggler_share(waited, exposed) == pytest.approx(share)


def test_straggler_is_named_where_it_matters() -> None:
    def host_of(rank: int) -> str:
        return f"n{rank}"

    assert straggler_hint(0.05, [0, 9], host_of=host_of) is None
    assert straggler_hint(0.12, [0, 9, 1], host_of=host_of) == (
        "steps lose 12% of their time to slower ranks, most to rank 1 on n1: bigbatch launch preflight compares the "
        "nodes"
    )
