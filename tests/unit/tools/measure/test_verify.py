"""`bigbatch comm bench --verify`: numbers with an exact sum, bounds from closed forms, faults of played ranks."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from thread_ranks import Meeting
from torch import Tensor

from bigbatch.cli import main
from bigbatch.comm.backends.in_flight import LateError
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.errors import CommError
from bigbatch.tools.measure import bench
from bigbatch.tools.measure.hangs import HungError, limited
from bigbatch.tools.measure.report import table_head, table_line
from bigbatch.tools.measure.timing import slowest
from bigbatch.tools.measure.verify import COLUMNS, VerifyRow, bound, draw, factor_of, verify

CPU = torch.device("cpu")


def test_terms_are_exact_in_fp32_and_their_sums_in_float64() -> None:
    numbers_N, factors = draw(20, seed=3, device=CPU), [factor_of(rank) for rank in range(2048)]
    assert len({*factors}) > 100
    assert all(2**-7 <= abs(each) < 2 for each in factors)
    assert all(1 <= abs(each) < 2 for each in numbers_N.tolist())
    for factor in factors[:100]:
        assert (numbers_N * factor).tolist() == [each * factor for each in numbers_N.tolist()]
    for each, exact in zip(numbers_N.tolist(), (numbers_N.double() * math.fsum(factors)).tolist(), strict=True):
        assert Fraction(exact) == sum(Fraction(each) * Fraction(factor) for factor in factors)
    assert len({*draw(20, seed=4, device=CPU).tolist()} - {*numbers_N.tolist()}) > 15


@pytest.mark.parametrize("num_ranks", [2, 3, 1000])
def test_bound_is_a_rounding_per_rank(num_ranks: int) -> None:
    fp32 = Fraction(1, 2**24)
    assert bound(num_ranks, wire_dtype=None) == pytest.approx(float((1 + fp32) ** num_ranks - 1), rel=1e-9)
    for dtype, eps in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        expected = float((1 + fp32) ** (num_ranks + 3) * (1 + Fraction(eps)) ** num_ranks - 1)
        assert bound(num_ranks, wire_dtype=dtype) == pytest.approx(expected, rel=1e-9)


Spoil = Callable[[Tensor, int, int], None]
"""(sums, rank, number of the sum): changes what a rank gets."""


class PlayedRank:
    """One rank of a job of threads, which adds what all ranks bring in a given order."""

    algorithm = "played"
    wire = SimpleNamespace(dtype=None)

    def __init__(self, job: Meeting, order: Sequence[int], rank: int, spoil: Spoil) -> None:
        self.rank, self.world_size, self.order = rank, len(order), order
        self.calls, self.timeout_seconds = 0, 60.0
        order = SimpleNamespace(start_held=lambda: None)
        self.connection = SimpleNamespace(rank=rank, order=order, control=self, backend=self, gather=self.gather)
        self.detector = SimpleNamespace(begin=lambda: None)
        self._job, self._spoil = job, spoil

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor:
        parts = self._job.exchange(self.rank, tensor_N.clone())
        tensor_N.zero_()
        for rank in self.order:
            tensor_N += parts[rank]
        self._spoil(tensor_N, self.rank, self.calls)
        self.calls += 1
        return tensor_N

    def gather(self, value: Any) -> list[Any]:
        return self._job.exchange(self.rank, value)

    def limit(self, seconds: float | None) -> None:
        """Take part in a protocol."""

    def num_submitted(self) -> int:
        return self.calls

    def restart(self, *, num_missed: int) -> None:
        self.calls += num_missed

    def collect_text(self, text: str, *, what: str) -> list[str]:
        everyone = self._job.exchange(self.rank, text)
        return everyone if self.rank == 0 else []

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str:
        told: str = self._job.exchange(self.rank, text)[0]
        assert len(told) < 1000, "no rank reads what each of the others measured"
        return told


@pytest.mark.parametrize("late_rank", [0, 2])
def test_all_ranks_learn_which_sum_hangs_on_one(late_rank: int) -> None:
    job = Meeting(3)

    def measure(connection: Any) -> None:
        with limited(connection):
            if connection.rank == late_rank:
                raise LateError(Pending(1, "a sum by ring", 0.0))
            slowest([1.0], connection)

    def live(rank: int) -> str:
        with pytest.raises(HungError) as caught:
            measure(PlayedRank(job, (0, 1, 2), rank, good).connection)
        return caught.value.algorithm

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(live, range(3))] == ["ring"] * 3


def good(sums_N: Tensor, rank: int, number: int) -> None:
    """Spoil nothing."""


def flip(sums_N: Tensor, element: int) -> None:
    sums_N.view(torch.int32)[element] ^= 1


def play(spoil: Spoil = good, *, order: Sequence[int] = (0, 1, 2, 3, 4), count: int = 5000) -> VerifyRow:
    job = Meeting(len(order))

    def live(rank: int) -> VerifyRow:
        communicator: Any = PlayedRank(job, order, rank, spoil)
        return verify(communicator, torch.empty(count), draw(count, seed=0, device=CPU), repetitions=3)

    with ThreadPoolExecutor(len(order)) as threads:
        first, *others = threads.map(live, range(len(order)))
    assert all(other == first for other in others)
    return first


def test_good_sums_have_no_findings_and_the_errors_of_their_order() -> None:
    a, b = play(), play(order=(4, 2, 0, 3, 1))
    for outcome in (a, b):
        assert (outcome.findings, outcome.ranks_agree, outcome.num_repeated) == ((), True, 3)
        assert (outcome.count, outcome.size) == (5000, 20_000)
        assert 0 < outcome.bound_share <= 1
    assert a.largest_error != b.largest_error


@pytest.mark.parametrize("ranks", [(1,), (2, 4), (0,)])
def test_ranks_with_another_bit_are_named(ranks: tuple[int, ...]) -> None:
    outcome = play(lambda sums_N, rank, number: flip(sums_N, 4999) if rank in ranks else None)
    assert (outcome.ranks_agree, outcome.num_repeated) == (False, 3)
    (finding,) = outcome.findings
    assert finding.startswith(
        f"played, 20000: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} got other bits"
    )


@pytest.mark.parametrize(("ranks", "named"), [((0, 2), "on ranks 0, 2"), ((0, 1, 2, 3, 4), "on ranks 0, 1, 2, 3, 4")])
def test_repetition_with_another_bit_is_named(ranks: tuple[int, ...], named: str) -> None:
    outcome = play(lambda sums_N, rank, number: flip(sums_N, 41) if rank in ranks and number == 1 else None)
    assert (outcome.ranks_agree, outcome.num_repeated) == (True, 2)
    assert outcome.findings == (f"played, 20000: repetitions gave other bits than the first sum {named}",)


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf])
def test_wrong_element_is_named_with_the_exact_sum(wrong: float | None) -> None:
    """Such as one that lacks a rank's term."""
    number = draw(5000, seed=0, device=CPU)[4000].item()

    def spoil(sums_N: Tensor, rank: int, call: int) -> None:
        sums_N[4000] = sums_N[4000] - number * factor_of(2) if wrong is None else wrong

    outcome = play(spoil)
    assert (outcome.ranks_agree, outcome.num_repeated, len(outcome.findings)) == (True, 3, 5)
    exact = number * math.fsum(map(factor_of, range(5)))
    assert re.search(naming("rank 0: element 4000 is ", f"the exact sum {exact:.9g}"), outcome.findings[0])
    assert (outcome.largest_error is None) == (wrong is not None)


