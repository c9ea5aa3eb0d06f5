"""The parts of benchmarks/comm that measure nothing: formulas, choices, verdicts, commands, tables."""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_process import from_checkout, run_benchmark
from error_texts import naming

from benchmarks.comm import (
    case_run,
    cases,
    entries,
    exact_price,
    exchange,
    gradient_sets,
    gradients,
    half_sums,
    links,
    plot,
    reducer_overhead,
    scaling,
    step,
    summary,
    targets,
    tuning,
    turns,
    ways,
)
from benchmarks.comm import run as driver
from benchmarks.comm.job import join
from benchmarks.record import show_record, spread, write_record
from bigbatch.comm.algorithms.hybrid import Measured
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import CommError

# --- scaling ---


def test_scaling_weak_and_strong_steps() -> None:
    assert scaling.step_lengths(3.0, 6.0, num_nodes=4) == {"weak": 3.0, "strong": 1.5}
    assert scaling.step_lengths(None, 6.0, num_nodes=1) == {"strong": 6.0}


def test_pace_keeps_its_shares() -> None:
    pace = gradient_sets.Pace([2.0, 1.0], forward_seconds=1.0)  # backward twice as long as forward
    assert pace.seconds == 3.0
    pace.take(1.5)
    pace.take(6.0)
    assert (pace.seconds, pace.ready_seconds) == (6.0, [4.0, 2.0])


def test_scaling_limit_of_efficiency_in_closed_form() -> None:
    # 100 MB, all ready when backward starts, over 2 nodes at 100 MB/s: 1 s, of which a backward of 0.5 s hides half
    pace = gradient_sets.Pace([0.0, 0.5], forward_seconds=0.25)
    found = scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=2, goodput=800e6)
    assert found == pytest.approx(0.75 / (0.75 + 0.5))
    assert scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=1, goodput=None) == 1


def test_scaling_efficiency_is_of_pairs() -> None:
    def repetitions(*seconds: float) -> list[turns.Repetition]:
        return [turns.Repetition((each,), 0.1, (0,)) for each in seconds]

    rows = scaling.describe(
        "weak", {"ddp": repetitions(2.0, 4.0), "local": repetitions(1.0, 3.0)}, seconds=1.0, limit=0.9
    )
    assert rows[0]["efficiency"] == {**rows[0]["efficiency"], "median": 0.625, "min": 0.5, "max": 0.75}


def test_scaling_is_judged_where_the_links_allow_it() -> None:
    def row(mode: str, name: str, efficiency: float, limit: float) -> dict[str, Any]:
        return {
            "scaling": mode,
            "contestant": name,
            "efficiency": {"median": efficiency},
            "limit_efficiency": limit,
        }

    rows = [row("weak", "ours tuned", 0.96, 1.0), row("weak", "ddp", 0.9, 1.0), row("strong", "ours tuned", 0.7, 0.8)]
    verdicts = targets.judge_scaling("scaling-x", {"num_wrong": {"ddp": 1}, "rows": rows})
    assert [(each.what, each.measured, each.is_met) for each in verdicts] == [
        ("wrong values, all contestants", "1", False),
        ("ours tuned: weak scaling efficiency", "0.960; ddp 0.900", True),
    ]


@pytest.mark.parametrize("options", [(), ("--weak", "0"), ("--strong", "-1")])
def test_scaling_without_steps_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        scaling.parse(["--out", "x", *options])


# --- links ---


def test_links_sent_bytes_leave_out_loopback() -> None:
    text = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n"
        "  eth0: 5 1 0 0 0 0 0 0 700 1 0 0 0 0 0 0\n"
        "  eth1:6 1 0 0 0 0 0 0 80 1 0 0 0 0 0 0\n"
    )
    assert links.parse_sent_bytes(text) == 780
    assert links.parse_sent_bytes(text, interface="eth1") == 80
    with pytest.raises(CommError, match=naming("--interface eth7", "eth0, eth1")):
        links.parse_sent_bytes(text, interface="eth7")


def test_links_limit() -> None:
    # 4 nodes: 1.5 times the bytes; 100 MB at 800 Mbit/s = 100 MB/s
    assert links.limit_seconds(100e6, num_nodes=4, goodput=800e6) == pytest.approx(1.5)


