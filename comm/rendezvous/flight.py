"""What torch's flight recorder knows of this process's collectives: kept in a file, and compared between ranks.

In its JSON form. The other one is a pickle, and reading a file that somebody else wrote would run code.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch._C import _distributed_c10d

from bigbatch.comm.rendezvous.environ import flight_prefix


@dataclass(frozen=True)
class Waiting:
    """The first collective that has not ended: its number within its process group, and that group's ranks.

    ranks is empty where torch does not tell them.
    """

    group: str
    number: int
    operation: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Flight:
    """A process's collectives; messages between two ranks, which torch counts for each pair, are left out."""

    begun: dict[str, int]
    """Name of a process group -> number of the last collective that was begun in it."""
    waiting: Waiting | None


def dump_flight() -> str:
    """Dump this process's recorder; empty where torch has none, or it recorded nothing."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's own; that of other libraries
        dump = getattr(_distributed_c10d, name, None)
        text = dump().decode(errors="replace") if dump else ""
        if '"entries"' in text:
            return text
    return ""


def read_flight(text: str) -> Flight:
    """Read a dump. Raises: ValueError or LookupError where torch writes it otherwise."""
    dump = json.loads(text)
    begun: dict[str, int] = {}
    waiting = None
    for entry in dump["entries"]:
        if entry["is_p2p"]:
            continue
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        begun[group] = max(begun.get(group, 0), number)
        # retired: torch waits for it no more
        if waiting is None and entry["state"] != "completed" and not entry["retired"]:
            ranks = json.loads(dump["pg_config"].get(group, {}).get("ranks", "[]"))
            waiting = Waiting(group, number, entry["profiling_name"], tuple(ranks))
    return Flight(begun, waiting)


def keep_flight(text: str, *, rank: int) -> Path:
    """Write a dump to where torch would put its own, with .json behind the rank, else to a temporary file of its own.

    Raises: OSError.
    """
    prefix = flight_prefix()
    if prefix:
        path = Path(f"{prefix}{rank}.json")
        path.write_text(text)
        return path
    with tempfile.NamedTemporaryFile("w", prefix=f"bigbatch-flight-rank-{rank}-", suffix=".json", delete=False) as file:
        file.write(text)
    return Path(file.name)


def compare(mine: Flight, others: Mapping[int, Mapping[str, int]]) -> str:
    """Say which ranks have not begun the collective that this one waits in; others: what ranks have begun, as told."""
    waiting = mine.waiting
    if waiting is None:
        return ""
    ranks = waiting.ranks or tuple(sorted(others))
    come = {rank: others[rank].get(waiting.group, 0) for rank in ranks if rank in others}
    behind = [f"rank {rank} has begun {number}" for rank, number in come.items() if number < waiting.number]
    silent = [f"rank {rank} does not tell" for rank in ranks if rank not in others]
    where = f"it waits in collective {waiting.number} ({waiting.operation}) of process group {waiting.group}"
    return ", ".join([where, *behind, *silent])
