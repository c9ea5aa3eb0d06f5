"""`bigbatch comm bench`: sizes, formulas, wrong values counted, and the command in a world of one."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor

from benchmarks.comm import messages
from bigbatch.cli import main
from bigbatch.comm.algorithms.by_name import make_allreduce
from bigbatch.comm.algorithms.hybrid import MeasuredTimes
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Capabilities, Group, InFlight
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.errors import FAILED, REFUSED
from bigbatch.tools.measure import bench as command
from bigbatch.tools.measure import figures as bench
from bigbatch.tools.measure import timing
from bigbatch.tools.measure.figures import BenchRow, Limit, plot_sweep
from bigbatch.tools.measure.report import table_head, table_line
from bigbatch.tools.measure.timing import (
    PERIOD,
    AllReduceTimes,
    TimeBudget,
    count_different,
    expected_pattern,
    fill_,
    limit_of,
    rank_pattern,
    time_sums,
)
from bigbatch.words import NumberError

ROOT = Path(__file__).resolve().parents[4]


def row(
    algorithm: str = "ring", *, count: int = 25_000_000, seconds: float = 0.1, limit: Limit | None = None
) -> BenchRow:
    sums = AllReduceTimes(MeasuredTimes((seconds, seconds / 2, 2 * seconds)), num_wrong=0)
    wire = Wire(torch.float16 if limit and limit.wire_bytes_per_byte == 0.5 else None)
    backend = SimpleNamespace(name="tcp", capabilities=Capabilities(("meta",)))
    transport = SimpleNamespace(backend=backend)
    ranks: Any = SimpleNamespace(algorithm=algorithm, world_size=8, wire=wire, transport=transport)
    ranks.algorithm_for = lambda tensor_N: algorithm
    return bench.make_row(sums, torch.empty(count, device="meta"), ranks, limit=limit)


# --- sizes and choices ---


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("1", 1), ("8B", 8), ("1k", 1024), ("4KB", 4096), ("4KiB", 4096), ("25M", 25 << 20), ("3G", 3 << 30)),
    ],
)
def test_parse_bytes_has_units_of_powers_of_1024(text: str, num_bytes: int) -> None:
    assert bench.parse_bytes(text) == num_bytes
    assert bench.parse_bytes(bench.show_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "0K", "-1", "1.5M", "M", "1T", "1 0", "٣"])
def test_parse_bytes_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(NumberError, match=naming(f"{text!r} ", "4K")):
        bench.parse_bytes(text)


# --- figures ---


def test_table() -> None:
    limit = Limit(num_nodes=4, bytes_per_second=25e6, source="as given")
    rows = [row("ring", seconds=8.0, limit=limit), row("native", seconds=10.0, limit=limit)]
    titles, units = table_head(bench.COLUMNS).splitlines()
    first, second = (table_line(bench.COLUMNS, row) for row in bench.mark_fastest(rows))
    assert " ".join(titles.split()) == "# size count type redop algorithm time min max algbw busbw #wrong n of limit"
    assert " ".join(units.split()) == "# (B) (elements) (us) (us) (us) (GB/s) (GB/s) (%)"
    assert " ".join(first.split()) == (
        "100000000 25000000 float32 sum ring* 8000000 4000000 16000000 0.013 0.022 0 3 75.0"
    )
    assert second.split()[4] == "native"
    assert len({len(line) for line in (titles, units, first, second)}) == 1  # aligned to the right
    assert table_line(bench.COLUMNS, row()).split()[-1] == "-"


class BytesBackend(messages.CountingBackend):
    """Counts the bytes of the one collective of its own, too, as if it were a ring over two ranks."""

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        self.message_bytes += tensor_N.nbytes


@pytest.mark.parametrize("rounds_each_addition", [True, False])
@pytest.mark.parametrize("wire", [Wire(torch.float16), Wire(torch.float16, in_fp32=False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["native", "ring", "hierarchical", "sharded", "doubling"])
def test_limit_goes_by_the_bytes_that_travel(
    algorithm: str, dtype: torch.dtype, wire: Wire, rounds_each_addition: bool
) -> None:
    """Between two nodes of a rank each everything sends 2(m-1)/m = 1 times the tensor, counted as it runs."""
    capabilities = Capabilities(("meta",), sums_half_in_fp32=not rounds_each_addition)
    backend = BytesBackend(0, 2, capabilities=capabilities)
    topology = messages.place(0, nodes=2, ranks_per_node=1)
    all_reduce_ = make_allreduce(algorithm, backend=backend, topology=topology, wire=wire)
    backend.message_bytes = 0
    tensor_N = torch.empty(1 << 20, dtype=dtype, device="meta")
    all_reduce_(tensor_N)
    transport = SimpleNamespace(backend=backend)
    played = SimpleNamespace(algorithm_for=lambda tensor_N: algorithm, wire=wire, transport=transport)
    assert bench.wire_share(played, tensor_N) * tensor_N.nbytes == backend.message_bytes


def test_page_states_the_columns_and_formulas_of_the_code() -> None:
    page = (ROOT / "docs/comm-bench.md").read_text()
    columns = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert columns == [title for title, *_ in bench.COLUMNS]
    for field in dataclasses.fields(BenchRow):
        assert f"`{field.name}`" in page
    sides = dict(re.findall(r"^    (algbw|busbw|least time) = (.*)$", page, re.M))
    limit = Limit(num_nodes=4, bytes_per_second=25e6, source="as given", wire_bytes_per_byte=0.5)
    r = row(limit=limit)
    assert r.limit_share == pytest.approx(limit.seconds(r.size) / (r.time_us / 1e6), rel=1e-12)
    values = {"size": r.size, "time": r.time_us / 1e6, "n": 8, "m": 4, "link": 25e6, "wire": 0.5}
    algbw = eval(sides["algbw"], values)
    assert algbw / 1e9 == pytest.approx(r.algbw_gb_per_s, rel=1e-12)
    assert eval(sides["busbw"], values | {"algbw": algbw}) / 1e9 == pytest.approx(r.busbw_gb_per_s, rel=1e-12)
    assert eval(sides["least time"], values) == pytest.approx(limit.seconds(r.size), rel=1e-12)


@pytest.mark.usefixtures("rendered_figures")
def test_plot(tmp_path: Path) -> None:
    limit = Limit(num_nodes=4, bytes_per_second=25e6, source="as given")
    rows = [
        row(name, count=4**k, seconds=1e-3 + 4**k / 1e7, limit=limit)
        for k in range(5, 8)
        for name in ("native", "ring", "hybrid")
    ]
    plot_sweep(rows, tmp_path / "a.svg", limit=limit, title="A title", caption="on a machine")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("A title", "on a machine", "native", "ring", "hybrid", "limit of the links", "busbw (GB/s)", "4K"):
        assert f"<!-- {text} -->" in drawn, text


# --- exact sums ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("world_size", [1, 8, 300])
def test_sums_are_exact_in_every_dtype_and_order(dtype: str, world_size: int) -> None:
    """Added one by one, forwards and backwards, in the dtype itself, against integers."""
    limit = limit_of(getattr(torch, dtype))
    patterns = [rank_pattern(rank, world_size, limit=limit) for rank in range(world_size)]
    oracle = [sum(column) for column in zip(*(each.tolist() for each in patterns), strict=True)]
    assert expected_pattern(world_size, limit=limit).tolist() == oracle
    assert max(oracle) <= limit
    parts = [each.to(getattr(torch, dtype)) for each in patterns]
    for ordered in (parts, parts[::-1]):
        assert sum(ordered).tolist() == oracle


def test_pattern_tells_ranks_and_places_apart() -> None:
    """No rank's values are another's, and no shift of the sum is the sum."""
    for world_size in (2, 4, 8):
        limit = limit_of(torch.bfloat16)
        patterns = [rank_pattern(rank, world_size, limit=limit).tolist() for rank in range(world_size)]
        assert all(a != b for a, b in itertools.combinations(patterns, 2))
        total = expected_pattern(world_size, limit=limit).tolist()
        assert all(total[shift:] + total[:shift] != total for shift in range(1, PERIOD))


@pytest.mark.parametrize("num_elements", [1, PERIOD - 1, 5 * PERIOD + 3, (1 << 14) * PERIOD + 3])
def test_count_different_elements(num_elements: int) -> None:
    pattern = expected_pattern(4, limit=limit_of(torch.float16))
    tensor_N = torch.empty(num_elements, dtype=torch.float16)
    fill_(tensor_N, pattern)
    assert count_different(tensor_N, pattern) == 0
    assert tensor_N[-1].item() == pattern[(num_elements - 1) % PERIOD]
    places = sorted({0, num_elements // 2, num_elements - 1})
    for place in places:
        tensor_N[place] = float("nan") if place else -1.0
    assert count_different(tensor_N, pattern) == len(places)


# --- timing ---


class FakeCommunicator:
    """Two ranks in one process: the other rank adds its pattern, and takes a stated time."""

    def __init__(self, spoil: Callable[[Tensor], None] = lambda tensor_N: None, other_seconds: float = 0.0) -> None:
        self.rank, self.world_size, self.device, self.wire = 0, 2, torch.device("cpu"), Wire()
        self.connection = self.control = self
        self.timeout_seconds, self.order = 60.0, SimpleNamespace(start_held=lambda: None)
        self.calls = 0
        self._spoil = spoil
        self._other_seconds = other_seconds

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor:
        self.calls += 1
        if bool((tensor_N >= 1).any()):
            other_N = torch.empty_like(tensor_N)
            fill_(other_N, rank_pattern(1, 2, limit=limit_of(torch.float32)))
            tensor_N += other_N
        self._spoil(tensor_N)
        return tensor_N

    def collect_text(self, text: str, *, what: str) -> list[str]:
        mine = json.loads(text)
        if isinstance(mine, list):
            return [text, json.dumps([self._other_seconds] * len(mine))]
        other = {name: [wrong] + [self._other_seconds] * len(seconds) for name, (wrong, *seconds) in mine.items()}
        return [text, json.dumps(other)]

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str:
        return text


def times(num_elements: int = 3000, *, budget: TimeBudget | None = None, **ranks: FakeCommunicator) -> Any:
    budget = budget or TimeBudget(repetitions=3, seconds=1)
    return time_sums(torch.ones(num_elements), ranks, budget=budget)  # type: ignore[arg-type]


def spoil_one(tensor_N: Tensor) -> None:
    if bool(tensor_N.any()):
        tensor_N[7] += 1


def swap_halves(tensor_N: Tensor) -> None:
    tensor_N.copy_(tensor_N.roll(tensor_N.numel() // 2))


def spoil_zeros(tensor_N: Tensor) -> None:
    if not bool((tensor_N >= 1).any()):
        tensor_N[5] = 1e-30


def test_time_sums_counts_wrong_elements_over_ranks_and_for_their_algorithm_alone() -> None:
    result = times(ring=FakeCommunicator(spoil_one), native=FakeCommunicator())
    assert {name: each.num_wrong for name, each in result.items()} == {"ring": 2, "native": 0}
    assert times(ring=FakeCommunicator(swap_halves))["ring"].num_wrong > 2000
    assert times(ring=FakeCommunicator(spoil_zeros))["ring"].num_wrong in (4, 6)  # both ranks, two or three rounds


def test_time_sums_takes_the_slowest_ranks_time() -> None:
    result = times(ring=FakeCommunicator(other_seconds=12.5))
    assert result["ring"].measured.seconds == (12.5, 12.5)  # and so long that two repetitions must do


class Clock:
    """Stands still but for what the sums say that they take."""

    now = 0.0

    def passes(self, seconds: float) -> Callable[[Tensor], None]:

        def spend(tensor_N: Tensor) -> None:
            self.now += seconds

        return spend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.mark.usefixtures("clock")
def test_effort_bounds_repetitions() -> None:
    slow, fast = FakeCommunicator(), FakeCommunicator()
    few = times(budget=TimeBudget(repetitions=20, seconds=3.5), slow=FakeCommunicator(other_seconds=1.0))
    assert len(few["slow"].measured.seconds) == 3
    many = times(budget=TimeBudget(repetitions=13, seconds=60), slow=slow, fast=fast)
    assert [len(each.measured.seconds) for each in many.values()] == [13, 13]
    assert slow.calls == fast.calls == 2 + 13 * timing.MAX_LOOPS  # and the check, and a first look


def test_effort_repeats_only_contenders_where_time_is_short(clock: Clock) -> None:
    slow, fast = FakeCommunicator(clock.passes(5e-3)), FakeCommunicator(clock.passes(5e-6))
    budget = TimeBudget(repetitions=10, seconds=0.01, contender_ratio=2)
    result = times(num_elements=10, budget=budget, slow=slow, fast=fast)
    assert len(result["slow"].measured.seconds) == 1
    assert len(result["fast"].measured.seconds) == 10
    enough = dataclasses.replace(budget, seconds=60.0)
    result = times(num_elements=10, budget=enough, slow=slow, fast=fast)
    assert len(result["slow"].measured.seconds) == 10


def test_measure_links_of_a_backend_without_messages() -> None:
    backend = SimpleNamespace(capabilities=SimpleNamespace(has_messages=False))
    mute = SimpleNamespace(transport=SimpleNamespace(backend=backend), connection=SimpleNamespace(topology=None))
    assert timing.measure_links(mute, seconds=1) == timing.MeasuredLinks(None, None)  # type: ignore[arg-type]


def test_measure_links_counts_as_many_operations_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting rank names the operation by its number, so ranks outside of a hop count it, too."""
    hosts = ["a", "a", "b"]
    submitted: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(len(hosts))}
    monkeypatch.setattr(timing, "slowest", lambda times, _: [1.0] * len(times))
    for rank, operations in submitted.items():

        def submit(
            operation: Callable[[], None],
            *,
            label: str,
            ranks: tuple[int, ...],
            kept: list[tuple[int, ...]] = operations,
        ) -> InFlight:
            kept.append(ranks)
            operation()
            return InFlight()

        capabilities = SimpleNamespace(has_messages=True)
        backend = SimpleNamespace(capabilities=capabilities, submit=submit, start_exchange=lambda **_: InFlight())
        cpu = torch.device("cpu")
        topology = make_topology(hosts, rank=rank)
        transport, connection = SimpleNamespace(backend=backend, backend_device=cpu), SimpleNamespace(topology=topology)
        one = SimpleNamespace(transport=transport, connection=connection, rank=rank, device=cpu)
        timing.measure_links(one, seconds=1)  # type: ignore[arg-type]
    assert len(submitted[0]) == len(submitted[1]) == len(submitted[2]) > 0
    assert set(submitted[0]) == {(0, 1), (0, 2)}  # inside its node, and between the nodes
    assert set(submitted[2]) == {(2,), (0, 2)}


