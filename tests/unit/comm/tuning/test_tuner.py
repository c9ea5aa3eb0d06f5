"""Tuning: choices from given times, the stored file and its refusals, ready times, and the command alone."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.cli import main
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Measured
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.tuning import ready_times, sweep, tuner
from bigbatch.comm.tuning.cost_model import LinkModel
from bigbatch.comm.tuning.measure import Hops, MeasuredLinks, Sums
from bigbatch.comm.tuning.plan_search import Backward, evaluate_plan, search_plan
from bigbatch.comm.tuning.ready_times import in_ready_order, measure_backward
from bigbatch.comm.tuning.report import explain, explain_links, explain_steps, times_head, times_line
from bigbatch.comm.tuning.sweep import measure_times, tune_sizes
from bigbatch.comm.tuning.tuned import (
    Tuned,
    default_path,
    fingerprint,
    make_cluster,
    read_tuned,
    require_folder,
    write_tuned,
)
from bigbatch.comm.tuning.tuner import choose
from bigbatch.errors import CommError, TunedError
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.tune import communication as tune_comm

CPU = torch.device("cpu")
GROUPS = ((0, 1), (2, 3))
CLUSTER = make_cluster(GROUPS, backend="tcp", wire_dtype=None, device="cpu")
TENSORS = (TensorSpec("fc.weight", 1000, 4, "float32"), TensorSpec("conv.weight", 2000, 4, "float32"))
TUNED = Tuned(
    cluster=CLUSTER,
    model="small",
    tensors=TENSORS,
    table=HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "ring"))),
    sizes=PlanSizes(8000, 12_000, 4000),
    command="bigbatch comm tune --config small",
    evidence={"ready_seconds": {"fc.weight": 0.5}},
)


# --- the stored file ---


def test_tuned_file_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new/tuned.json"
    for tuned in (TUNED, dataclasses.replace(TUNED, sizes=PlanSizes(1, 2, None), evidence={})):
        write_tuned(tuned, path)
        assert read_tuned(path) == tuned
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]  # nothing half-written beside it
    tuned.require_cluster(CLUSTER, path=path)
    tuned.require_model(TENSORS[::-1], path=path)  # the order of parameters is no difference


@pytest.mark.parametrize(
    ("groups", "changed", "fact", "there", "here"),
    [
        (((0, 1),), {}, "world_size", "4", "2"),
        (((0, 1, 2), (3,)), {}, "group_sizes", "2+2", "3+1"),
        (((0, 2), (1, 3)), {}, "placement", "block", "scattered"),
        (GROUPS, {"backend": "gloo"}, "backend", "tcp", "gloo"),
        (GROUPS, {"wire_dtype": "float16"}, "comm.wire_dtype", "null", "float16"),
        (GROUPS, {"max_ctas": 8}, "comm.max_ctas", "null", "8"),
        (GROUPS, {"buffers": "registered"}, "comm.buffers", "torch", "registered"),
        (GROUPS, {"device": "NVIDIA H200"}, "device", "cpu", "NVIDIA H200"),
    ],
)
def test_tuned_file_of_another_cluster_is_refused(
    groups: Any, changed: dict[str, Any], fact: str, there: str, here: str
) -> None:
    other = make_cluster(groups, **{"backend": "tcp", "wire_dtype": None, "device": "cpu", **changed})
    named = naming("a.json", f" {fact} {there} there", f" {here} here", "bigbatch comm tune --config small")
    with pytest.raises(TunedError, match=named):
        TUNED.require_cluster(other, path=Path("a.json"))


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "is_refused"),
    [
        ("float32", None, False),
        ("float32", "float32", False),
        ("float32", "float16", True),
        ("bfloat16", None, True),
        ("bfloat16", "float32", True),
        ("float64", "float16", False),
    ],
)
def test_tuned_file_of_other_sums_is_refused_where_half_precision_travels(
    dtype: str, wire_dtype: str | None, is_refused: bool, tmp_path: Path
) -> None:
    """A file of the time when all sums were rounded at each hop, which none stated."""
    path = tmp_path / "a.json"
    here = make_cluster(GROUPS, backend="tcp", wire_dtype=wire_dtype, device="cpu")
    write_tuned(dataclasses.replace(TUNED, cluster=here, tensors=(TensorSpec("a", 10, 2, dtype),)), path)
    record = json.loads(path.read_text())
    for name in ("reduce_dtype", "max_ctas", "buffers"):
        del record["cluster"][name]
    path.write_text(json.dumps(record))
    read_tuned(path).require_cluster(dataclasses.replace(here, reduce_dtype="wire"), path=path)
    if not is_refused:
        read_tuned(path).require_cluster(here, path=path)
        return
    with pytest.raises(TunedError, match=naming(path, "comm.reduce_dtype wire there, fp32 here", "bigbatch comm tune")):
        read_tuned(path).require_cluster(here, path=path)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (TENSORS[:1], ("conv.weight", "this model's")),
        ((*TENSORS, TensorSpec("bias", 1, 4, "float32")), (" bias ", "that model's")),
        ((TENSORS[0], TensorSpec("conv.weight", 2001, 4, "float32")), ("conv.weight", "2000 float32", "2001 float32")),
        ((TENSORS[0], TensorSpec("conv.weight", 2000, 2, "float16")), ("conv.weight", "2000 float32", "2000 float16")),
    ],
)
def test_tuned_file_of_another_model_is_refused(tensors: tuple[TensorSpec, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(TunedError, match=naming("a.json", *named, "bigbatch comm tune --config small", " --config")):
        TUNED.require_model(tensors, path=Path("a.json"))
    TUNED.require_cluster(CLUSTER, path=Path("a.json"))


def test_placement() -> None:
    def placement(*groups: tuple[int, ...]) -> str:
        return make_cluster(groups, backend="tcp", wire_dtype=None, device="cpu").placement

    assert placement((0, 1), (2, 3)) == placement((2, 3), (0, 1)) == placement((0,), (1,)) == "block"
    assert placement((0, 2), (1, 3)) == placement((0, 1, 3), (2,)) == "scattered"


def remove(key: str) -> Callable[[dict[str, Any]], None]:
    """A file without a key."""
    return lambda record: record.pop(key)


def replace(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """A file with another value."""
    return lambda record: record.update({key: value})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (replace("format", "bigbatch comm tune 2"), ("form", "'bigbatch comm tune 1'")),
        (remove("table"), ("damaged", "'table'")),
        (replace("table", [[5, "ring"]]), ("damaged", "hybrid table", "up_to_bytes=null")),
        (replace("fusion", {"buffer": 1}), ("damaged", "'buffer'")),
        (replace("cluster", {}), ("damaged", "'group_sizes'")),
        (replace("tensors", []), ("damaged", "tensors", "fingerprint")),
    ],
)
def test_tuned_file_that_is_damaged_is_refused(
    damage: Callable[[dict[str, Any]], None], named: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    write_tuned(TUNED, path)
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(TunedError, match=naming(f"{path} ", *named, "bigbatch comm tune")):
        read_tuned(path)


@pytest.mark.parametrize("text", ["", "no JSON", '"text"', "[]"])
def test_tuned_file_that_is_another_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TunedError, match=naming(tmp_path / "a.json", "bigbatch comm tune")):
        read_tuned(tmp_path / "a.json")


def test_tuned_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(
        TunedError, match=naming("read", tmp_path / "absent.json", "No such file or directory", "bigbatch comm tune")
    ):
        read_tuned(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(TunedError, match=naming("write", tmp_path / "file", "File exists", "--output")):
        write_tuned(TUNED, tmp_path / "file/a.json")
    (tmp_path / "a.json").mkdir()
    with pytest.raises(TunedError, match=naming("write", tmp_path / "a.json", "Is a directory", "--output")):
        write_tuned(TUNED, tmp_path / "a.json")
    assert {p.name for p in tmp_path.iterdir()} == {"file", "a.json"}  # nothing half-written


def test_require_folder_refuses_one_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(TunedError, match=naming("write", tmp_path, "Permission denied", "--output")):
        require_folder(tmp_path)


def test_tuned_file_is_one_per_cluster_and_model() -> None:
    uneven = make_cluster(((0, 1, 2), (3,)), backend="tcp", wire_dtype=None, device="cpu")
    assert str(default_path(CLUSTER, "small", TENSORS)).startswith("tuned/small-tcp-2x2-")
    assert str(default_path(uneven, "small", TENSORS)).startswith("tuned/small-tcp-3+1-")
    paths = {
        default_path(CLUSTER, "small", TENSORS),
        default_path(CLUSTER, "small", TENSORS[:1]),
        default_path(dataclasses.replace(CLUSTER, wire_dtype="float16"), "small", TENSORS),
    }
    assert len(paths) == 3
    assert fingerprint(TENSORS) == fingerprint(TENSORS[::-1])


# --- choosing ---


def exact(seconds: float) -> Measured:
    """A time without noise."""
    return Measured((seconds, seconds))


def latency_and_bandwidth(size: int) -> dict[str, Measured]:
    """doubling is quick for short tensors, ring for long ones; they meet at 100 KB."""
    return {"doubling": exact(0.001 + size * 3e-8), "ring": exact(0.003 + size * 1e-8)}


def only(algorithm: str) -> HybridTable:
    """The table of a config that names one algorithm."""
    return HybridTable((HybridRow(None, algorithm),))


TIMES = {4**k: latency_and_bandwidth(4**k) for k in range(5, 12)}
MANY = tuple(TensorSpec(f"t{i}", 50_000, 4, "float32") for i in range(20))
BACKWARD = Backward({f"t{i}": 0.01 * (i + 1) for i in range(20)}, 0.2)


def test_choice_follows_the_times() -> None:
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), TIMES, BACKWARD, MANY, stated=stated, stated_table=only("doubling"))
    assert findings.table.algorithms == ("doubling", "ring")
    assert findings.table.rows[0].up_to_bytes == pytest.approx(100_000, rel=0.02)  # 1 ms + 30 ns/B, 3 ms + 10 ns/B
    # one buffer of 4 MB, ready at the end: all exposed, by line through 1 MB and 4 MB
    assert findings.stated.exposed_seconds == pytest.approx(0.001 + 4e6 * 3e-8, rel=1e-9)
    assert findings.stated_with_fastest.exposed_seconds == pytest.approx(0.003 + 4e6 * 1e-8, rel=1e-9)
    assert findings.least_exposed_seconds <= findings.chosen.exposed_seconds < 0.25 * 0.043
    again = evaluate_plan(findings.chosen.sizes, MANY, BACKWARD, tuner.seconds_by(TIMES, findings.table.choose))
    assert again == findings.chosen


def test_yardsticks_are_never_worse_than_the_choice() -> None:
    """A plan that sends a large gradient alone and its small neighbours together is no cut into runs of neighbours."""
    tensors = tuple(TensorSpec(name, n, 4, "float32") for name, n in (("a", 250), ("large", 25_000), ("b", 250)))
    backward = Backward({"a": 1.0, "large": 2.0, "b": 3.0}, 3.0)
    seconds = {1000: 3.0, 2000: 3.0, 100_000: 5.0, 101_000: 9.0, 102_000: 12.0}
    times = {size: {"ring": exact(value)} for size, value in seconds.items()}
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), times, backward, tensors, stated=stated, stated_table=only("ring"))
    # large from 2 to 7, a and b together from 7 to 10; of runs: a 1 to 4, large 4 to 9, b 9 to 12
    assert findings.chosen.exposed_seconds == pytest.approx(7.0)
    assert findings.least_exposed_seconds == pytest.approx(7.0)


BY_TWENTY_MS = Backward({f"t{i}": 0.02 * (i + 1) for i in range(20)}, 0.4)
"""Of MANY, 200 KB each."""


def test_choice_keeps_what_the_config_states_where_it_is_faster() -> None:
    """Of plans within 0.2% of backward (0.8 ms) the fewest buffers win among themselves, but not over the config's."""
    times = {size: {"ring": exact(1.1e-3 + size * 0.2e-9)} for size in (1024, 4_000_000)}
    stated = PlanSizes(10_000_000, 400_000)
    findings = choose(MeasuredLinks(None, None), times, BY_TWENTY_MS, MANY, stated=stated, stated_table=only("ring"))
    assert findings.stated.exposed_seconds == pytest.approx(1.18e-3)  # the last of ten buffers
    assert (findings.chosen, findings.table) == (findings.stated, only("ring"))
    assert findings.searched.exposed_seconds == pytest.approx(1.9e-3)  # all in one
    (line,) = [line for line in explain_steps(findings) if "kept" in line]
    assert naming_all(line, "1.2 ms", "1.9 ms", "0.8 ms")