def test_iperf3_report() -> None:
    assert links.parse_iperf3('{"end": {"sum_received": {"bits_per_second": 191e6}}}') == 191e6
    with pytest.raises(ValueError, match=r"^unable to connect to server: Connection refused$"):
        links.parse_iperf3('{"end": {}, "error": "unable to connect to server: Connection refused"}')
    with pytest.raises(ValueError, match=naming("iperf3", "sum")):
        links.parse_iperf3("{}")


class TwoNodes:
    """A job of two ranks on two nodes as the first sees it; the second says the same."""

    rank, num_nodes, interface = 0, 2, None
    communicator = SimpleNamespace(topology=SimpleNamespace(leaders=(0, 1)))

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_goodput_given_is_not_measured_and_the_highest_counts() -> None:
    assert links.find_goodput(None, 956.0, seconds=9) == 956e6  # type: ignore[arg-type]
    assert links.best_goodput([None, 955e6, 956e6]) == 956e6
    assert links.best_goodput([None, None]) is None


def test_iperf3_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(links, "own_address", lambda **_: "127.0.0.1")
    assert links._run_client("127.0.0.1", 9, seconds=1, control=None) == (
        None,
        "[Errno 2] No such file or directory: 'iperf3'",
    )
    with pytest.raises(CommError, match=naming("'iperf3'", "apt-get install", "--goodput-mbit")):
        links.measure_goodput(TwoNodes(), seconds=1, control=None)  # type: ignore[arg-type]


def test_links_least_exposed_is_the_best_of_all_orders() -> None:
    """Brute force: send each gradient whole, as soon as it is ready and the link free, in every order."""
    ready, num_bytes = [0.9, 0.2, 0.5, 1.0], [10, 400, 300, 200]
    seconds = [links.limit_seconds(n, num_nodes=2, goodput=8000) for n in num_bytes]  # 1 ms per byte

    def end(order: Sequence[int]) -> float:
        free = 0.0
        for i in order:
            free = max(free, ready[i]) + seconds[i]
        return free

    best = min(end(order) for order in itertools.permutations(range(4)))
    found = links.least_exposed_seconds(ready, num_bytes, num_nodes=2, goodput=8000)
    assert found == pytest.approx(best - max(ready))


def test_links_least_exposed_in_closed_form() -> None:
    # one node's worth of gradients at 0.1, backward ends at 1.1 with next to nothing: bytes - (end - first)
    found = links.least_exposed_seconds([0.1, 1.1], [1_000_000, 0], num_nodes=4, goodput=8e6)
    assert found == pytest.approx(1.5 - (1.1 - 0.1))
    # what backward hides completely is not negative
    assert links.least_exposed_seconds([0.1, 9.0], [1_000_000, 0], num_nodes=4, goodput=8e6) == 0


# --- turns, contestants, records ---


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


# --- exchange ---


def test_exchange_sizes() -> None:
    assert exchange.parse_sizes("1e3,2000002,1e3") == [1000, 2000000]
    for text in ("", "1e3,x", "3", "-8"):
        with pytest.raises(argparse.ArgumentTypeError, match=naming(repr(text), "1e3,1e6")):
            exchange.parse_sizes(text)


