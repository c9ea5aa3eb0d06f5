"""The table that a job measures for itself: taken again on the same cluster alone, and in bounded time."""

import dataclasses
import itertools
import json
import os
import random
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming
from one_rank import alone
from spoiled_records import NO_RECORDS, spoil

from benchmarks.comm.messages import plan_of
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, MeasuredTimes
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.measure import calibration
from bigbatch.comm.measure.calibration import SECONDS, calibrate
from bigbatch.comm.measure.cost_model import MODELS, ClusterModel, LinkModel
from bigbatch.comm.measure.sizes import SumTimes, find_disturbance, make_table, sizes_up_to
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CommError
from bigbatch.trainer.build.job import fusion_sizes
from bigbatch.trainer.config.file import load_config

SLOW, FAST = MeasuredTimes((2.0, 2.0)), MeasuredTimes((1.0, 1.0))
TIMES = {1024: {"doubling": FAST, "ring": SLOW}, 4_000_000: {"doubling": SLOW, "ring": FAST}}
TABLE = HybridTable((HybridRow(64_000, "doubling"), HybridRow(None, "ring")))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    given: list[float] = []

    def measure(*_: object, start: float, seconds: float, **__: object) -> Any:
        given.append(start + seconds - time.perf_counter())
        return SumTimes(TIMES, TABLE, {})

    monkeypatch.setattr(calibration, "measure_sums", measure)
    return given


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_calibration_measures_once_and_takes_it_again(tmp_path: Path, measured: list[float]) -> None:
    folder = tmp_path / "cache/bigbatch/calibration"
    first = calibrate(alone(), folder=folder)
    path = only_file(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, path)] == [0o700, 0o600]
    assert f"stored in {path}" in first.source
    again = calibrate(alone(), folder=folder)
    assert (again.table, again.text) == (first.table, first.text)
    assert str(path) in again.source
    assert len(measured) == 1
    assert 0.0 < measured[0] <= SECONDS
    assert "measured in" in calibrate(alone(), is_fresh=True, folder=folder, kept=path).source
    assert len(measured) == 2
    record = json.loads(path.read_text())
    assert "rounding" in record["changes"]
    assert record["all_reduce_seconds"]["1024"] == {"doubling": 1.0, "ring": 2.0}
    ((count, rank),) = record["ranks"]
    assert count == 1
    assert rank["libraries"]["torch"] == torch.__version__
    assert record["cluster"]["group_sizes"] == [1]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("cpu_name", lambda: "another CPU"),
        ("num_cores", lambda: 1000),
        ("link_rates", lambda: {"eth0": "100000"}),
        ("__version__", "0.0.1"),
        ("device_name", lambda device: "NVIDIA H200"),
    ],
)
def test_calibration_of_another_cluster_is_not_taken(
    name: str, other: Any, tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(alone(), folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(calibration, name, other)
        calibrate(alone(), folder=tmp_path)
    assert (len(measured), len(list(tmp_path.iterdir()))) == (2, 2)
    calibrate(alone(), folder=tmp_path)  # the first one's is still there
    assert len(measured) == 2


def test_calibration_goes_by_interface_and_buffers(tmp_path: Path, measured: list[float]) -> None:
    calibrate(alone(), folder=tmp_path)
    calibrate(alone(), interface="eth7", folder=tmp_path)
    calibrate(dataclasses.replace(alone(), buffers="registered"), folder=tmp_path)
    assert (len(measured), len(list(tmp_path.iterdir()))) == (3, 3)


def test_calibration_of_other_settings_does_not_go_on_with_a_run(tmp_path: Path, measured: list[float]) -> None:
    before = connect(env=ALONE, device=torch.device("cpu"), reduce_dtype="wire")
    calibrate(before, folder=tmp_path)
    found = calibrate(alone(), kept=only_file(tmp_path), folder=None)
    assert naming_all(found.source, "is ignored", "settings", "reduce_dtype 'wire' there, 'fp32' here")
    assert len(measured) == 2
    record = json.loads(only_file(tmp_path).read_text())
    for name in ("reduce_dtype", "buffers"):  # as files were before they stated these
        del record["cluster"][name]
    only_file(tmp_path).write_text(json.dumps(record))
    assert calibrate(before, folder=tmp_path).source.startswith(str(only_file(tmp_path)))
    assert "is ignored" in calibrate(alone(), kept=only_file(tmp_path), folder=None).source
    assert len(measured) == 3


def test_calibration_of_nccl_goes_by_its_environment(
    tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(calibration, "nccl_version", lambda: "2.30.4")
    one = alone()
    one.backend.name = "nccl"
    for settings, expected in (({}, 1), ({"NCCL_DEBUG": "INFO"}, 1), ({"NCCL_ALGO": "Tree"}, 2)):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        calibrate(one, folder=tmp_path)
        assert len(measured) == expected
    one.backend.name = "tcp"
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    for _ in range(2):
        calibrate(one, folder=tmp_path)
    assert len(measured) == 3


@pytest.mark.parametrize(
    "spoiled",
    [
        *NO_RECORDS,
        spoil(lambda record: record.update(format="bigbatch calibration 9")),
        spoil(lambda record: record.pop("table")),
        spoil(lambda record: record.update(table=[[10, "ring"]])),
        spoil(lambda record: record.update(table=[[None, "tree"]])),
        spoil(lambda record: record.update(table=[[float("nan"), "ring"], [None, "native"]])),
        spoil(lambda record: record.update(table=None)),
        lambda data: re.sub(rb'"table": .*?\]\s*\]', b'"table": [[1' + b"0" * 9999 + b', "native"]]', data, flags=re.S),
        spoil(lambda record: record.update(date=None)),
        spoil(lambda record: record.update(date="2026-01-01\n0: all is well")),
        spoil(lambda record: record.update(cluster=[])),
        spoil(lambda record: record.update(ranks="x" * 100_000)),
        spoil(lambda record: record["cluster"].update(world_size=2)),
    ],
)
def test_calibration_that_is_damaged_is_named_and_measured_anew(
    spoiled: Callable[[bytes], bytes], tmp_path: Path, measured: list[float]
) -> None:
    calibrate(alone(), folder=tmp_path)
    path = only_file(tmp_path)
    path.write_bytes(spoiled(path.read_bytes()))
    found = calibrate(alone(), folder=tmp_path)
    assert found.source.startswith(f"{path} is ignored (")
    assert "\n" not in found.source
    assert len(found.source) < 1000
    assert "measured in" in found.source
    assert calibrate(alone(), folder=tmp_path).table == found.table
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("num_bytes", "smallest", "largest"), [(0, 1024, 1024), (8193, 2048, 8192), (10**12, 1024, 256 << 20)]
)
def test_sizes_fall_by_four_from_the_largest(num_bytes: int, smallest: int, largest: int) -> None:
    sizes = sizes_up_to(num_bytes)
    assert (sizes[0], sizes[-1]) == (smallest, largest)
    assert all(b == pytest.approx(4 * a, abs=32) for a, b in itertools.pairwise(sizes))
    assert all(size % 8 == 0 for size in sizes)


def naming_all(text: str, *parts: object) -> bool:
    return all(str(part) in text for part in parts)


def test_calibration_that_cannot_be_read_is_named_and_replaced(tmp_path: Path, measured: list[float]) -> None:
    calibrate(alone(), folder=tmp_path)
    path = only_file(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert naming_all(calibrate(alone(), folder=tmp_path).source, f"{path} cannot be read (", "stored in")
    assert len(measured) == 2
    assert path.is_file()


def test_calibration_without_a_place_to_keep_it(tmp_path: Path, measured: list[float]) -> None:
    assert "not stored" in calibrate(alone(), folder=None).source
    (tmp_path / "file").write_text("")
    assert naming_all(calibrate(alone(), folder=tmp_path / "file/a").source, "not stored", tmp_path)
    assert len(measured) == 2


def test_calibration_of_the_run_goes_before_the_users(tmp_path: Path, measured: list[float]) -> None:
    """A run that continues ends with the same bits, whatever was measured since."""
    first, kept = calibrate(alone(), folder=tmp_path / "a"), tmp_path / "run/calibration.json"
    kept.parent.mkdir()
    record = json.loads(first.text)
    kept.write_text(json.dumps({**record, "table": [[None, "sharded"]]}))
    found = calibrate(alone(), folder=tmp_path / "a", kept=kept)
    assert str(found.table) == "sharded at any size"
    assert str(kept) in found.source
    kept.write_text(json.dumps({**record, "ranks": []}))
    found = calibrate(alone(), folder=tmp_path / "a", kept=kept)
    assert found.table == first.table
    assert naming_all(found.source, kept, "another cluster", only_file(tmp_path / "a"))
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("largest", "beyond", "expected"),
    [
        (4_000_000, "native", "doubling up to 64,000 bytes; ring above"),
        (999_999, "ring", "doubling up to 32,000 bytes; ring above"),
        (999_999, "native", "doubling up to 32,000 bytes; ring up to 999,999 bytes; native above"),
    ],
)
def test_calibration_does_not_judge_buffers_by_short_sums(largest: int, beyond: str, expected: str) -> None:
    """Crossings lie at the geometric mean of two sizes, where the ratios of the times are each other's inverse."""
    table = make_table({1024: TIMES[1024], largest: TIMES[4_000_000]}, beyond=beyond)
    assert str(table) == expected


def times_of(*medians: float, spread: float = 0.1, count: int = 8) -> dict[int, dict[str, MeasuredTimes]]:
    """Times of the fastest at sizes four times each other, whose quartiles lie that share of the median apart."""
    swings = [spread / 2 * (-1) ** i for i in range(count)]
    slow = MeasuredTimes((99.0, 99.0))
    return {
        1024 * 4**i: {"ring": MeasuredTimes(tuple(median * (1 + each) for each in swings)), "doubling": slow}
        for i, median in enumerate(medians)
    }


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ({}, ()),
        (times_of(1.0, 1.2, 1.1, 3.0), ()),
        (times_of(1.9, 1.0, 1.0, 3.0), ()),
        (times_of(1.0e-3, 1.1e-3, 93.1e-3, 1.6e-3), ("93.1 ms for 16,384 bytes", "1.6 ms for 65,536")),
        (times_of(93.1e-3, 1.6e-3, count=2), ()),  # two times may have met one hiccup
        (times_of(1.0, 2.0, 3.0, spread=0.45), ()),
        (times_of(1.0, 2.0, 3.0, spread=0.6), ("4,096 bytes", "60%")),
        (times_of(1.0, 2.0, 3.0) | {4: times_of(1.0, spread=0.9)[1024]}, ()),  # one of several sizes
    ],
)
def test_calibration_tells_times_that_other_work_disturbed(times: Any, told: tuple[str, ...]) -> None:
    found = find_disturbance(times)
    assert bool(found) == bool(told)
    assert naming_all(found, *told)


