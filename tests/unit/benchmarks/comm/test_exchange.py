"""Sizes and choices of the exchange benchmarks, and that they see wrong sums."""

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_process import from_checkout
from error_texts import naming

from benchmarks.comm import (
    entries,
    exchange,
    gradient_sets,
    gradients,
    reducer_overhead,
    step,
    tuning,
    ways,
)
from benchmarks.comm.job import join
from bigbatch.comm.algorithms.hybrid import Measured
from bigbatch.errors import CommError


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
