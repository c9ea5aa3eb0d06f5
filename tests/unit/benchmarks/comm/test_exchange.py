"""The exchange benchmark sees wrong sums."""

import pytest
import torch
from error_texts import naming

from benchmarks.comm import entries, exchange
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
        entries.no_table_yet(torch.ones(1))
    job.communicator.close()
