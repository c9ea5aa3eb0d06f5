"""torch's flight recorder: read in its JSON form, kept in a file, compared between ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigbatch.comm.rendezvous import environ, last_words
from bigbatch.comm.rendezvous.last_words import compare, keep_flight, read_flight

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


def entry(number: int, state: str, *, group: str = "0", name: str = "nccl:all_reduce") -> dict[str, Any]:
    """A collective or message, in the words of torch 2.14's ProcessGroupNCCL."""
    is_message = "->" in name
    return {
        "collective_seq_id": 0 if is_message else number,
        "p2p_seq_id": number if is_message else 0,
        "is_p2p": is_message,
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "retired": name.startswith("gloo"),
        "state": state,
    }


def dump(*entries: dict[str, Any], ranks: str | None = "[0, 1, 2]") -> str:
    """What a rank's recorder holds."""
    groups = {} if ranks is None else {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return json.dumps({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": list(entries)})


def test_flight_finds_the_first_collective_that_has_not_ended() -> None:
    text = dump(
        entry(1, "scheduled", group="1", name="gloo:all_reduce"),  # these have no state of their own
        entry(5, "started", name="nccl:send 0->1"),
        entry(2, "completed"),
        entry(3, "started"),
        entry(4, "scheduled"),
        entry(1, "scheduled", group="2"),
    )
    found = read_flight(text)
    assert found.begun == {"0": 4, "1": 1, "2": 1}
    waiting = found.waiting
    assert waiting is not None
    assert (waiting.group.name, waiting.number, waiting.name) == ("0", 3, "nccl:all_reduce")
    assert waiting.group.ranks == (0, 1, 2)
    assert read_flight(dump(entry(1, "completed"))).waiting is None


def test_flight_of_a_coalesced_collective_that_has_ended_waits_in_the_next() -> None:
    """The recorder follows the state of its end alone."""
    parts = [entry(1, "scheduled", name="nccl:_broadcast_oop") for _ in range(2)]
    end = entry(1, "completed", name="nccl:ALLGATHER_coalesced")
    waiting = read_flight(dump(*parts, end, entry(2, "started"))).waiting
    assert waiting is not None
    assert waiting.number == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"entries": [{}]}', '{"entries": [{"is_p2p": false}]}'])
def test_flight_that_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        read_flight(text)


def test_flight_of_other_ranks_tells_who_is_behind() -> None:
    mine = read_flight(dump(entry(3, "started"), entry(4, "scheduled")))
    told = {0: {"0": 4}, 1: {"0": 2}, 7: {"0": 1}}
    expected = (
        "it waits in collective 3 (nccl:all_reduce) of process group 0, rank 1 has begun 2, rank 2 did not answer"
    )
    assert compare(mine, told) == expected
    nobodys = read_flight(dump(entry(3, "started"), ranks=None))
    assert compare(nobodys, told).endswith("rank 1 has begun 2, rank 7 has begun 1"), (
        "ranks that told, as torch does not"
    )
    assert compare(read_flight(dump(entry(3, "completed"))), told) == ""


@pytest.mark.parametrize("name", VARIABLES[2:])
def test_flight_is_kept_beside_torchs_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"{tmp_path}/trace_")
    path = keep_flight("{}", rank=3)
    assert path == tmp_path / "trace_3.json"
    assert path.read_text() == "{}"


def test_flight_is_kept_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words.tempfile, "tempdir", str(tmp_path))
    paths = [keep_flight("{}", rank=3) for _ in range(2)]
    assert len(set(paths)) == 2, "two jobs of a host"
    assert all(path.parent == tmp_path and "rank-3" in path.name and path.read_text() == "{}" for path in paths)


def test_recorder_is_on_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    environ.record_flights()
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ.os.environ
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    environ.record_flights()
    assert "TORCH_FR_BUFFER_SIZE" not in environ.os.environ
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE")
    environ.record_flights()
    assert int(environ.os.environ["TORCH_FR_BUFFER_SIZE"]) > 0


THREE_SUMS = """
import torch
import torch.distributed as dist
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE, record_flights
from bigbatch.comm.rendezvous.last_words import dump_flight, read_flight

record_flights()
met = Control(ALONE, timeout_seconds=5)
met.store = BoundedStore(dist.HashStore(), seconds=5)
backend = TorchDistributedBackend(ALONE, met, library="gloo", device=torch.device("cpu"))
for _ in range(3):
    backend.all_reduce_(torch.ones(4), backend.world)
print(sorted(read_flight(dump_flight()).begun.values()))
backend.abandon()
"""


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(last_words._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records NCCL only"
)
def test_flight_of_real_collectives_is_read() -> None:
    """In a process of its own: torch asks for the recorder's size once."""
    done = subprocess.run([sys.executable, "-c", THREE_SUMS], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["[3]"], done.stderr  # gloo of torch 2.10 speaks, too
