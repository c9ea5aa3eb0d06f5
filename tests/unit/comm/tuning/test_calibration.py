"""The table that a job measures for itself: taken again on the same cluster alone, and in bounded time."""

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Measured
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.tuning import calibration
from bigbatch.comm.tuning.calibration import SECONDS, calibrate, make_table
from bigbatch.errors import CommError

SLOW, FAST = Measured((2.0, 2.0)), Measured((1.0, 1.0))
TIMES = {1024: {"doubling": FAST, "ring": SLOW}, 4_000_000: {"doubling": SLOW, "ring": FAST}}
TABLE = HybridTable((HybridRow(64_000, "doubling"), HybridRow(None, "ring")))


def one_rank() -> Communicator:
    return connect(env=ALONE, device=torch.device("cpu"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Measurements that take no time; the seconds that each was given."""
    given: list[float] = []

    def measure_times(*_: object, seconds: float, **__: object) -> Any:
        given.append(seconds)
        return TIMES

    monkeypatch.setattr(calibration, "measure_times", measure_times)
    return given


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_calibration_measures_once_and_takes_it_again(tmp_path: Path, measured: list[float]) -> None:
    folder = tmp_path / "cache/bigbatch/calibration"
    first = calibrate(one_rank(), folder=folder)
    path = only_file(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, path)] == [0o700, 0o600]
    assert f"stored in {path}" in first.source
    again = calibrate(one_rank(), folder=folder)
    assert (again.table, again.text) == (first.table, first.text)
    assert str(path) in again.source
    assert len(measured) == 1
    assert SECONDS - 1 < measured[0] <= SECONDS


def test_calibration_states_what_it_can_change_and_what_it_rests_on(tmp_path: Path, measured: list[float]) -> None:
    calibrate(one_rank(), folder=tmp_path)
    record = json.loads(only_file(tmp_path).read_text())
    assert "rounding" in record["changes"]
    assert record["all_reduce_seconds"]["1024"] == {"doubling": 1.0, "ring": 2.0}
    ((count, rank),) = record["ranks"]
    assert count == 1
    assert rank["libraries"]["torch"] == torch.__version__
    assert record["cluster"]["group_sizes"] == [1]


def other_rates() -> dict[str, str]:
    return {"eth0": "100000"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("cpu_name", lambda: "another CPU"),
        ("num_cores", lambda: 1000),
        ("link_rates", other_rates),
        ("__version__", "0.0.1"),
        ("device_name", lambda device: "NVIDIA H200"),
    ],
)
def test_calibration_of_another_cluster_is_not_taken(
    name: str, other: Any, tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(one_rank(), folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(calibration, name, other)
        calibrate(one_rank(), folder=tmp_path)
    assert (len(measured), len(list(tmp_path.iterdir()))) == (2, 2)
    calibrate(one_rank(), interface="eth7", folder=tmp_path)
    assert (len(measured), len(list(tmp_path.iterdir()))) == (3, 3)
    calibrate(one_rank(), settings={"max_ctas": 8}, folder=tmp_path)
    assert (len(measured), len(list(tmp_path.iterdir()))) == (4, 4)
    calibrate(one_rank(), folder=tmp_path)  # the first one's is still there
    assert len(measured) == 4


def test_calibration_of_other_settings_does_not_go_on_with_a_run(tmp_path: Path, measured: list[float]) -> None:
    calibrate(one_rank(), settings={"reduce_dtype": "wire"}, folder=tmp_path)
    found = calibrate(one_rank(), settings={"reduce_dtype": "fp32"}, kept=only_file(tmp_path), folder=None)
    assert naming_all(found.source, "is not taken", "settings")
    assert len(measured) == 2


def test_calibration_of_nccl_goes_by_its_environment(
    tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(calibration, "nccl_version", lambda: "2.30.4")
    alone = one_rank()
    alone.backend.name = "nccl"
    for settings, expected in (({}, 1), ({"NCCL_DEBUG": "INFO"}, 1), ({"NCCL_ALGO": "Tree"}, 2)):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        calibrate(alone, folder=tmp_path)
        assert len(measured) == expected
    alone.backend.name = "tcp"
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    for _ in range(2):
        calibrate(alone, folder=tmp_path)
    assert len(measured) == 3


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def spoiled(data: bytes) -> bytes:
        record = json.loads(data)
        change(record)
        return json.dumps(record).encode()

    return spoiled


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: b"\xff\xfe\x00",
        lambda data: b"[" * 100_000,
        lambda data: b"[]",
        spoil(lambda record: record.update(format="bigbatch calibration 9")),
        spoil(lambda record: record.pop("table")),
        spoil(lambda record: record.update(table=[[10, "ring"]])),
        spoil(lambda record: record.update(table=[[None, "tree"]])),
        spoil(lambda record: record.update(table="__import__('os')")),
        spoil(lambda record: record.update(date=None)),
        spoil(lambda record: record["cluster"].update(world_size=2)),
    ],
)
def test_calibration_that_is_damaged_is_named_and_measured_anew(
    spoiled: Callable[[bytes], bytes], tmp_path: Path, measured: list[float]
) -> None:
    calibrate(one_rank(), folder=tmp_path)
    path = only_file(tmp_path)
    path.write_bytes(spoiled(path.read_bytes()))
    found = calibrate(one_rank(), folder=tmp_path)
    assert found.source.startswith(f"{path} is not taken (")
    assert "\n" not in found.source
    assert "measured in" in found.source
    assert calibrate(one_rank(), folder=tmp_path).table == found.table
    assert len(measured) == 2


def test_calibration_of_another_user_is_not_read(
    tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(one_rank(), folder=tmp_path)
    path, before = only_file(tmp_path), only_file(tmp_path).read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    found = calibrate(one_rank(), folder=tmp_path)
    assert naming_all(found.source, path, "another user", "measured in", "not stored")
    assert (len(measured), path.read_bytes()) == (2, before)


def naming_all(text: str, *parts: object) -> bool:
    return all(str(part) in text for part in parts)


@pytest.mark.parametrize("make", [lambda path, there: path.symlink_to(there), lambda path, there: os.mkfifo(path)])
def test_calibration_is_read_from_a_plain_file_alone(
    make: Callable[[Path, Path], None], tmp_path: Path, measured: list[float]
) -> None:
    calibrate(one_rank(), folder=tmp_path / "a")
    path = only_file(tmp_path / "a")
    path.rename(tmp_path / "there")
    make(path, tmp_path / "there")
    found = calibrate(one_rank(), folder=tmp_path / "a")
    assert naming_all(found.source, f"{path} is not read (", "stored in")
    assert len(measured) == 2
    assert path.is_file()
    assert not path.is_symlink()


def test_calibration_without_a_place_to_keep_it(tmp_path: Path, measured: list[float]) -> None:
    assert "not stored" in calibrate(one_rank(), folder=None).source
    (tmp_path / "file").write_text("")
    assert naming_all(calibrate(one_rank(), folder=tmp_path / "file/a").source, "not stored", tmp_path)
    assert len(measured) == 2


def test_calibration_always_looks_at_no_file(tmp_path: Path, measured: list[float]) -> None:
    for _ in range(2):
        found = calibrate(one_rank(), is_fresh=True, folder=tmp_path, kept=only_file(tmp_path) if measured else None)
        assert "measured in" in found.source
    assert len(measured) == 2


def test_calibration_of_the_run_goes_before_the_users(tmp_path: Path, measured: list[float]) -> None:
    """A run that goes on ends with the same bits, whatever was measured since."""
    first, kept = calibrate(one_rank(), folder=tmp_path / "a"), tmp_path / "run/calibration.json"
    kept.parent.mkdir()
    record = json.loads(first.text)
    kept.write_text(json.dumps({**record, "table": [[None, "sharded"]]}))
    found = calibrate(one_rank(), folder=tmp_path / "a", kept=kept)
    assert str(found.table) == "sharded at any size"
    assert str(kept) in found.source
    kept.write_text(json.dumps({**record, "ranks": []}))
    found = calibrate(one_rank(), folder=tmp_path / "a", kept=kept)
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


def test_calibration_ends_where_a_sum_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_(self: Communicator, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        return tensor_N.add_(1)

    monkeypatch.setattr(Communicator, "sum_", sum_)
    with pytest.raises(CommError, match=naming("native", "1024 bytes", "bigbatch comm bench")):
        calibrate(one_rank(), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gather_seconds", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("seconds_per_mb", [1e-5, 1e-3, 0.01, 0.05, 0.5, 2.0, 20.0])
def test_calibration_keeps_to_its_time(
    seconds_per_mb: float, gather_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that sums and words between ranks move on, and nothing else."""
    now = [0.0]

    def sum_(self: Communicator, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        latency, share = (1e-3, 2.0) if self.algorithm == "doubling" else (3e-3, 1.0)
        now[0] += latency + share * seconds_per_mb * tensor_N.nbytes / 1e6
        return tensor_N

    gather_text = Communicator.gather_text

    def gather(self: Communicator, text: str) -> list[str]:
        now[0] += gather_seconds
        return gather_text(self, text)

    monkeypatch.setattr(Communicator, "sum_", sum_)
    monkeypatch.setattr(Communicator, "gather_text", gather)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = calibrate(one_rank(), folder=tmp_path)
    assert now[0] <= SECONDS
    sizes = [int(size) for size in json.loads(found.text)["all_reduce_seconds"]]
    if seconds_per_mb <= 1e-3 and gather_seconds < 0.1:
        assert max(sizes) > 1_000_000
    if max(sizes) < 1_000_000:
        assert found.table.choose(25_000_000) == "native"  # of one rank