@pytest.mark.parametrize(("spread", "is_kept"), [(0.0, False), (0.2, False), (0.9, True)])
def test_choice_within_noise_of_what_the_config_states_is_not_made(spread: float, is_kept: bool) -> None:
    """One buffer ends with backward: 40 ms by ring, 30 ms by doubling, each four times, quartiles `spread` apart.

    Two standard errors of a median are 2 * 1.253 / 1.349 / sqrt(4) = 0.929 of that, and both together 50 ms times
    that and the spread: 9.3 ms at 0.2, and 42 ms at 0.9.
    """

    def times_of(seconds: float) -> Measured:
        apart = spread * seconds
        return Measured((seconds - apart / 2, seconds - apart / 2, seconds + apart / 2, seconds + apart / 2))

    tensors, backward = (TensorSpec("all", 1_000_000, 4, "float32"),), Backward({"all": 0.2}, 0.2)
    times = {4_000_000: {"ring": times_of(0.04), "doubling": times_of(0.03)}}
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), times, backward, tensors, stated=stated, stated_table=only("ring"))
    assert findings.stated.exposed_seconds == pytest.approx(0.04)
    assert findings.searched.exposed_seconds == pytest.approx(0.03)
    assert findings.noise_seconds == pytest.approx(max(0.002 * 0.23, 0.05 * 0.929 * spread), rel=0.01)
    assert findings.table == only("ring" if is_kept else "doubling")
    assert sum("kept" in line for line in explain_steps(findings)) == is_kept


