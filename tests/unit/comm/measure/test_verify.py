"""`bigbatch comm bench --verify`: drawn numbers, errors from closed forms, faults of played ranks."""

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
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.measure import bench, exactness
from bigbatch.comm.measure.exactness import (
    PRECISIONS,
    DrawnSums,
    ExactSums,
    VerifyRow,
    bound,
    different_bits,
    find_errors,
    first_of,
    grid_for,
    make_reference,
    random_terms,
)
from bigbatch.comm.measure.report import table_head, table_line
from bigbatch.comm.measure.verify import COLUMNS, make_sums, number_classes, verdict
from bigbatch.errors import CommError

CPU = torch.device("cpu")
FP32, GRID = PRECISIONS["fp32"], PRECISIONS["grid"]


# --- numbers and their exact sums ---


def mixed(word: int) -> int:
    for _ in range(2):
        word = ((word >> 16) ^ word) * 0x45D9F3B % 2**32
    return (word >> 16) ^ word


def drawn_by_hand(element: int, *, rank: int, seed: int) -> float:
    place, key = mixed(element), mixed(seed % 2**32)
    scale = mixed(place ^ mixed(key ^ 0x5EED)) % 24
    own = mixed(place ^ mixed(key ^ (0x9E3779B1 + rank) % 2**32))
    size = math.ldexp(2**23 + own % 2**23, -24 - scale - (own >> 24) % 8)
    return -size if (own >> 23) % 2 else size


def test_drawn_numbers_are_a_function_of_seed_rank_and_element() -> None:
    for rank, seed, start in ((0, 0, 0), (7, 1, 2**20 - 3), (2047, -5, 2**31)):
        numbers = random_terms(start, start + 50, rank=rank, seed=seed, device=CPU)
        assert numbers.tolist() == [drawn_by_hand(start + i, rank=rank, seed=seed) for i in range(50)]


def test_reference_is_exact_for_hundreds_of_ranks() -> None:
    num_ranks, start, stop = 300, 5, 7
    reference = make_reference(start, stop, num_ranks=num_ranks, seed=2, device=CPU)
    numbers = [random_terms(start, stop, rank=rank, seed=2, device=CPU).tolist() for rank in range(num_ranks)]
    for i, terms in enumerate(zip(*numbers, strict=True)):
        assert Fraction(float(reference.exact_S[i])) == sum(map(Fraction, terms))
        assert Fraction(float(reference.magnitude_S[i])) == sum(abs(Fraction(term)) for term in terms)
        steps = sum(round(Fraction(term) * 2**50) for term in terms)
        assert float(reference.on_grid_S[i]) == float(torch.tensor(steps).float()) / 2.0**50


def test_grid_has_room_for_any_number_of_ranks() -> None:
    assert grid_for(4).fraction_bits == grid_for(4096).fraction_bits == 50
    assert grid_for(4097).fraction_bits == 49
    assert all(grid_for(n).largest >= 1 for n in (1, 2, 4096, 4097, 100_000))


# --- errors ---


def reference_of(*exact: float, magnitude: float = 1.0, num_ranks: int = 4, start: int = 0) -> ExactSums:
    exact_S = torch.tensor(exact, dtype=torch.float64)
    return ExactSums(start, num_ranks, exact_S, torch.full_like(exact_S, magnitude), exact_S.float())


def test_errors_count_steps_of_nextafter() -> None:
    """Element 1 is three numbers up, element 2 one down, element 3 half a step from its exact sum, as it must be."""
    reference = reference_of(1.5, -2.5, 2.25, 1.0 + 2.0**-24, magnitude=100.0)
    sum_S = torch.tensor([1.5, -2.5, 2.25, 1.0])
    for _ in range(3):
        sum_S[1] = torch.nextafter(sum_S[1], torch.tensor(torch.inf))
    sum_S[2] = torch.nextafter(sum_S[2], torch.tensor(0.0))
    errors = find_errors(sum_S, reference, precision=FP32)
    assert (errors.num_elements, errors.largest_ulp, errors.total_ulp, errors.num_off) == (4, 3.0, 4.5, 2)
    assert (errors.num_beyond, errors.first_beyond) == (0, None)
    assert errors.bound_share == pytest.approx(3 * 2**-22 / (100 * 4 * 2**-24), rel=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3, 1000])