def test_calibration_keeps_the_default_on_a_busy_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum may lose its core for 30 ms, three of seven times: a host with more busy processes than cores."""
    draw = random.Random(0)

    def seconds_of(algorithm: str, num_bytes: int) -> float:
        return (1e-3 if algorithm == "doubling" else 1.2e-3) + num_bytes * 1e-9 + 0.03 * (draw.random() < 3 / 7)

    play(monkeypatch, seconds_of, gather=0.0)
    found = calibrate(alone(), folder=tmp_path, buffer_bytes=LARGEST, seconds=2.0)
    assert str(found.table) == "native at any size"  # of one rank
    assert naming_all(found.source, "measured in", "without a choice", "other work disturbed it (", "stored in")


def test_calibration_ends_where_a_sum_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_(self: Communicator, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        return tensor_N.add_(1)

    monkeypatch.setattr(Communicator, "sum_", sum_)
    with pytest.raises(CommError, match=naming("native", " bytes", "bigbatch comm bench")):
        calibrate(alone(), folder=tmp_path, buffer_bytes=4096)
    assert list(tmp_path.iterdir()) == []


def play(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[str, int], float], *, gather: float) -> list[float]:
    """A clock, in a list, that sums by an algorithm of so many bytes and words between ranks move on, nothing else."""
    now = [0.0]

    def sum_(self: Communicator, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        now[0] += seconds_of(self.algorithm, tensor_N.nbytes)
        return tensor_N

    def after_words(words: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def slow(*args: Any, **kwargs: Any) -> list[str]:
            now[0] += gather
            return words(*args, **kwargs)

        return slow

    monkeypatch.setattr(Communicator, "sum_", sum_)
    for name in ("gather_text", "collect_text"):
        monkeypatch.setattr(Control, name, after_words(getattr(Control, name)))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_calibration_of_2048_ranks_covers_the_buffers_of_imagenet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 nodes of 8, by the cost model: 30 us and 100 Gbit/s between nodes; native as slow as a ring over all."""
    cluster = ClusterModel((8,) * 256, inside=LinkModel(10e-6, 1e10), across=LinkModel(30e-6, 12.5e9))

    def seconds_of(algorithm: str, num_bytes: int) -> float:
        return MODELS[algorithm if algorithm in MODELS else "ring"](num_bytes, cluster)

    now = play(monkeypatch, seconds_of, gather=0.2)
    config = load_config(["--config", "imagenet/resnet50_8k"])
    found = calibrate(alone(), folder=tmp_path, buffer_bytes=fusion_sizes(config).buffer_bytes)
    assert now[0] <= SECONDS
    measured = {int(size): set(at) for size, at in json.loads(found.text)["all_reduce_seconds"].items()}
    buffers = [buffer.num_bytes for buffer in plan_of("imagenet/resnet50_8k")]
    assert sum(buffers) > 50e6
    covered = [size for size in buffers if min(measured) <= size <= max(measured)]
    assert sum(covered) >= 0.99 * sum(buffers)
    one = alone()
    swept = [size for size in sizes_up_to(fusion_sizes(config).buffer_bytes) if size in measured]
    assert all(measured[size] == set(one.algorithms) for size in swept)
    for size in covered:  # the closed forms say which is the fastest there
        best = min(seconds_of(name, size) for name in MODELS)
        assert seconds_of(found.table.choose(size), size) <= 1.05 * best