def test_measure_links_takes_no_burst_for_bandwidth() -> None:
    """A link that lets 1 MB through at once and continues at 25 MB/s; the best of the longest messages counts."""

    def seconds(num_bytes: int) -> float:
        return 1e-4 + max(0, num_bytes - 1_000_000) / 25e6

    sizes = (8, 1_000_000, 101_000_000)
    hops = timing.MessageTimes(tuple((n, MeasuredTimes((seconds(n), 3 * seconds(n)))) for n in sizes))
    assert hops.best_bytes_per_second == pytest.approx(101e6 / 4.0001, rel=1e-12)
    assert hops.latency_seconds == pytest.approx(2e-4, rel=1e-9)  # the median of the shortest


# --- the command ---

VERIFY = "--verify"


def test_bench_of_a_world_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "new/a.jsonl", tmp_path / "a.png"
    options = ["--max-bytes", "4K", "--repetitions", "2", "--dtype", "bfloat16", "--algorithms", "native,ring,native"]
    options += ["--wire-dtype", "float16", "--reduce-dtype", "wire"]
    assert main(["comm", "bench", *options, "--output", str(output), "--plot", str(plot)]) == 0
    assert plot.exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["# wrong values: 0", f"# plot: {plot}"]
    table = [line.split() for line in lines if not line.startswith("#")]
    assert [(words[0], words[1], words[4].rstrip("*")) for words in table] == [
        ("1024", "512", "native"),
        ("1024", "512", "ring"),
        ("4096", "2048", "native"),
        ("4096", "2048", "ring"),
    ]
    conditions, *records = [json.loads(line) for line in output.read_text().splitlines()]
    assert conditions["kind"] == "conditions"
    assert conditions["torch"] == torch.__version__
    assert (conditions["wire_dtype"], conditions["reduce_dtype"]) == ("float16", "wire")
    assert (conditions["groups"], conditions["backend"], conditions["limit"]) == ([[0]], "single", None)
    assert conditions["command"].startswith("bigbatch comm bench --max-bytes 4K")
    assert [(r["kind"], r["size"], r["algorithm"], r["num_wrong"]) for r in records] == [
        ("row", size, name, 0) for size in (1024, 4096) for name in ("native", "ring")
    ]
    assert {field.name for field in dataclasses.fields(BenchRow)} == set(records[0]) - {"kind"}


