"""torch's flight recorder: read in its JSON form, kept in a file, compared between ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from played_flights import PlayedRank, play

from bigbatch.comm.rendezvous import environ, hang_report
from bigbatch.comm.rendezvous.hang_report import Flight, compare, keep_flight, read_flight

VARIABLES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)


@pytest.fixture(autouse=True)
def none_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of torch's recorder from the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def flight_of(rank: PlayedRank) -> Flight:
    return read_flight(json.dumps(rank.dump()))


def test_flight_finds_the_first_collective_that_has_not_ended() -> None:
    rank, *_ = play(3, {"2": [0, 1]})
    rank.call().call().message("send", 1, "started").call(state="started").call(state="scheduled")
    rank.call(state="scheduled", group="2")
    found = flight_of(rank)
    assert found.begun == {"0": 4, "2": 1}
    assert found.waiting is not None
    assert (found.waiting.group.name, found.waiting.number, found.waiting.name) == ("0", 3, "nccl:all_reduce")
    assert found.waiting.group.ranks == (0, 1, 2)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"entries": [{}]}', '{"entries": [{"is_p2p": false}]}'])
def test_flight_that_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        read_flight(text)


def test_flight_of_other_ranks_tells_who_is_behind() -> None:
    rank, *_ = play(3)
    assert compare(flight_of(rank.call(times=2)), {1: {"0": 1}}) == ""
    mine, told = rank.call(state="started").call(state="scheduled"), {0: {"0": 4}, 1: {"0": 2}, 7: {"0": 1}}
    where = "it waits in collective 3 (nccl:all_reduce) of process group 0, rank 1 has begun 2, "
    assert compare(flight_of(mine), told) == f"{where}rank 2 did not answer"
    rank.groups["0"] = []
    assert compare(flight_of(mine), told) == f"{where}rank 7 has begun 1", "ranks that told, as torch does not"


@pytest.mark.parametrize("name", VARIABLES[2:])
def test_flight_is_kept_beside_torchs_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"{tmp_path}/trace_")
    path = keep_flight("{}", rank=3)
    assert path == tmp_path / "trace_3.json"
    assert path.read_text() == "{}"


def test_flight_is_kept_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_report.tempfile, "tempdir", str(tmp_path))
    paths = [keep_flight("{}", rank=3) for _ in range(2)]
    assert len(set(paths)) == 2, "two jobs of a host"
    assert all(path.parent == tmp_path and "rank-3" in path.name and path.read_text() == "{}" for path in paths)


def test_recorder_is_on_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    environ.enable_flight_recorder()
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ.os.environ
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    environ.enable_flight_recorder()
    assert "TORCH_FR_BUFFER_SIZE" not in environ.os.environ
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE")
    environ.enable_flight_recorder()
    assert int(environ.os.environ["TORCH_FR_BUFFER_SIZE"]) > 0


THREE_SUMS = """
import torch
import torch.distributed as dist
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.environ import ALONE, enable_flight_recorder
from bigbatch.comm.rendezvous.hang_report import dump_flight, read_flight

enable_flight_recorder()
met = JobControl(ALONE, timeout_seconds=5)
met.store = BoundedStore(dist.HashStore(), seconds=5)
backend = TorchDistributedBackend(ALONE, met, library="gloo", device=torch.device("cpu"))
for _ in range(3):
    backend.all_reduce_(torch.ones(4), backend.world)
print(sorted(read_flight(dump_flight()).begun.values()))
backend.abandon()
"""


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(hang_report._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records NCCL only"
)
def test_flight_of_real_collectives_is_read() -> None:
    """In a process of its own: torch asks for the recorder's size once."""
    done = subprocess.run([sys.executable, "-c", THREE_SUMS], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["[3]"], done.stderr  # gloo of torch 2.10 speaks, too