def test_plan_of_the_config_is_among_those_that_are_tried() -> None:
    """Of 40 gradients only a selection of sizes is; a very particular one, the fastest by far, is the config's."""
    tensors = tuple(TensorSpec(f"t{i}", 1000 + 7 * i, 4, "float32") for i in range(40))
    backward = Backward({f"t{i}": 0.001 * i for i in range(40)}, 0.04)
    stated = PlanSizes(1_000_000, 23_456)
    fast = {buffer.num_bytes for buffer in stated.plan(tensors).buffers}
    found = search_plan(tensors, backward, lambda size: 0.001 if size in fast else 1.0, stated=stated)
    assert found.plan == stated.plan(tensors)


def naming_all(text: str, *parts: str) -> bool:
    return all(part in text for part in parts)


def test_algorithm_that_was_not_measured_counts_as_the_table() -> None:
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), TIMES, BACKWARD, MANY, stated=stated, stated_table=only("native"))
    assert findings.stated == findings.stated_with_fastest


def test_algorithm_that_was_given_up_counts_by_its_own_last_slope() -> None:
    given_up = {
        size: {name: at[name] for name in (("ring",) if size > 4**9 else ("ring", "doubling"))}
        for size, at in TIMES.items()
    }
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), given_up, BACKWARD, MANY, stated=stated, stated_table=only("doubling"))
    assert findings.stated.exposed_seconds == pytest.approx(0.001 + 4e6 * 3e-8, rel=1e-9)