@pytest.mark.parametrize(
    ("parse", "argv", "named"),
    [
        (exchange.parse, ["--repetitions", "0"], ("--repetitions 0:", "at least 1")),
        (gradients.parse, ["--repetitions", "0"], ("--repetitions 0:", "at least 1")),
        (step.parse, ["--image-size", "0"], ("--image-size 0:", "at least 1")),
        (step.parse, ["--pace", "0"], ("--pace 0:", "seconds")),
        (reducer_overhead.parse, ["--device", "cpu", "--steps", "0"], ("--steps 0:", "at least 1")),
    ],
)
def test_arguments_that_are_impossible(
    parse: Any, argv: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", "x.json", *argv])
    assert re.search(naming(*named), capsys.readouterr().err)


def test_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reducer_overhead.parse(["--device", "cuda"])
    assert "CUDA" in capsys.readouterr().err


def test_exchange_time_goes_to_the_first_contestants_and_to_those_that_fit() -> None:
    first = {"gloo": 1.0, "hybrid": 1.0, "hierarchical": 1.0, "ring": 3.0, "mpi": 0.5}
    assert exchange.within_time(first, seconds=36, repetitions=10) == ["hybrid", "hierarchical", "gloo", "mpi"]
    assert exchange.within_time(first, seconds=0, repetitions=10) == ["hybrid", "hierarchical"]


def test_exchange_drops_the_hopeless_but_no_peer() -> None:
    racing = {name: entries.Entry(entries.nobody, "tcp") for name in ("hierarchical", "hybrid fp16", "native")}
    racing["mpi"] = entries.Entry(entries.nobody, "plain")
    rows = [
        {"contestant": "hierarchical", "is_ours": True, "wire": "float32", "seconds": {"median": 1.0}},
        {"contestant": "hybrid fp16", "is_ours": True, "wire": "float16", "seconds": {"median": 0.4}},
        {"contestant": "native", "is_ours": True, "wire": "float32", "seconds": {"median": 2.5}},
        {"contestant": "mpi", "is_ours": False, "wire": "float32", "seconds": {"median": 9.0}},
    ]
    assert list(exchange.without_hopeless(racing, rows, size=10**6)) == ["hierarchical", "hybrid fp16", "mpi"]
    assert list(exchange.without_hopeless(racing, rows, size=10**5)) == list(racing)


def test_tuning_keeps_what_a_table_rests_on() -> None:
    times = {4096: {"ring": Measured((2.0, 1.0, 6.0))}, 1024: {"ring": Measured((3.0,)), "doubling": Measured((1, 2))}}
    assert tuning.describe_times(times) == {
        "1024": {"ring": {"n": 1, "median": 3.0}, "doubling": {"n": 2, "median": 1.5}},
        "4096": {"ring": {"n": 3, "median": 2.0}},
    }


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


def test_half_sums_of_one_rank_see_wrong_ones() -> None:
    """In one process, whose sum is its own tensor."""
    job = join(interface=None)
    part_N = torch.ones(100, dtype=torch.bfloat16)
    pair = half_sums.make_pair(job, "native")
    found = half_sums.measure_pair(job, "native", pair, part_N, repetitions=2)
    assert (found["size"], found["num_wrong"], found["ratio"]["n"], list(found["ways"])) == (
        200,
        0,
        2,
        ["in fp32", "by the hop"],
    )
    once = iter([1])  # the check, before repetitions of zeros
    wrong = entries.Entry(lambda tensor_N: tensor_N[7:9].add_(next(once, 0)), "tcp", wire="bfloat16")
    found = half_sums.measure_pair(job, "native", pair | {"in fp32": wrong}, part_N, repetitions=2)
    assert found["num_wrong"] == 2
    assert half_sums.show(found).endswith("; 2 WRONG")
    job.communicator.close()


def test_ways_of_one_rank_give_right_sums_and_see_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, whose sums are its own gradients: of PowerSGD, too, as these matrices are of rank 1."""
    monkeypatch.setattr(ways, "parameter_shapes", lambda model: {"a": (5,), "b": (12, 3, 2), "c": (40, 30)})
    job = join(interface=None)
    for name, chosen in ways.WAYS.items():
        settings = {way: replace(each, algorithm="ring") for way, each in chosen.items()}
        found = ways.measure(job, "tiny", settings, repetitions=2)
        assert [(row["way"], row["num_wrong"], row["seconds"]["n"]) for row in found["rows"]] == [
            (way, 0, 2) for way in ways.WAYS[name]
        ]
        assert (found["num_tensors"], found["num_bytes"]) == (3, 4 * (5 + 72 + 1200))
    values = gradient_sets.make_values({"a": (5,), "b": (12, 3, 2), "c": (40, 30)})
    model = gradient_sets.CostlessModel(values, weight=1)
    reducer = GradientReducer(model.named_parameters(), job.communicator)
    reducer.is_active = False
    step = ways.PowerSgdStep(reducer, rank=2)
    model(gradient_sets.start()).backward()
    step.wait()
    for index, parameter in enumerate(model.parameters()):
        expected = torch.full_like(parameter, float(gradient_sets.gradient_value(index)))
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(ways, "count_wrong", lambda parameters, expected: 2)
    wrong = ways.measure(job, "tiny", {"ring": ways.Way("ring", None)}, repetitions=1)
    assert wrong["rows"][0]["num_wrong"] == 2
    job.communicator.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read as Linux tells it")
def test_values_that_nobody_writes_take_no_memory() -> None:
    """Eight ranks on one machine have weights of their own: AlexNet-BN's are 244 MB each."""

    def own_bytes() -> int:
        return 1024 * int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])

    before = own_bytes()
    values = gradient_sets.make_values({"fc6": (4096, 4096), "scale": ()})
    assert not values["fc6"][::512].any()
    assert values["scale"] == 0
    assert own_bytes() - before < values["fc6"].nbytes / 4


