"""What torch's flight recorder knows of this process's collectives: kept in a file, and compared between ranks."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch._C import _distributed_c10d

from bigbatch.comm.rendezvous.environ import flight_prefix
from bigbatch.comm.rendezvous.recording import Operation, late_for, read_recording
from bigbatch.files import write_named


@dataclass(frozen=True)
class Flight:
    """A process's collectives; messages between two ranks, which torch counts for each pair, are left out."""

    begun: dict[str, int]
    """Name of a process group -> number of the last collective that was begun in it."""
    waiting: Operation | None
    """The first that has not ended."""


def dump_flight() -> str:
    """Dump this process's recorder; empty where torch has none, or it recorded nothing."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's own; that of other libraries
        dump = getattr(_distributed_c10d, name, None)
        text = dump().decode(errors="replace") if dump else ""
        if '"entries"' in text:
            return text
    return ""


def read_flight(text: str) -> Flight:
    """Read a dump. Raises: ValueError, LookupError or TypeError where torch writes it otherwise."""
    collectives = list(read_recording(text.encode()).collectives)
    waiting = next((each for each in collectives if not each.is_over), None)
    return Flight({each.group.name: each.number for each in collectives}, waiting)


def record_flight(text: str, *, rank: int) -> tuple[Flight | None, Path | None]:
    """Write a dump to a file and read it, if there is one; a full disk or an unknown format leaves its part out."""
    flight = path = None
    if text:
        with suppress(OSError):
            path = keep_flight(text, rank=rank)
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            flight = read_flight(text)
    return flight, path


def keep_flight(text: str, *, rank: int) -> Path:
    """Write a dump to where torch would put its own, with .json behind the rank, else to a temporary file of its own.

    Raises: OSError.
    """
    prefix = flight_prefix()
    if prefix:
        path = Path(f"{prefix}{rank}.json")
        write_named(path, text.encode())
        return path
    with tempfile.NamedTemporaryFile("w", prefix=f"bigbatch-flight-rank-{rank}-", suffix=".json", delete=False) as file:
        file.write(text)
    return Path(file.name)


def compare(mine: Flight, others: Mapping[int, Mapping[str, int]]) -> str:
    """Say which ranks have not begun the collective that this one waits in; others: what ranks have begun, as told."""
    waiting = mine.waiting
    if waiting is None:
        return ""
    ranks = waiting.group.ranks or tuple(sorted(others))
    name, number = waiting.group.name, waiting.number
    late, silent = late_for(number, ranks, {rank: begun.get(name, 0) for rank, begun in others.items()})
    behind = [f"rank {rank} has begun {last}" for rank, last in late.items()]
    unknown = [f"rank {rank} does not tell" for rank in silent]
    return ", ".join([f"it waits in collective {number} ({waiting.name}) of process group {name}", *behind, *unknown])