def test_bench_fails_by_a_wrong_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def time_sums(tensor_N: Tensor, communicators: Any, *, budget: TimeBudget, label: str) -> dict[str, AllReduceTimes]:
        return {name: AllReduceTimes(MeasuredTimes((1e-3, 1e-3)), 7) for name in communicators}

    monkeypatch.setattr(command, "time_sums", time_sums)
    assert main(["comm", "bench", "--max-bytes", "1K", "--algorithms", "native"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "# wrong values: 7"
    assert lines[-2].split()[-3:] == ["7", "2", "-"]


def test_progress_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["comm", "bench", "--max-bytes", "1K", "--algorithms", "native", "--repetitions", "2"]
    assert main(options) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("BIGBATCH_TERMINAL_COLUMNS", "80")
    assert main(options) == 0
    assert "\r\x1b[K1K by native\r\x1b[K" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-bytes", "x"], "argument --min-bytes: 'x' is not a size"),
        (["--min-bytes", "3"], "--min-bytes 3 holds no float32 element; give at least 4"),
        (["--max-bytes", "512"], "--min-bytes 1K exceeds --max-bytes 512"),
        (["--factor", "1"], "argument --factor: 1 is too small: give at least 2"),
        (["--repetitions", "1"], "argument --repetitions: 1 is too small: give at least 2"),
        (["--group-size", "0"], "argument --group-size: 0 is too small: give at least 1"),
        (["--seconds-per-size", "0"], "argument --seconds-per-size: 0 must be a positive number"),
        (["--timeout-seconds", "nan"], "argument --timeout-seconds: nan must be a positive number"),
        (["--link-gbit", "fast"], "argument --link-gbit: invalid float value: 'fast'"),
        (["--link-gbit", "-1"], "argument --link-gbit: -1 must be a positive number"),
        (["--link-gbit", "1"], "--link-gbit 1: all ranks are on one node, so no link limits them; leave it out"),
        (["--algorithms", "torus"], "--algorithms: 'torus' is not available with backend single; choose among native"),
        (["--algorithms", "hybrid"], "--algorithms hybrid needs --table"),
        (["--plot", "a.jpeg"], "argument --plot: a.jpeg: the name must end in one of .png, .svg, .pdf"),
        (["--table", "absent.json"], "cannot read absent.json: No such file or directory"),
        (["--output", "/proc/no/a.jsonl", "--max-bytes", "4K"], "cannot write /proc/no"),
        (
            ["--max-bytes", "1000000G"],
            "--max-bytes: 262144G bytes for each of 1 rank, and as much again twice to work with, do",
        ),
        (["--backend", "nccl"], "0 GPUs: start one rank per GPU"),
        (["--seed", "3"], "unrecognized arguments: --seed 3"),
        ([VERIFY], "--verify needs several ranks, and this job has one: start it by bigbatch launch mpirun"),
        (
            [VERIFY, "--algorithms", "torus"],
            "--algorithms: 'torus' is not available with any backend; choose among native",
        ),
        ([VERIFY, "--algorithms", "hybrid"], "--algorithms hybrid is one of the others at each size"),
        *(
            ([VERIFY, "--seed", str(seed)], f"--seed {seed}: give 0 or more, and below 2**63")
            for seed in (-1, 1 << 63, 1 << 64)
        ),
        ([VERIFY, "--precisions", "fp32"], "unrecognized arguments: --precisions fp32"),
        ([VERIFY, "--dtype", "float16"], "comm bench --verify: error: unrecognized arguments: --dtype float16"),
    ],
)
def test_bench_messages_of_impossible_arguments(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The catalogue of this room's messages: the one test that holds their wording."""
    with suppress(SystemExit):  # by argparse
        assert main(["comm", "bench", *options]) == FAILED
    err = capsys.readouterr().err
    assert err.startswith(("bigbatch: ", "usage: bigbatch comm bench [--verify] [OPTION ...]\nbigbatch comm bench"))
    assert message in err
    assert len(err.splitlines()) <= 2


def test_comm_refuses_what_is_no_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bnech"]) == REFUSED
    assert re.search(naming("bnech", "bench", "tune"), capsys.readouterr().err)
    with pytest.raises(SystemExit, match="0"):
        main(["comm", "--help"])
    assert "tune" in capsys.readouterr().out