def test_ways_are_summarised() -> None:
    quartiles = {"n": 5, "median": 2.0, "q1": 1.9, "q3": 2.1}
    row = {
        "way": "int8",
        "num_wrong": 0,
        "seconds": quartiles,
        "node_bytes": 4e7,
        "times_as_fast": quartiles,
        "cores_used": 1.5,
    }
    record = {
        "benchmark": "ways",
        "conditions": FACTS | {"load_average_at_start": 7.25},
        "goodput_bits_per_second": [956e6, 955e6],
        "model": "resnet50",
        "rows": [row],
    }
    assert [verdict.is_met for verdict in targets.judge({"a": record})] == [True]
    assert "| int8 | 2.000 | 40.0 | 2.00 (1.90 to 2.10) | 1.50 | 5 |" in summary.ways_table(record)


def test_half_sums_are_summarised() -> None:
    ways = {"in fp32": {"seconds": {"median": 0.21}}, "by the hop": {"seconds": {"median": 0.2}}}
    ratio = {"n": 10, "median": 1.05, "q1": 1.01, "q3": 1.1}
    record = {
        "benchmark": "half_sums",
        "dtype": "bfloat16",
        "conditions": FACTS | {"load_average_at_start": 7.25},
        "goodput_bits_per_second": [956e6, 955e6],
        "rows": [{"contestant": "ring", "size": 10**7, "num_wrong": 0, "ways": ways, "ratio": ratio}],
    }
    text = summary.half_sums_table(record)
    assert "| 10 MB | ring | 210 | 200 | 1.050 (1.010 to 1.100) | 10 |" in text
    assert "load of others at the start 7.2" in text
    assert verdicts({"h": record}) == {("wrong values, all contestants", "h"): True}


def test_exact_price_contestants_sum_the_same_numbers() -> None:
    job = join(interface=None)
    shapes = {"a": (3,), "b": (2, 2)}
    for name in exact_price.BYTES:
        pace = gradient_sets.Pace([0.002, 0.001])
        contestant, model = exact_price.make_contestant(job, name, shapes, pace, buffer_bytes=16)
        for _ in range(2):
            contestant.prepare()
            contestant.run()
            assert gradient_sets.count_wrong(model.parameters(), expected=1) == 0
        assert gradient_sets.count_wrong(model.parameters(), expected=2) == 2
    job.communicator.close()


def exact_price_row(*, limits: tuple[float, float], ratio: float) -> dict[str, Any]:
    ways = {
        name: {"seconds": {"median": 2.5}, "limit_seconds": limit}
        for name, limit in zip(exact_price.BYTES, limits, strict=True)
    }
    spread_of = {"n": 3, "median": ratio, "min": 1.0, "max": 1.5}
    return {"pace": 2.5, "backward_seconds": 2.25, "ways": ways, "ratio": spread_of}


def test_exact_price_is_judged_where_its_bytes_can_hide_and_summarised() -> None:
    record = {
        "benchmark": "exact_price",
        "model": "resnet18",
        "num_elements": 11_689_512,
        "num_wrong": {"fp32": 0, "grid": 0},
        "conditions": FACTS | {"load_average_at_start": 7.25},
        "goodput_bits_per_second": [956e6, 955e6],
        "rows": [
            exact_price_row(limits=(2.0, 4.0), ratio=1.9),
            exact_price_row(limits=(2.0, 2.04), ratio=1.14),
            exact_price_row(limits=(2.0, 2.0), ratio=1.16),
        ],
    }
    found = [(each.measured, each.is_met) for each in targets.judge_exact_price("e", record)]
    assert found == [("0", True), ("1.140", True), ("1.160", False)]
    text = summary.exact_price_table(record)
    assert "| 2.5 | 2.250 | 2.500 (2.000) | 2.500 (4.000) | 1.900 (1.000 to 1.500) | 3 |" in text
    assert "ratio 1.900 (1.000 to 1.500, n = 3)" in exact_price.show(record["rows"][0])
    for paces in ("0,1", "x"):
        with pytest.raises(SystemExit):
            exact_price.parse(["--out", "x", "--paces", paces])