def test_times_of_a_larger_sum_are_as_cheap_per_byte_as_a_smaller_ones() -> None:
    """2 KiB in 2 s, 4 KiB within 15% of twice that; 8 KiB in less than four times that, 16 KiB in far more."""
    measured = {1024: 1.9, 2048: 2.0, 4096: 4.5, 8192: 7.0, 16384: 21.0}
    seconds_of = tuner.seconds_by({size: {"ring": exact(s)} for size, s in measured.items()}, lambda size: "ring")
    assert [seconds_of(size) for size in measured] == pytest.approx([1.9, 2.0, 4.0, 7.0, 21.0], rel=1e-12)
    assert seconds_of(32768) == pytest.approx(21.0 + 2 * 14.0, rel=1e-12)  # the last line goes on


@pytest.mark.parametrize(
    ("before", "last", "left"),
    [
        # bytes count (the best took 4 times as long): b fell back further
        ({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 9.0}, ["a"]),
        ({"a": 1.0, "b": 1.06}, {"a": 4.0, "b": 4.3}, ["a"]),
        ({"a": 1.0, "b": 1.04}, {"a": 4.0, "b": 9.0}, ["a", "b"]),  # but was near at the size before
        ({"a": 1.0, "b": 9.0}, {"a": 4.0, "b": 9.0}, ["a", "b"]),  # slow for its latency: it catches up
        ({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 9.0}, ["a", "b"]),  # latency counts still
        ({"a": 9.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, ["a", "b"]),  # the best one changes
    ],
)
def test_survivors_and_who_is_given_up(before: dict[str, float], last: dict[str, float], left: list[str]) -> None:
    times = {size: {n: exact(s) for n, s in at.items()} for size, at in ((1024, before), (4096, last))}
    assert sweep.survivors(times, ["a", "b"]) == left
    assert sweep.survivors({1024: times[1024]}, ["a", "b"]) == ["a", "b"]


def test_survivors_hold_who_seems_behind_by_noise() -> None:
    """1.07 times the best's median, give or take: quartiles 0.5 apart of 2 make that uncertain by far more."""
    noisy = Measured((4.0, 4.28, 4.6))
    times = {1024: {"a": exact(1.0), "b": exact(1.06)}, 4096: {"a": exact(4.0), "b": noisy}}
    assert sweep.survivors(times, ["a", "b"]) == ["a", "b"]


def test_reasons() -> None:
    link = LinkModel(2e-6, 1.25e9)
    links = MeasuredLinks(inside=Hops(tuple((n, exact(link.seconds(n))) for n in (8, 1000, 1 << 40))), across=None)
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(links, TIMES, BACKWARD, MANY, stated=stated, stated_table=only("doubling"))
    lines = explain(findings)
    share = math.log(0.00365536 / 0.00296608) / math.log(0.00365536 / 0.00296608 * 0.00886432 / 0.00562144)
    assert lines[0] == f"algorithm by size: doubling up to {round(2**16 * 4**share):,} bytes; ring above"
    assert "backward: 200.0 ms, its first gradient after 10.0 ms; 20 gradients, 4.0 MB" in lines
    stated_words = "doubling at any size, threshold_bytes 10000000, buffer_bytes 10000000 = 1 buffers"
    assert f"   121.0 ms  as the config states: {stated_words}" in lines
    assert not any("nothing was measured" in line for line in lines)
    few = {size: at for size, at in TIMES.items() if size < 10**6}
    lines = explain(choose(links, few, BACKWARD, MANY, stated=stated, stated_table=only("doubling")))
    assert any("above 262,144 bytes nothing was measured" in line for line in lines)
    assert explain_links(links) == "messages: inside a node 2 us and 10 Gbit/s each way"
    assert explain_links(MeasuredLinks(None, None)) == "messages: none between these ranks"


def test_table_of_times() -> None:
    names = ["ring", "sharded", "native"]
    head, line = times_head(names), times_line(4096, {"ring": exact(0.002), "native": exact(0.0015)}, names)
    assert line.split() == ["4096", "2.000", "-", "1.500*", "n", "=", "2"]
    assert head.index("ring") + len("ring") == line.index("2.000") + len("2.000 ")


@pytest.mark.parametrize(
    ("gradient_bytes", "largest"),
    [(0, 1024), (1, 1024), (1024, 1024), (1025, 2048), (8193, 9216), (102_228_128, 102_228_992), (10**12, 256 << 20)],
)
def test_sizes_reach_to_all_gradients_in_one(gradient_bytes: int, largest: int) -> None:
    sizes = tune_sizes(gradient_bytes)
    assert (sizes[0], sizes[-1]) == (1024, largest)
    assert all(b == 4 * a for a, b in itertools.pairwise(sizes[:-1]))
    assert all(2 <= b / a <= 8 for a, b in itertools.pairwise(sizes))


def fake_times(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float], *, num_wrong: int = 0) -> list[int]:
    """Measurements that take no time and say what they are told; the sizes that were asked for."""
    asked = []

    def time_sums(tensor_N: Tensor, communicators: Any, *, effort: Any, label: str) -> dict[str, Sums]:
        asked.append(tensor_N.nbytes)
        return {name: Sums(exact(seconds_of(tensor_N.nbytes)), num_wrong) for name in communicators}

    monkeypatch.setattr(sweep, "time_sums", time_sums)
    return asked