def test_bound_is_a_rounding_per_rank(num_ranks: int) -> None:
    reference = reference_of(0.25, magnitude=0.5, num_ranks=num_ranks)
    fp32 = Fraction(1, 2**24)
    assert bound(reference, FP32).item() == pytest.approx(float(((1 + fp32) ** num_ranks - 1) / 2), rel=1e-9)
    for name, eps, least in (("bf16-wire", 2**-8, 2.0**-134), ("fp16-wire", 2**-11, 2.0**-25)):
        factor = (1 + fp32) ** (num_ranks + 3) * (1 + Fraction(eps)) ** num_ranks - 1
        expected = float(factor / 2 + num_ranks * Fraction(least) * (1 + factor))
        assert bound(reference, PRECISIONS[name]).item() == pytest.approx(expected, rel=1e-9)
    steps = num_ranks * Fraction(1, 2**51)
    assert bound(reference, GRID).item() == pytest.approx(float(steps + (Fraction(1, 4) + steps) * fp32), rel=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1.001])
def test_errors_name_the_first_element_beyond_its_bound(wrong: float) -> None:
    reference = reference_of(1.0, 1.0, 1.0, start=40)
    errors = find_errors(torch.tensor([1.0, wrong, wrong]), reference, precision=FP32)
    assert errors.num_beyond == 2
    assert errors.first_beyond is not None
    element, _, exact, limit = errors.first_beyond
    assert (element, exact, limit) == (41, 1.0, pytest.approx(4 * 2**-24, rel=1e-6))
    assert errors.largest_ulp == (pytest.approx(0.001 * 2**23, rel=1e-3) if wrong == 1.001 else math.inf)


def test_bits_tell_zeros_and_nans_apart() -> None:
    a_N, b_N = torch.tensor([1.0, 0.0, math.nan, 2.0]), torch.tensor([1.0, -0.0, math.nan, 2.0])
    assert different_bits(a_N, b_N).tolist() == [False, True, False, False]
    assert first_of(different_bits(a_N, b_N)) == 1


# --- played ranks ---


Spoil = Callable[[Tensor, int, int], None]
"""(sums, rank, number of the sum): changes what a rank gets."""


class PlayedRank:
    """One rank of a job of threads, which adds what all ranks bring in a given order."""

    algorithm = "played"
    device = CPU

    def __init__(self, job: Meeting, order: Sequence[int], rank: int, spoil: Spoil) -> None:
        self.rank, self.world_size, self.order = rank, len(order), order
        self.calls = 0
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

    gather_text = gather


def good(sums_N: Tensor, rank: int, number: int) -> None:
    """Spoil nothing."""


def flip(sums_N: Tensor, element: int) -> None:
    sums_N.view(torch.int32 if sums_N.dtype == torch.float32 else torch.int64)[element] ^= 1


def play(
    spoil: Spoil = good,
    *,
    order: Sequence[int] = (0, 1, 2),
    count: int = 5000,
    precision: str = "fp32",
    pieces: int = 1,
    repetitions: int = 3,
) -> VerifyRow:
    job, num_ranks = Meeting(len(order)), len(order)

    def live(rank: int) -> VerifyRow:
        communicator: Any = PlayedRank(job, order, rank, spoil)
        drawn = DrawnSums(communicator, count=count, seed=0)
        memory_N = torch.empty(count + 1, dtype=PRECISIONS[precision].dtype)
        return drawn.repeat(
            communicator, memory_N, precision=PRECISIONS[precision], pieces=pieces, repetitions=repetitions
        )

    with ThreadPoolExecutor(num_ranks) as threads:
        first, *others = threads.map(live, range(num_ranks))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("precision", ["fp32", "grid"])
def test_good_sums_have_no_findings(precision: str) -> None:
    a, b = play(precision=precision), play(order=(2, 1, 0), precision=precision, pieces=3)
    for outcome in (a, b):
        assert (outcome.findings, outcome.ranks_agree, outcome.num_repeated) == ((), True, 3)
        assert (outcome.count, outcome.size) == (5000, 20_000)
        assert outcome.bound_share <= 1
    assert (a.sha256 == b.sha256) == (precision == "grid")
    assert ((a.largest_ulp, a.mean_ulp) == (b.largest_ulp, b.mean_ulp)) == (precision == "grid")


