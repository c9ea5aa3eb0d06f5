"""A form of the all-reduce that hangs on one rank is named and left out; the others are measured by the same job."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import places
from test_parallel import fork_job, run_forked

from bigbatch.cli import main
from bigbatch.comm import communicator as connected
from bigbatch.comm.algorithms.by_name import make_allreduce
from bigbatch.comm.connect import connect
from bigbatch.errors import FAILED
from bigbatch.tools.measure.sizes import measure_sums, sizes_up_to

pytestmark = pytest.mark.long

TIMEOUT_SECONDS = 16.0
"""The job's; a form has a quarter of it."""


def hang_in_ring(least_bytes: int) -> None:
    """Let rank 1 never begin a ring of so many bytes."""

    def make(algorithm: str, **options: Any) -> Any:
        all_reduce_ = make_allreduce(algorithm, **options)

        def on_rank_1(tensor_N: Any) -> None:
            if algorithm == "ring" and options["backend"].rank == 1 and tensor_N.nbytes >= least_bytes:
                threading.Event().wait()
            all_reduce_(tensor_N)

        return on_rank_1

    connected.make_allreduce = make  # type: ignore[attr-defined]


def bench(*command: str) -> int:
    hang_in_ring(least_bytes=16384)
    return main(["comm", "bench", *command])


def measure_and_sum(backend: str) -> int:
    hang_in_ring(least_bytes=0)
    with connect(backend=backend, timeout_seconds=TIMEOUT_SECONDS) as communicator:
        start, sizes = time.perf_counter(), sizes_up_to(4096)
        found = measure_sums(communicator, sizes, dtype=torch.float32, seconds=5.0, start=start)
        chosen = communicator.with_algorithm("auto", table=found.table)
        tensor_N = chosen.allocate(1024, torch.float32)
        assert chosen.sum_(tensor_N.fill_(communicator.rank + 1), label="sum").tolist() == [3.0] * 1024
        assert found.times
        assert all("ring" not in at_size for at_size in found.times.values())
        print(f"rank {communicator.rank}: {found.hung['ring']}", flush=True)
    return 0


@pytest.mark.parametrize("backend", ["tcp", pytest.param("gloo", marks=pytest.mark.weekly)])
def test_bench_goes_on_without_a_form_that_hangs(backend: str, tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    command = ("--backend", backend, "--min-bytes", "4K", "--max-bytes", "64K", "--repetitions", "2")
    command = (*command, "--timeout-seconds", f"{TIMEOUT_SECONDS}", "--output", str(output))
    text = run_forked(2, command, target="test_hung_forms:bench")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    measured = {(row["size"], row["algorithm"]) for row in rows if row["kind"] == "row"}
    others = {"native", "hierarchical", "sharded", "doubling"}
    sizes = sorted({size for size, _ in measured})
    assert {name for size, name in measured if size == sizes[0]} == {*others, "ring"}
    for size in sizes[1:]:
        assert {name for each, name in measured if each == size} == others
    assert len(sizes) == 3
    (line,) = [line for line in text.splitlines() if "hangs" in line]
    assert line.startswith("# ring hangs: a sum did not end within 4 s"), line


@pytest.mark.parametrize("backend", ["tcp", pytest.param("gloo", marks=pytest.mark.weekly)])
def test_verify_goes_on_without_a_form_that_hangs_and_fails(backend: str, tmp_path: Path) -> None:
    output = tmp_path / "verify.jsonl"
    command = ("--verify", "--backend", backend, "--min-bytes", "4K", "--max-bytes", "64K", "--factor", "16")
    command = (*command, "--repetitions", "2")
    command = (*command, "--timeout-seconds", f"{TIMEOUT_SECONDS}", "--output", str(output))
    code, text = fork_job("test_hung_forms:bench", command, places(2), timeout_seconds=250)
    assert code == FAILED, text
    *rows, last = [json.loads(line) for line in output.read_text().splitlines()][1:]
    others = {"native", "hierarchical", "sharded", "doubling"}
    of_size = [{row["algorithm"] for row in rows if row["size"] == size} for size in (4096, 65536)]
    assert of_size == [{*others, "ring"}, others]
    (line,) = [line for line in text.splitlines() if "hangs" in line]
    assert line.startswith("# FAILED: ring hangs: a sum did not end within 4 s"), line
    assert last["failed"]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("tcp", marks=pytest.mark.weekly)])
def test_a_table_is_measured_of_the_forms_that_do_not_hang(backend: str) -> None:
    text = run_forked(2, (backend,), target="test_hung_forms:measure_and_sum")
    assert text.count("ring hangs: a sum did not end within 4 s") == 2
