"""Time that ranks lose to slower ones."""

import pytest

from bigbatch.trainer.step.stragglers import straggler_hint, straggler_share


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