def test_rows_state_figures() -> None:
    row = VerifyRow(32, 8, "ring", 1.5e-7, 0.25, repetitions=5, num_repeated=5, ranks_agree=True, findings=())
    assert table_line(COLUMNS, row).split() == ["32", "8", "ring", "1.50e-07", "25", "5/5", "same"]
    differing = table_line(COLUMNS, dataclasses.replace(row, ranks_agree=False, largest_error=None))
    assert (differing.split()[3], differing.split()[-1]) == ("inf", "DIFFER")
    assert len(table_head(COLUMNS).splitlines()[0]) == len(table_line(COLUMNS, row))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_process_env", lambda: SimpleNamespace(world_size=2))


SMALL = ("--max-bytes", "4K", "--algorithms", "native,ring", "--repetitions", "2")


@pytest.mark.usefixtures("alone")
def test_verify_leaves_a_table_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new/v.jsonl"
    assert main(["comm", "bench", "--verify", *SMALL, "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if not line.startswith("#")] == ["native", "ring"]
    conditions, *rows, end = [json.loads(line) for line in output.read_text().splitlines()]
    assert (conditions["kind"], conditions["backend"]) == ("conditions", "single")
    assert conditions["command"].startswith("bigbatch comm bench --verify --max-bytes 4K")
    assert {field.name for field in dataclasses.fields(VerifyRow)} == set(rows[0]) - {"kind"}
    assert [row["largest_error"] for row in rows] == [0, 0]
    assert (end["kind"], end["failed"], f"# {end['text']}") == ("verdict", False, lines[-1])


@pytest.mark.usefixtures("alone")
def test_verify_fails_by_a_sum_that_does_not_repeat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sum_(self: Communicator, tensor_N: Tensor, *, label: str) -> Tensor:
        if self.algorithm == "ring" and "sum 1" in label:
            flip(tensor_N, 9)
        return tensor_N

    monkeypatch.setattr(Communicator, "sum_", sum_)
    assert main(["comm", "bench", "--verify", *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("# FAILED: 1 finding(s)")
    assert lines[-2] == "# FAILED: ring, 4K: repetitions gave other bits than the first sum on rank 0"


def test_memory_is_shared_by_the_ranks_of_a_host() -> None:
    def host(local_size: int) -> Any:
        return SimpleNamespace(device=CPU, env=SimpleNamespace(local_size=local_size, host="h"))

    bench.require_memory(1 << 20, host(2), copies=17)
    with pytest.raises(CommError, match=naming("--max-bytes", "each of 1048576 ranks", "of h", "give at most")):
        bench.require_memory(1 << 20, host(1 << 20), copies=17)