@pytest.mark.long
def test_rank_ends_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    for error, code in (("CommError('no network')", 1), ("ValueError('defect')", 1)):
        script.write_text(
            "from bigbatch.errors import CommError\n"
            "from benchmarks.comm.job import run_rank\n"
            f"def run(): raise {error}\n"
            "run_rank(run)\n"
        )
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=from_checkout()
        )
        assert done.returncode == code
        assert ("Traceback" in done.stderr) == ("defect" in error)
        assert "rank.py" in done.stderr


def test_shares_of_the_limit() -> None:
    rows = [
        {"size": 1_000_000, "wire": "float32", "seconds": {"median": 3.0}},
        {"size": 1_000_000, "wire": "float16", "seconds": {"median": 3.0}},
    ]
    shares = [r["limit_share"] for r in exchange.with_limit(rows, num_nodes=4, goodput=[7e6, 8e6])]
    assert shares == pytest.approx([0.5, 0.25])  # 1.5 MB at 1 MB/s, the higher goodput; half the bytes
    assert exchange.with_limit(rows, num_nodes=1, goodput=[None, None])[0]["limit_share"] is None


# --- gradient sets ---


def test_gradient_sets_are_the_real_networks() -> None:
    sizes = {
        model: sum(torch.Size(shape).numel() * 4 for shape in gradient_sets.parameter_shapes(model).values())
        for model in ("resnet50", "alexnet_bn")
    }
    assert sizes["resnet50"] == 4 * 25_557_032  # torchvision's count
    assert sizes["alexnet_bn"] == pytest.approx(244e6, rel=0.01)


def test_gradient_sets_come_in_reverse_order_with_known_values() -> None:
    shapes = {"a.weight": (3, 2), "b": (), "c.bias": (5,), "d": (2, 2, 1, 1)}
    model = gradient_sets.CostlessModel(gradient_sets.make_values(shapes), weight=7)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    model(gradient_sets.start()).backward()
    assert order == ["d", "c-bias", "b", "a-weight"]
    for parameter, value in zip(model.parameters(), (7, 14, 21, 7), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert bool((parameter.grad == value).all())
    assert gradient_sets.count_wrong(model.parameters(), expected=7) == 0
    list(model.parameters())[2].grad[-1] = 0  # type: ignore[index]
    assert gradient_sets.count_wrong(model.parameters(), expected=7) == 1


def test_backward_with_a_pace_takes_its_time() -> None:
    ready = [0.06, 0.04, 0.02]
    pace = gradient_sets.Pace(ready)
    model = gradient_sets.CostlessModel(gradient_sets.make_values(dict.fromkeys("abc", (2,))), weight=1, pace=pace)
    found: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: found.append(time.perf_counter()))
    loss = model(gradient_sets.start())
    begin = time.perf_counter()
    pace.begin()
    loss.backward()
    assert all(moment - begin >= wanted for moment, wanted in zip(found, reversed(ready), strict=True))


# --- step ---


def test_steps_row() -> None:
    # forward ends at 1; gradients of 0.5 MB ready at 2 and 3; end at 5: exposed 2, of which 1.5 MB/s allow ...
    repetitions = [turns.Repetition((1.0, 3.0, 2.0, 5.0), 1.0, (1, 1))] * 2
    row = step.describe_step(
        "ours", repetitions, num_bytes=[500_000, 500_000], num_nodes=4, goodput=[4e6, 4e6]
    )  # 0.5 MB/s: 3 s for all from 2 on, so not before 5; or 1.5 s for the last from 3 on
    assert row["backward_seconds"]["median"] == 2
    assert row["exposed_seconds"]["median"] == 2
    assert row["limit_exposed_seconds"]["median"] == pytest.approx(2)
    assert row["exposed_over_limit"]["median"] == pytest.approx(1)
    assert row["bytes_seconds"] == pytest.approx(3)
    local = step.describe_step("local", repetitions, num_bytes=[500_000] * 2, num_nodes=4, goodput=[4e6])
    assert "exposed_over_limit" not in local


