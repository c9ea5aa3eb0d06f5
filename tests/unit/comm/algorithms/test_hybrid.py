"""What auto becomes: by backend, by a table, and in a communicator; and the table of algorithms by size."""

import itertools
import json
import math
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming

from bigbatch.comm.algorithms.by_name import choose_algorithm
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, MeasuredTimes, make_hybrid
from bigbatch.comm.backends.base import Capabilities
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE

BY_SIZE = HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "sharded")))
ONE = HybridTable((HybridRow(None, "ring"),))


def named(name: str) -> Any:
    """A transport of eight ranks."""
    return SimpleNamespace(name=name, world_size=8, capabilities=Capabilities(("cpu",), has_messages=name != "horovod"))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("nccl", "native"), ("horovod", "native"), ("tcp", "hierarchical"), ("mpi", "hierarchical")],
)
def test_without_a_table_the_backend_decides(backend: str, expected: str) -> None:
    choice = choose_algorithm(named(backend), table=None)
    assert choice.algorithm == expected
    assert choice.why


def test_a_table_decides_before_the_backend() -> None:
    by_size, one = (choose_algorithm(named("nccl"), table=table, table_from="FILE") for table in (BY_SIZE, ONE))
    assert by_size == ("hybrid", "FILE: doubling up to 4,096 bytes; sharded above")
    assert one == ("ring", "FILE: ring at any size")


@pytest.mark.parametrize(
    ("options", "expected", "is_said"),
    [
        ({}, "native", True),  # one rank
        ({"algorithm": "auto"}, "native", True),
        ({"algorithm": "auto", "table": BY_SIZE}, "hybrid", True),
        ({"algorithm": "ring", "table": BY_SIZE}, "ring", False),
    ],
)
def test_a_communicator_names_what_was_chosen(options: dict[str, Any], expected: str, is_said: bool) -> None:
    alone = connect(env=ALONE, device=torch.device("cpu"), **options)
    assert alone.algorithm == expected
    assert bool(alone.why) is is_said


TABLE = HybridTable((HybridRow(1000, "doubling"), HybridRow(50_000, "native"), HybridRow(None, "ring")))


def exact(**seconds: float) -> dict[str, MeasuredTimes]:
    return {name: MeasuredTimes((value, value, value)) for name, value in seconds.items()}


@pytest.mark.parametrize(
    ("num_bytes", "algorithm"),
    [(0, "doubling"), (1000, "doubling"), (1001, "native"), (50_000, "native"), (50_001, "ring"), (10**12, "ring")],
)
def test_table_chooses_by_size(num_bytes: int, algorithm: str) -> None:
    assert TABLE.choose(num_bytes) == algorithm


