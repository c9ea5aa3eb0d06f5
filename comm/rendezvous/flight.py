"""Dump torch's flight recorder of this process to a file, and compare its collectives with those of other ranks."""

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
    """The collectives of a process. Point-to-point messages, which torch counts per pair of ranks, are left out."""

    begun: dict[str, int]
    """Name of a process group -> number of the last collective that began in it."""
    waiting: Operation | None
    """The first collective that has not ended."""


def dump_flight() -> str:
    """Return the recorder's dump as JSON; "" if torch has no recorder or it is empty."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's own; that of other libraries
        dump = getattr(_distributed_c10d, name, None)
        text = dump().decode(errors="replace") if dump else ""
        if '"entries"' in text:
            return text
    return ""


def read_flight(text: str) -> Flight:
    """Parse a dump. Raises: ValueError, LookupError or TypeError if the format is unknown."""
    collectives = list(read_recording(text.encode()).collectives)
    waiting = next((each for each in collectives if not each.is_over), None)
    return Flight({each.group.name: each.number for each in collectives}, waiting)


def record_flight(text: str, *, rank: int) -> tuple[Flight | None, Path | None]:
    """Write a dump to a file and parse it. A full disk leaves out the file, an unknown format the Flight."""
    flight = path = None
    if text:
        with suppress(OSError):
            path = keep_flight(text, rank=rank)
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            flight = read_flight(text)
    return flight, path


def keep_flight(text: str, *, rank: int) -> Path:
    """Write a dump beside the path that torch is told to use, as RANK.json, else to a temporary file; return the path.

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
    """Return which ranks have not begun the collective in which this rank waits. others: Flight.begun by rank."""
    waiting = mine.waiting
    if waiting is None:
        return ""
    ranks = waiting.group.ranks or tuple(sorted(others))
    name, number = waiting.group.name, waiting.number
    late, silent = late_for(number, ranks, {rank: begun.get(name, 0) for rank, begun in others.items()})
    behind = [f"rank {rank} has begun {last}" for rank, last in late.items()]
    unknown = [f"rank {rank} does not tell" for rank in silent]
    return ", ".join([f"it waits in collective {number} ({waiting.name}) of process group {name}", *behind, *unknown])