LARGEST = 4_000_000


@pytest.mark.parametrize("gather_seconds", [0.0, 0.4, 1.6])
@pytest.mark.parametrize("seconds_per_mb", [1e-3, 0.5, 20.0])
def test_calibration_keeps_to_its_time(
    seconds_per_mb: float, gather_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(algorithm: str, num_bytes: int) -> float:
        latency, share = (1e-3, 2.0) if algorithm == "doubling" else (3e-3, 1.0)
        return latency + share * seconds_per_mb * num_bytes / 1e6

    now = play(monkeypatch, seconds_of, gather=gather_seconds)
    one = alone()
    start = now[0]
    found = calibrate(one, folder=tmp_path, buffer_bytes=LARGEST)
    assert now[0] - start <= SECONDS
    sizes = [int(size) for size in json.loads(found.text)["all_reduce_seconds"]]
    if not sizes:
        assert (gather_seconds >= 0.6, str(found.table)) == (True, "native at any size")
        assert "without any sum, for lack of time" in found.source
        return
    asked = sizes_up_to(LARGEST)
    assert (f"above {max(sizes):,}" in found.source) == (max(sizes) < asked[-1])
    assert (f"below {min(sizes):,} bytes" in found.source) == (min(sizes) > asked[0])
    assert ("for lack of time" in found.source) == ((min(sizes), max(sizes)) != (asked[0], asked[-1]))
    if seconds_per_mb <= 1e-3 and gather_seconds <= 0.6:  # what counts for gradients comes first
        assert max(sizes) > 1_000_000
    if max(sizes) < 1_000_000:
        assert found.table.choose(25_000_000) == "native"  # of one rank