@pytest.mark.parametrize(("seconds", "largest"), [(1e9, 4**10), (6.0, 4**8), (1e-9, 4**5)])
def test_sizes_that_would_exceed_the_budget_are_left_out(
    seconds: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the algorithms takes a second per MiB: 4**9 would take 3 * 0.25 s of each, 4**10 3 s."""
    asked = fake_times(monkeypatch, lambda num_bytes: num_bytes / 2**20)
    alone = connect(env=ALONE, device=CPU)
    heard: list[int] = []
    sizes = tune_sizes(4**10)
    per_algorithm = 3 * 0.25
    budget = seconds if seconds != 6.0 else per_algorithm * len(alone.algorithms) * 0.9
    times = measure_times(
        alone, sizes, dtype=torch.float16, seconds=budget, on_size=lambda size, at_size: heard.append(size)
    )
    assert asked == heard == sorted(times) == [size for size in sizes if size <= largest]
    assert set(times[1024]) == set(alone.algorithms)


def test_measure_times_ends_at_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, lambda num_bytes: 1.0, num_wrong=3)
    with pytest.raises(CommError, match=naming("native", "3 elements", "1024 bytes", "bigbatch comm bench")):
        measure_times(connect(env=ALONE, device=CPU), [1024], dtype=torch.float32, seconds=1, on_size=lambda *_: None)


def test_measure_times_of_one_rank() -> None:
    alone = connect(env=ALONE, device=CPU)
    times = measure_times(alone, [1024, 4096], dtype=torch.bfloat16, seconds=60, on_size=lambda *_: None)
    # where winners differ, which of one rank noise decides, sizes between the two are measured, too
    assert (min(times), max(times)) == (1024, 4096)
    assert all(measured.min > 0 for at_size in times.values() for measured in at_size.values())


# --- ready times ---


class Slow(torch.autograd.Function):
    """The identity; its backward moves a clock on by one second."""

    clock = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        """Nothing."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """One second."""
        Slow.clock += 1.0
        return gradient


def test_ready_times_by_a_clock_that_backward_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, a second of backward behind each: 0, 1 and 2 s from the last one on; unused ones at the end."""
    monkeypatch.setattr(ready_times.time, "perf_counter", lambda: Slow.clock)
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward() -> Tensor:
        hidden_BC = torch.ones(1, 2)
        for layer in list(layers)[:3]:
            hidden_BC = layer(Slow.apply(hidden_BC.requires_grad_()))
        return hidden_BC.sum()

    parameters = dict(layers.named_parameters())
    backward = measure_backward(parameters, forward, connect(env=ALONE, device=CPU), seconds=10)
    assert backward.seconds == 3.0
    assert backward.ready_seconds == {"2.weight": 0.0, "1.weight": 1.0, "0.weight": 2.0, "3.weight": 3.0}
    assert [spec.name for spec in in_ready_order(parameters, backward)] == [f"{i}.weight" for i in (2, 1, 0, 3)]
    assert all(not p._post_accumulate_grad_hooks for p in parameters.values())  # no hook stays behind


def test_ready_times_at_once_go_last_parameter_first() -> None:
    layer = nn.Linear(3, 2)
    specs = in_ready_order(dict(layer.named_parameters()), Backward({"weight": 1.0, "bias": 1.0}, 1.0))
    assert specs == [TensorSpec("bias", 2, 4, "float32"), TensorSpec("weight", 6, 4, "float32")]


@pytest.mark.gpu
def test_ready_times_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6))).to(device)
    input_BC = torch.randn(4096, 4096, device=device)
    parameters = dict(model.named_parameters())
    alone = connect(env=ALONE, device=device)
    backward = measure_backward(parameters, lambda: model(input_BC).square().mean(), alone, seconds=5)
    ready = [backward.ready_seconds[f"{i}.weight"] for i in reversed(range(6))]
    assert ready == sorted(ready)
    assert 0 < ready[0] < 0.5 * ready[-1]
    assert ready[-1] <= backward.seconds < 5