# --- cases ---


def test_cases_have_names_of_their_own_and_cover_the_issue() -> None:
    for group in (cases.CASES, cases.QUICK):
        assert len({case.name for case in group}) == len(group)
        for case in group:
            assert find_spec(f"benchmarks.comm.{case.module}")
    plain = cases.choose_cases(quick=False, long=False, only=[])
    names = " ".join(case.name for case in plain)
    for part in ("4x2-200mbit", "4x2-1gbit", "500us", "cyclic", "8x1", "2x4", "3+2+2+1", "resnet50", "alexnet_bn"):
        assert part in names
    assert sum(case.seconds for case in cases.choose_cases(quick=True, long=False, only=[])) <= 240


def test_cases_are_chosen() -> None:
    assert {c.name for c in cases.choose_cases(quick=False, long=False, only=["exchange-8x1"])} == {
        "exchange-8x1-1gbit",
        "exchange-8x1-200mbit",
    }
    with pytest.raises(ValueError, match=naming("--only moon", "exchange-4x2-200mbit")):
        cases.choose_cases(quick=False, long=False, only=["moon"])


def test_command_of_a_case(tmp_path: Path) -> None:
    case = cases.Case("c", "step", ("--pace", "1"), "3,2", "1gbit", place="cyclic")
    words = case.command(tmp_path / "c.json")
    before, after = words[: words.index("--")], words[words.index("--") + 1 :]
    assert before[1:6] == ["-m", "bigbatch", "launch", "emulate", "run"]
    options = dict(zip(before[6:-1:2], before[7::2], strict=False))
    assert options["--ranks-per-node"] == "3,2"
    assert options["--place"] == "cyclic"
    assert after[:2] == ["-m", "benchmarks.comm.step"]
    parsed = step.parse(after[2:])
    assert parsed.case == "c"
    assert json.loads(parsed.setting) == {"ranks_per_node": "3,2", "link": "1gbit", "delay": "0", "place": "cyclic"}


@pytest.mark.parametrize("group", [cases.CASES, cases.QUICK])
def test_programs_take_the_options_of_every_case(group: tuple[cases.Case, ...]) -> None:
    parsers = {
        "exchange": exchange.parse,
        "gradients": gradients.parse,
        "step": step.parse,
        "scaling": scaling.parse,
        "reducer_overhead": reducer_overhead.parse,
        "half_sums": half_sums.parse,
        "exact_price": exact_price.parse,
        "ways": ways.parse,
    }
    known = {*entries.CONTESTANTS, *gradients.CONTESTANTS, *step.CONTESTANTS, *ways.WAYS["paper"]}
    for case in group:
        options = parsers[case.module](["--out", "x.json", *case.options])
        assert set((getattr(options, "contestants", None) or "hybrid").split(",")) <= known


# --- summary ---

SETTING = {"ranks_per_node": "2,2,2,2", "link": "1gbit", "delay": "0", "place": "block"}
FACTS = {
    "commit": "abc",
    "cores": [2],
    "machine": "an EPYC",
    "memory_gib": 24,
    "kernel": "Linux 6",
    "python": "3.11",
    "torch": "2",
    "versions": {"mpi4py": "4", "horovod": None},
    "congestion_control": {"system": "bbr", "backend tcp": "cubic"},
    "date": "2026-01-02T03:04:05",
    "setting": SETTING,
}


