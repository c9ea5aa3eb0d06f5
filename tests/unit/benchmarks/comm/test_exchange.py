"""Sizes and choices of the exchange benchmarks, and that they see wrong sums."""

from dataclasses import replace

import pytest
import torch
from error_texts import naming

from benchmarks.comm import (
    entries,
    exchange,
    ways,
)
from benchmarks.comm.job import join
from bigbatch.errors import CommError


def test_exchange_measures_a_size_and_sees_wrong_sums() -> None:
    """In one process, whose sum is its own tensor."""
    job = join(interface=None)
    options = exchange.parse(["--out", "x.json", "--repetitions", "2", "--seconds-per-size", "9"])
    racing = {"gloo": entries.Entry(lambda tensor_N: None, "plain")}
    rows = exchange.measure_size(job, racing, {"plain": torch.ones(100)}, size=400, options=options)
    assert [(r["contestant"], r["num_wrong"], r["seconds"]["n"], r["loops"]) for r in rows] == [("gloo", 0, 2, 50)]
    racing["mpi"] = entries.Entry(lambda tensor_N: tensor_N.add_(1), "plain")
    with pytest.raises(CommError, match=naming("400 bytes", "gloo, mpi")):
        exchange.measure_size(job, racing, {"plain": torch.ones(100)}, size=400, options=options)
    entry = entries.Entry(lambda tensor_N: tensor_N[7:9].add_(1), "plain")
    assert exchange.check(job, "mpi", entry, torch.ones(100))[1] == 2
    with pytest.raises(AssertionError, match=naming("table")):
        entries.nobody(torch.ones(1))
    job.communicator.close()


def test_ways_of_one_rank_give_right_sums_and_see_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, whose sums are its own gradients."""
    monkeypatch.setattr(ways, "parameter_shapes", lambda model: {"a": (5,), "b": (12, 3, 2), "c": (40, 30)})
    job = join(interface=None)
    for name, chosen in ways.WAYS.items():
        settings = {way: replace(each, algorithm="ring") for way, each in chosen.items()}
        found = ways.measure(job, "tiny", settings, repetitions=2)
        assert [(row["way"], row["num_wrong"], row["seconds"]["n"]) for row in found["rows"]] == [
            (way, 0, 2) for way in ways.WAYS[name]
        ]
        assert (found["num_tensors"], found["num_bytes"]) == (3, 4 * (5 + 72 + 1200))
    monkeypatch.setattr(ways, "count_wrong", lambda parameters, expected: 2)
    wrong = ways.measure(job, "tiny", {"ring": ways.Way("ring", None)}, repetitions=1)
    assert wrong["rows"][0]["num_wrong"] == 2
    job.communicator.close()
