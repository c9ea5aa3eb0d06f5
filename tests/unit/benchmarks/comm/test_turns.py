"""Turns of contestants, spreads, and records."""

import json
import random
import re

import pytest
from error_texts import naming

from benchmarks.comm import (
    case_run,
    turns,
)
from benchmarks.comm.job import join
from benchmarks.record import show_record, spread
from bigbatch.errors import CommError


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {"n": 5, "median": 3, "min": 1, "q1": 2, "q3": 4, "max": 5}
    assert spread([7.0]) == {"n": 1, "median": 7, "min": 7, "q1": 7, "q3": 7, "max": 7}


def test_repetition_is_the_slowest_ranks() -> None:
    repetitions = [
        turns.Repetition((0.1, 0.4), 0.2, (100, 140)),
        turns.Repetition((0.1, 0.2), 0.2, (100, 120)),
        turns.Repetition((0.1, 0.3), 0.6, (100, 160)),
    ]
    facts = turns.describe_repetitions(repetitions, loops=2)
    assert facts["each_seconds"] == [0.2, 0.1, 0.15]
    assert facts["seconds"]["median"] == 0.15
    assert facts["cores_used"] == pytest.approx(1.0)  # of 0.5, 1 and 2
    assert facts["node_bytes"] == 70


def test_repetition_combines_ranks() -> None:
    ranks = [([0.1, 0.5], 1.0, 7), ([0.2, 0.4], 2.0, 8), ([0.0, 0.1], 3.0, 9)]
    combined = turns._combine(ranks, leaders=(0, 2))
    assert combined == turns.Repetition((0.2, 0.5), 6.0, (7, 9))
    assert combined.seconds == 0.5


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


def test_contestants_are_refused_with_the_reason() -> None:
    left_out = {"horovod": "Horovod is not installed"}
    assert case_run.choose_contestants(None, ["a", "b"], left_out=left_out) == ("a", "b")
    assert case_run.choose_contestants("b,a,b", ["a", "b"], left_out=left_out) == ("b", "a")
    with pytest.raises(CommError, match=naming("--contestants", "horovod", left_out["horovod"])):
        case_run.choose_contestants("a,horovod", ["a"], left_out=left_out)
    with pytest.raises(CommError, match=naming("--contestants", "'c'", "a, horovod")):
        case_run.choose_contestants("c", ["a"], left_out=left_out)


def test_record_is_short_and_readable() -> None:
    record = {"x": 1.23456789e-5, "each": [1.0, 2.5, 1e-7], "rows": [{"names": ["a", "b"]}], "none": None, "bits": []}
    text = show_record(record)
    assert '"each": [ 1.0, 2.5, 1e-07 ]' in text
    assert json.loads(text) == record | {"x": 1.23457e-5}