@pytest.mark.parametrize("portion", [1 << 20, 700])
def test_errors_over_ranks_and_portions_are_those_of_one_comparison(
    portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 5000
    monkeypatch.setattr(exactness, "PORTION", portion)
    reference = make_reference(0, count, num_ranks=3, seed=0, device=CPU)
    a_N, b_N, c_N = (random_terms(0, count, rank=rank, seed=0, device=CPU) for rank in range(3))
    expected, got = find_errors(a_N + b_N + c_N, reference, precision=FP32), play()
    assert (got.largest_ulp, got.num_off, got.bound_share, got.findings) == (
        *(expected.largest_ulp, expected.num_off, expected.bound_share, ()),
    )
    assert got.mean_ulp == pytest.approx(expected.total_ulp / count, rel=1e-12)


@pytest.mark.parametrize(("odd", "like", "element"), [(1, 0, 0), (2, 0, 4999), (0, 1, 5)])
def test_rank_with_another_bit_is_named(odd: int, like: int, element: int) -> None:
    def spoil(sums_N: Tensor, rank: int, number: int) -> None:
        if rank == odd:
            flip(sums_N, element)

    outcome = play(spoil)
    assert not outcome.ranks_agree
    assert outcome.num_repeated == 3
    assert re.search(
        naming(f"rank {odd} held other bits than rank {like}", f"element {element} rank {odd} held "),
        outcome.findings[0],
    )
    assert outcome.sha256 == play().sha256  # of most ranks


@pytest.mark.parametrize(("ranks", "named"), [((0, 2), "on ranks 0, 2,"), ((0, 1, 2), "on every rank,")])
def test_repetition_with_another_bit_is_named(ranks: tuple[int, ...], named: str) -> None:
    def spoil(sums_N: Tensor, rank: int, number: int) -> None:
        if rank in ranks and number == 1:
            flip(sums_N, 41)
            flip(sums_N, 77)

    outcome = play(spoil)
    assert (outcome.ranks_agree, outcome.num_repeated) == (True, 2)
    assert len(outcome.findings) == 1
    assert re.search(
        naming("repetition 2 gave other bits", named, "2 elements", "first of them element 41"), outcome.findings[0]
    )


def test_sum_that_lost_a_rank_is_named_with_its_element() -> None:
    lost_N = random_terms(0, 5000, rank=2, seed=0, device=CPU)

    def spoil(sums_N: Tensor, rank: int, number: int) -> None:
        if number % 2:  # the second piece, of 2500 elements
            sums_N[1500] -= lost_N[4000]

    outcome = play(spoil, pieces=2)
    assert (outcome.ranks_agree, outcome.num_repeated) == (True, 3)
    assert len(outcome.findings) == 1
    assert outcome.findings[0].startswith("played in 2 pieces, fp32, 20000: rank 2 found")
    assert re.search(naming("rank 2 found 1 of 1667", "element 4000", "ulp away", "the bound is"), outcome.findings[0])


def test_grid_that_is_a_step_off_everywhere_is_named() -> None:
    """One step of an even sum of few bits is a bit of the number that is read; a large one may hide it."""
    element = int(make_reference(0, 5000, num_ranks=3, seed=0, device=CPU).exact_S.abs().argmin())
    outcome = play(lambda sums_N, rank, number: flip(sums_N, element), precision="grid")
    assert outcome.ranks_agree
    assert re.search(naming("of 166", f"element {element}", "one sum only"), outcome.findings[0])


# --- rows and the verdict ---


def row(algorithm: str, sha256: str, *findings: str, precision: str = "fp32") -> VerifyRow:
    figures = {"largest_ulp": 1.5, "mean_ulp": 0.5, "bound_share": 0.25, "num_off": 3, "bits": 0}
    repeated = {"repetitions": 5, "num_repeated": 5, "ranks_agree": True}
    summed = {"size": 32, "count": 8, "precision": precision, "algorithm": algorithm, "pieces": 1}
    return VerifyRow(**summed, **figures, **repeated, sha256=sha256, findings=findings)


def rows_of(precision: str, **digests: str) -> list[VerifyRow]:
    return [row(name, digest, precision=precision) for name, digest in digests.items()]


def test_rows_state_figures_and_classes() -> None:
    rows = number_classes(rows_of("fp32", ring="x", native="y", doubling="x"))
    assert [each.bits for each in rows] == [1, 2, 1]
    expected = ["32", "8", "fp32", "ring", "1", "1.5", "0.5", "25", "3", "1", "5/5", "same"]
    assert table_line(COLUMNS, rows[0]).split() == expected
    differing = table_line(COLUMNS, dataclasses.replace(rows[0], ranks_agree=False, largest_ulp=None))
    assert (differing.split()[5], differing.split()[-1]) == ("inf", "DIFFER")
    assert len(table_head(COLUMNS).splitlines()[0]) == len(table_line(COLUMNS, rows[0]))


def test_verdict_counts_pairs_that_differ_at_any_size() -> None:
    """Two of four sums are alike, so 5 of 6 pairs differ; at a larger size those, too."""
    small, large = rows_of("fp32", a="x", b="x", c="y", d="z"), rows_of("fp32", a="p", b="q", c="r", d="s")
    assert "6 of 6 in fp32;" in verdict([*small, *large])
    grid = rows_of("grid", a="x", b="x", c="x", d="x")
    text = verdict([*small, *grid])
    assert re.search(naming("every sum repeats", "5 of 6 in fp32, 0 of 6 in grid", "set run.reproducible"), text)
    assert "run.reproducible" not in verdict(grid)
    assert verdict(rows_of("fp32", a="x")) == "every sum repeats its own bits, on all ranks alike, within its bound"
    assert verdict([*small, row("a", "x", "1", "2")]).startswith("FAILED: 2 finding(s)")
    assert verdict(small, num_hung=1).startswith("FAILED: 1 finding(s)")


# --- the command ---


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_process_env", lambda: SimpleNamespace(world_size=2))


SMALL = ("--max-bytes", "4K", "--algorithms", "native,ring", "--repetitions", "2")


@pytest.mark.usefixtures("alone")
def test_verify_leaves_a_table_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new/v.jsonl"
    assert main(["comm", "bench", "--verify", *SMALL, "--pieces", "1,2", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if not line.startswith("#")]
    assert [(words[2], words[3], words[4]) for words in table] == [
        (precision, name, pieces) for precision in PRECISIONS for name in ("native", "ring") for pieces in "12"
    ]
    conditions, *rows, end = [json.loads(line) for line in output.read_text().splitlines()]
    assert (conditions["kind"], conditions["backend"]) == ("conditions", "single")
    assert conditions["command"].startswith("bigbatch comm bench --verify --max-bytes 4K")
    assert {field.name for field in dataclasses.fields(VerifyRow)} == set(rows[0]) - {"kind"}
    assert [row["largest_ulp"] for row in rows if row["precision"] == "fp32"] == [0] * 4
    assert (end["kind"], end["failed"], f"# {end['text']}") == ("verdict", False, lines[-1])


@pytest.mark.usefixtures("alone")
def test_verify_fails_by_a_sum_that_does_not_repeat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = 0

    def sum_(self: Communicator, tensor_N: Tensor, *, label: str) -> Tensor:
        nonlocal sums
        sums += 1
        if self.algorithm == "ring" and sums == 4:
            flip(tensor_N, 9)
        return tensor_N

    monkeypatch.setattr(Communicator, "sum_", sum_)
    assert main(["comm", "bench", "--verify", *SMALL, "--pieces", "1", "--precisions", "fp32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("# FAILED: 1 finding(s)")
    assert lines[-2].startswith("# FAILED: ring, fp32, 4K: repetition 2 gave other bits")
    assert lines[-2].endswith("element 9")


def test_memory_is_shared_by_the_ranks_of_a_host() -> None:
    def host(local_size: int) -> Any:
        return SimpleNamespace(device=CPU, env=SimpleNamespace(local_size=local_size, host="h"))

    bench.require_memory(1 << 20, host(2), copies=17)
    with pytest.raises(CommError, match=naming("--max-bytes", "each of 1048576 ranks", "of h", "give at most")):
        bench.require_memory(1 << 20, host(1 << 20), copies=17)


def test_verify_leaves_out_what_the_backend_cannot_sum() -> None:
    """Such as Horovod, which has no bf16; if it is named, it is refused."""
    dtypes = (torch.float32, torch.float16, torch.int64)
    backend = SimpleNamespace(name="horovod", capabilities=SimpleNamespace(dtypes=dtypes))
    wires: list[Any] = []

    def with_algorithm(name: str, *, wire: Any) -> str:
        wires.append(wire.dtype)
        return name

    communicator: Any = SimpleNamespace(backend=backend, algorithms=("native",), with_algorithm=with_algorithm)

    made = make_sums(communicator, ["native"], None, reduce_dtype="fp32")
    assert [precision.name for precision, _ in made] == ["fp32", "fp16-wire", "grid"]
    assert wires == [None, torch.float16, None]
    with pytest.raises(CommError, match=naming("--precisions", "horovod cannot sum bf16-wire")):
        make_sums(communicator, ["native"], [PRECISIONS["bf16-wire"]], reduce_dtype="fp32")