# --- the command ---

SMALL = ["--config", "quickstart", "--batch.microbatch_size", "4", "--batch.bn_span", "4", "--data.image_size", "16"]


@pytest.mark.slow
def test_tune_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.json"
    assert main(["comm", "tune", *SMALL, "--budget-seconds", "3", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "messages: none between these ranks",
        "all is measured",
        "native",
        "algorithm by size: ",
        "backward: ",
        "fusion plan: ",
        "chosen: ",
        "runs with another table, or none, end with other bits, within rounding, but for run.reproducible",
    ):
        assert text in out
    tuned = read_tuned(path)
    assert (tuned.model, tuned.cluster.world_size, tuned.cluster.backend) == ("resnet9", 1, "single")
    assert tuned.command.startswith("bigbatch comm tune --config quickstart")
    assert {t.name for t in tuned.tensors} == set(tuned.evidence["ready_seconds"])
    ready = [tuned.evidence["ready_seconds"][t.name] for t in tuned.tensors]
    assert ready == sorted(ready)
    assert max(ready) <= tuned.evidence["backward_seconds"]
    assert set(tuned.table.algorithms) <= set(tuned.evidence["all_reduce_seconds"]["1024"])
    assert f"--comm.algorithm hybrid --comm.table {path}" in out
    assert main(["comm", "bench", "--max-bytes", "1K", "--algorithms", "hybrid", "--table", str(path)]) == 0
    write_tuned(dataclasses.replace(tuned, cluster=CLUSTER), path)
    assert main(["comm", "bench", "--table", str(path)]) == 1
    assert re.search(naming(path, "backend tcp there", "single here"), capsys.readouterr().err)


@pytest.mark.parametrize("name", ["resnet18", "resnet152", "alexnet_bn"])
def test_model_by_name_brings_the_options_that_it_has(name: str) -> None:
    arguments = tune_comm._parser().parse_args(["--model", name])
    assert load_config(tune_comm._config_argv(arguments, [])).model.name == name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ("--config is missing",)),
        (
            ["--config", "quickstart", "--model", "resnet50"],
            ("--model resnet50 ", "--config quickstart "),
        ),
        (["--model", "resnet51"], ("model.name=resnet51 ", "resnet50")),
        (["--config", "quickstart", "--budget-seconds", "0"], ("--budget-seconds 0 ",)),
        (["--config", "quickstart", "--best", "0"], ("--best 0 ",)),
        (["--config", "quickstart", "--comm.bufer_bytes", "1"], ("comm.bufer_bytes", "comm.buffer_bytes")),
        ([*SMALL, "--budget-seconds", "1", "--output", "/proc/no/a.json"], ("/proc/no: ", "--output")),
    ],
)
def test_tune_refuses_impossible_arguments(
    options: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comm", "tune", *options]) == 1
    err = capsys.readouterr().err
    assert re.search(naming(*named), err)
    assert len(err.splitlines()) == 1