def test_table_as_text_and_json() -> None:
    assert str(TABLE) == "doubling up to 1,000 bytes; native up to 50,000 bytes; ring above"
    assert str(HybridTable((HybridRow(None, "ring"),))) == "ring at any size"
    assert json.dumps(TABLE.as_rows()) == '[[1000, "doubling"], [50000, "native"], [null, "ring"]]'
    assert HybridTable.from_rows(TABLE.as_rows()) == TABLE
    assert HybridTable((*TABLE.rows[1:2], HybridRow(None, "native"))).algorithms == ("native",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", ('[[65536, "doubling"], [null, "ring"]]',)),
        ('[[true, "ring"], [null, "ring"]]', ('[[65536, "doubling"], [null, "ring"]]',)),
        ("[[null, 3]]", ('[[65536, "doubling"], [null, "ring"]]',)),
        ("[]", ("only the last", "up_to_bytes=null")),
        ('[[10, "ring"]]', ("only the last", "up_to_bytes=null")),
        ('[[null, "ring"], [null, "native"]]', ("only the last", "up_to_bytes=null")),
        ('[[10, "ring"], [10, "native"], [null, "ring"]]', ("up_to_bytes", "[10, 10]")),
        ('[[0, "ring"], [null, "native"]]', ("up_to_bytes", "[0]")),
        ('[[null, "hybrid"]]', ("other algorithms", "hybrid")),
    ],
)
def test_table_that_is_malformed_is_refused(text: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        HybridTable.from_rows(json.loads(text))


def test_table_limits_lie_where_both_take_equally_long() -> None:
    """Ratios of 8 at 2^12 and 1/2 at 2^16: as a power of the size, 1 after three quarters of the four doublings."""
    times = {
        1024: exact(doubling=1.0, ring=9.0),
        4096: exact(doubling=1.0, ring=8.0),
        65_536: exact(doubling=20.0, ring=10.0),
        2**20: exact(doubling=99.0, ring=50.0),
    }
    assert make_hybrid(times).rows == (HybridRow(2**15, "doubling"), HybridRow(None, "ring"))


def test_table_limit_is_the_geometric_mean_where_times_do_not_tell() -> None:
    times = {4096: exact(doubling=1.0), 65_536: exact(doubling=20.0, ring=10.0)}
    assert make_hybrid(times).rows == (HybridRow(16_384, "doubling"), HybridRow(None, "ring"))
    unmeasured = {4096: exact(b=3.0), 1024: exact(a=1.0, b=3.0)}  # in any order
    assert make_hybrid(unmeasured).rows == (HybridRow(2048, "a"), HybridRow(None, "b"))
    equal = {1000: exact(a=1.0, b=9.0), 4000: exact(a=1.0, b=1.0), 16_000: exact(a=2.0, b=1.0)}
    assert make_hybrid(equal).rows == (HybridRow(8000, "a"), HybridRow(None, "b"))


def test_table_makes_no_switch_for_less_than_the_noise() -> None:
    noisy = MeasuredTimes(tuple(1 + 0.03 * (-1) ** i for i in range(20)))  # quartiles at 0.97 and 1.03
    assert noisy.noise == pytest.approx(2 * 1.253 * 0.06 / 1.349 / math.sqrt(20), rel=1e-12)
    close = MeasuredTimes(tuple(0.985 * s for s in noisy.seconds))
    times = {1000: {"a": noisy, "b": close}, 2000: {"a": close, "b": noisy}, 4000: {"a": noisy, "b": close}}
    assert make_hybrid(times).rows == (HybridRow(None, "b"),)
    quiet = {size: exact(a=at["a"].median, b=at["b"].median) for size, at in times.items()}
    assert make_hybrid(quiet).algorithms == ("b", "a")  # 1.5% counts where nothing wavers


def spread_over(median: float, share: float, *, count: int = 20) -> MeasuredTimes:
    """Times whose quartiles lie that share of the median apart."""
    return MeasuredTimes(tuple(median * (1 + share / 2 * (-1) ** i) for i in range(count)))


def test_noise_of_two_medians_has_the_spread_of_the_other_for_a_single_time() -> None:
    """Two standard errors: 2 * 1.253 / 1.349 times quartile distance / sqrt(n), of both, by Pythagoras."""
    a, b, single = spread_over(1.0, 0.3), spread_over(5.0, 0.4, count=10), MeasuredTimes((3.0,))
    errors = 2 * 1.253 / 1.349
    assert (a.spread, b.spread, single.spread) == (pytest.approx(0.3), pytest.approx(0.4), 0.0)
    assert a.joint_noise(b) == pytest.approx(errors * math.hypot(0.3 / 20**0.5, 0.4 / 10**0.5))
    assert a.joint_noise(single) == single.joint_noise(a) == pytest.approx(errors * math.hypot(0.3 / 20**0.5, 0.3))


def test_table_keeps_the_default_unless_another_is_faster_beyond_noise() -> None:
    """The noise of both is 0.186: 15% is no difference, 50% is one."""
    noisy = {name: spread_over(median, 0.3, count=18) for name, median in (("a", 1.0), ("b", 1.15), ("c", 1.5))}
    assert noisy["a"].joint_noise(noisy["b"]) == pytest.approx(0.186, abs=1e-3)
    times = {size: dict(noisy) for size in (1000, 2000, 4000)}
    assert [make_hybrid(times, default=name).algorithms for name in ("a", "b", "c", "")] == [
        ("a",),
        ("b",),
        *2 * [("a",)],
    ]
    times[1000] = exact(a=1.0, b=2.0)
    assert make_hybrid(times, default="b").algorithms == ("a",), "no switch for a difference within noise"
    times[4000] = exact(a=2.0, b=1.0)
    assert make_hybrid(times, default="b").rows[0].up_to_bytes < 2000, "b where a is not faster beyond noise"
    assert make_hybrid(times, default="a").rows[0].up_to_bytes >= 2000


def test_table_of_one_lucky_time_keeps_the_default() -> None:
    """On a busy host a single time of half the median is no evidence."""
    times = {1000: {"default": spread_over(2.0, 1.0), "other": MeasuredTimes((1.0,))}}
    assert make_hybrid(times, default="default").algorithms == ("default",)


@pytest.mark.parametrize("times", [{}, {1024: {}}])
def test_table_of_nothing_measured(times: Mapping[int, Mapping[str, MeasuredTimes]]) -> None:
    with pytest.raises(ValueError, match=naming("hybrid table", "time", "every size")):
        make_hybrid(times)


@pytest.mark.parametrize("seed", range(6))
def test_table_is_never_five_percent_behind_and_has_no_needless_switch(seed: int) -> None:
    """Against all sequences of choices: within 5% of the best everywhere, and fewest switches of those within 1%."""
    draw = random.Random(seed)
    sizes = [4**k for k in range(5, 11)]
    times = {
        size: {
            name: MeasuredTimes(tuple(draw.gauss(1, 0.1 * (seed % 3)) ** 2 + 0.5 for _ in range(9))) for name in "abc"
        }
        for size in sizes
    }
    table = make_hybrid(times)
    for size in sizes:
        best = min(measured.median for measured in times[size].values())
        assert times[size][table.choose(size)].median <= 1.05 * best
    good = [[n for n in "abc" if times[s][n].median <= 1.01 * min(m.median for m in times[s].values())] for s in sizes]
    fewest = min(sum(a != b for a, b in itertools.pairwise(names)) for names in itertools.product(*good))
    assert len(table.rows) - 1 <= fewest