def row(contestant: str, seconds: float, *, n: int = 10, **more: Any) -> dict[str, Any]:
    """Of a record, with what every benchmark writes."""
    spread = {"n": n, "median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {"contestant": contestant, "seconds": spread, "num_wrong": 0, "node_bytes": 15, "cores_used": 1.5} | more


def exchange_record(*rows: dict[str, Any]) -> dict[str, Any]:
    """A record of exchange.py."""
    return {
        "benchmark": "exchange",
        "conditions": FACTS,
        "goodput_bits_per_second": [956e6, 955e6],
        "tuned": {"hybrid": {"table": "doubling at any size"}},
        "rows": list(rows),
    }


def gradients_record(*, place: str = "block", **seconds: float) -> dict[str, Any]:
    """A record of gradients.py."""
    return {
        "benchmark": "gradients",
        "conditions": FACTS | {"setting": SETTING | {"place": place}},
        "goodput_bits_per_second": [956e6, 955e6],
        "model": "resnet50",
        "num_bytes": 100_000_000,
        "limit_seconds": 1.2,
        "rows": [row(name.replace("_", " "), value) for name, value in seconds.items()],
    }


def verdicts(records: dict[str, Any]) -> dict[tuple[str, str], bool]:
    """(target, case) -> met."""
    return {(v.what, v.case): v.is_met for v in targets.judge(records)}


def test_verdicts_of_an_exchange() -> None:
    def at(size: int, hybrid: float, best: float, gloo: float, share: float, n: int = 10) -> list[dict[str, Any]]:
        facts = {"size": size, "limit_share": share}
        return [
            row("hybrid", hybrid, n=n, **facts),
            row("hierarchical", best, n=n, **facts),
            row("ring", 0.01, n=1, **facts),  # once: no claim
            row("gloo", gloo, n=n, **facts),
        ]

    good = exchange_record(*at(1000, 1.0, 1.0, 4.0, 0.1), *at(10**7, 1.04, 1.0, 1.0, 0.94))
    assert set(verdicts({"x": good}).values()) == {True}
    bad = exchange_record(*at(1000, 1.0, 0.9, 2.0, 0.1), *at(10**7, 1.0, 1.0, 1.0, 0.92))
    bad["rows"][0]["num_wrong"] = 3
    assert set(verdicts({"x": bad}).values()) == {False}
    assert len(verdicts({"x": bad})) == 4
    text = {v.what: v.measured for v in targets.judge({"x": good})}
    assert text["hybrid against the best single algorithm, at any size"] == (
        "1.040 at 10 MB (best: hierarchical, of hierarchical); at all sizes 2 of 4 were measured once and do not count"
    )
    once = exchange_record(*at(10**7, 1.0, 0.5, 1.0, 0.5, n=1))
    assert list(verdicts({"x": once})) == [("wrong values, all contestants", "x")]


def test_verdicts_of_gradients_and_placement() -> None:
    block = gradients_record(ours_tuned=1.0, ours_fp16=0.5, ddp=1.3, horovod=1.2)
    cyclic = gradients_record(place="cyclic", ours_tuned=1.02, ours_fp16=0.6, ddp=2.1)
    found = verdicts({"r": block, "r-cyclic": cyclic})
    assert found[("ours tuned against ddp", "r")]
    assert not found[("ours tuned against horovod", "r")]
    assert found[("ours fp16 against ddp", "r")]
    assert found[("ours tuned against ddp", "r-cyclic")]
    assert found[("ours tuned, cyclic against block placement", "r-cyclic")]
    assert not found[("ours fp16, cyclic against block placement", "r-cyclic")]


def test_verdicts_of_steps_and_the_reducer() -> None:
    def exposed(ratio: float, limit: float) -> dict[str, Any]:
        both = {"exposed_over_limit": {"median": ratio}, "limit_exposed_seconds": {"median": limit}}
        return both | {"bytes_seconds": 1.0}

    record = {
        "benchmark": "step",
        "conditions": FACTS,
        "rows": [row("ours", 1.0, **exposed(1.06, 0.5)), row("ours fp16", 1.0, **exposed(9, 0.5))],
    }
    hidden = record | {"rows": [row("ours", 1.0, **exposed(9, 0.05))]}
    assert verdicts({"s": hidden}) == {}
    tuned = record | {"rows": [*record["rows"], row("ours tuned", 1.0, **exposed(1.04, 0.5))]}
    assert verdicts({"s": tuned}) == {("ours tuned: exposed communication", "s"): True}
    assert verdicts({"s": record}) == {("ours: exposed communication", "s"): False}
    overhead = {"benchmark": "reducer_overhead", "results": {"CUDA graph": {"ratio": {"median": 1.009}}}}
    assert list(verdicts({"o": overhead}).values()) == [True]
    assert verdicts({"o": {"benchmark": "reducer_overhead", "results": {"eager": {}}}}) == {}


def test_summary_has_every_case_and_verdict(tmp_path: Path) -> None:
    facts = {"size": 10**7, "limit_share": 0.94}
    records = {
        "exchange-4x2-1gbit": exchange_record(row("hybrid", 0.13, **facts), row("ring", 0.15, n=1, **facts)),
        "gradients-resnet50-1gbit": gradients_record(ours_tuned=1.0, ddp=1.2),
    }
    for name, record in records.items():
        write_record(tmp_path / f"comm-{name}.json", record)
    write_record(tmp_path / "comm-quick-x.json", records["exchange-4x2-1gbit"])
    (tmp_path / "comm-wire-precision.json").write_text('{"conditions": {}, "rows": []}')
    (tmp_path / "comm-rounding.json").write_text('{"benchmark": "rounding", "rows": []}')
    assert list(summary.read_records(tmp_path)) == list(records), "other JSON is left alone"
    assert list(summary.read_records(tmp_path, quick=True)) == ["x"]
    text = summary.summarise(records)
    assert "| 10 MB | 130 (0.94) | [150 (0.94)] |" in text
    assert "| ours tuned against ddp | gradients-resnet50-1gbit | at least 1.25 times faster | 1.20 " in text
    assert text.count("**not met**") == 1
    assert "Commit abc; 2 cores of an EPYC" in text
    assert text.count("Commit abc, 2026-01-02, an EPYC.") == 2, "of each case: they may differ"
    assert "mpi4py 4" in text
    assert "horovod" not in text.split("## Targets")[0]


def test_summary_names_every_machine_and_day() -> None:
    later = {**FACTS, "machine": "a Xeon", "date": "2026-01-09T03:04:05", "versions": {"horovod": "0.28"}}
    records = {str(n): {**exchange_record(), "conditions": facts} for n, facts in enumerate((later, FACTS))}
    head = summary.summarise(records).split("## Targets")[0]
    assert "2 cores of a Xeon, 24 GiB, 2 cores of an EPYC, 24 GiB" in head
    assert "horovod 0.28, mpi4py 4" in head
    assert "2026-01-02 to 2026-01-09." in head


def test_sizes_to_read() -> None:
    assert [targets.show_size(n) for n in (4, 1000, 300_000, 10**7, 256_000_000)] == [
        "4 B",
        "1 KB",
        "300 KB",
        "10 MB",
        "256 MB",
    ]
    assert plot.far_apart([1000, 3000, 10_000, 30_000, 100_000, 256_000]) == [1000, 10_000, 100_000]


@pytest.mark.slow
def test_image(tmp_path: Path) -> None:
    facts = {"limit_share": 0.5}
    rows = [row(name, 0.1, size=size, **facts) for name in ("hybrid", "gloo") for size in (1000, 10**6)]
    sets = {
        "gradients-resnet50-1gbit": gradients_record(ours_tuned=1.0, ours_fp16=0.5, ddp=1.3, horovod=3),
        "gradients-resnet50-1gbit-cyclic": gradients_record(place="cyclic", ours_tuned=1.0, ddp=2.5),
    }
    chosen = plot.chosen_sets(sets)
    assert list(chosen) == ["ResNet-50, 100 MB\n1 Gbit/s", "ResNet-50, 100 MB\n1 Gbit/s, cyclic ranks"]
    plot.draw([exchange_record(*rows)] * 2, chosen, tmp_path / "docs/comm.png")
    assert (tmp_path / "docs/comm.png").read_bytes().startswith(b"\x89PNG")


def test_case_that_fails_leaves_no_earlier_record(tmp_path: Path) -> None:
    case = cases.Case("broken", "no_such_module", seconds=10)
    path = cases.record_path(tmp_path, case, quick=False)
    path.write_text("{}")
    assert not driver.run_case(case, out=tmp_path, quick=False)
    assert not path.exists()


def test_driver_lists_its_cases() -> None:
    listed = run_benchmark("comm.run", "--list", "--only", "paced", check=True, timeout=60).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [
        "step-resnet50-1gbit-paced",
        "step-resnet50-200mbit-paced",
    ]
    wrong = run_benchmark("comm.run", "--only", "moon", timeout=60)
    assert wrong.returncode == 2
    assert "no case has such a name" in wrong.stderr
