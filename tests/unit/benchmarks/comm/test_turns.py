"""Turns of contestants, spreads, and records."""

import random
import re

from benchmarks.comm import turns
from benchmarks.comm.job import join


def test_turns_interleave_and_rounds_stay_together() -> None:
    """Two of each in turn, the peer's in one round; in one process."""
    said: list[str] = []
    job = join(interface=None)
    single = turns.Contestant("a", lambda: said.append("a"))
    peer = turns.Contestant(
        "b",
        lambda: said.append("b"),
        prepare=lambda: said.append("prepare"),
        finish=lambda: said.append("finish"),
        enter=lambda: said.append("enter"),
        leave=lambda: said.append("leave"),
        round=2,
    )
    measured = turns.take_turns(job, [single, peer], repetitions=3)
    letters = "".join(word[0] for word in said)
    assert sorted(re.findall("epbfpbfl|epbfl|a", letters)) == ["a", "a", "a", "epbfl", "epbfpbfl"]
    assert re.fullmatch("(a?epbfpbfla?)a(a?epbfla?)", letters)
    orders = ["".join(c.name for c in random.Random(turn).sample([single, peer], 2)) for turn in range(20)]
    assert set(orders) == {"ab", "ba"}
    assert [len(measured[name]) for name in "ab"] == [3, 3]
    job.communicator.close()
