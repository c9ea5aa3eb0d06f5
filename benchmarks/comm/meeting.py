"""Time of the meeting and the roll call of many ranks, as threads of a few processes that share this machine.

    python -m benchmarks.comm.meeting --out benchmarks/results/comm-meeting.json

Each rank has a connection of its own to the job's store, which a process of its own holds as in a real job: it proves
the secret, tells its place, and learns that of all others (the meeting). Then one rank is silent, and all others call
the roll within a second: they wait the time that it has to answer, and hear who is missed. Numbers are the seconds of
the slowest rank.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arguments import at_least
from benchmarks.record import conditions, spread, write_record
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.job_store import JobStore, Line, hold_store
from bigbatch.comm.rendezvous.meeting import listen
from bigbatch.comm.rendezvous.roll_call import LATE, ROLL_CALL_SECONDS

SECRET = b"of this benchmark"
LIMIT_SECONDS = 300.0


class Rank(NamedTuple):
    """Times of one rank, and the rank that it misses in the end."""

    rank: int
    meeting_seconds: float
    roll_call_seconds: float
    verdict: str


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm.meeting", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=at_least(2), default=1024)
    parser.add_argument("--processes", type=at_least(1), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--out", type=Path, help="the file of figures (default: standard output)")
    options = parser.parse_args()
    facts = conditions(options)
    rounds = [one_round(options.ranks, options.processes) for _ in range(options.rounds)]
    found = {
        "ranks": options.ranks,
        "answer_window_seconds": ROLL_CALL_SECONDS,
        "meeting_seconds": spread([max(rank.meeting_seconds for rank in ranks) for ranks in rounds]),
        "roll_call_seconds": spread([max(rank.roll_call_seconds for rank in ranks) for ranks in rounds]),
        "ranks_with_the_right_verdict": min(sum(is_right(rank, len(ranks)) for rank in ranks) for ranks in rounds),
    }
    write_record(options.out, {"conditions": facts, "found": found})


def silent(num_ranks: int) -> int:
    """Return the rank that does not answer."""
    return num_ranks // 3 * 2


def is_right(rank: Rank, num_ranks: int) -> bool:
    """Tell whether a rank misses only the silent one."""
    return rank.verdict == f"no answer from rank {silent(num_ranks)} on host{silent(num_ranks)}"


def one_round(num_ranks: int, num_processes: int) -> list[Rank]:
    """Let all ranks meet and call the roll once."""
    line = hold_store(listen("127.0.0.1", 0), SECRET, world_size=num_ranks, timeout_seconds=LIMIT_SECONDS)
    context = multiprocessing.get_context("spawn")
    numbers = [range(first, num_ranks, num_processes) for first in range(num_processes)]
    start = context.Barrier(num_processes)
    with many(context, num_processes, start) as pool:
        work = [pool.apply_async(live, (each, num_ranks, line.port)) for each in numbers]
        return [Rank(*rank) for each in work for rank in each.get(LIMIT_SECONDS)]


@contextmanager
def many(context: Any, count: int, start: Any) -> Iterator[Any]:
    """Make processes that begin together, once each has imported torch."""
    with context.Pool(count, initializer=begin_together, initargs=(start,)) as pool:
        yield pool


def begin_together(start: Any) -> None:
    """Wait for the others."""
    start.wait()


def live(numbers: range, num_ranks: int, port: int) -> list[tuple[Any, ...]]:
    """Run these ranks, each on a thread; their times travel between processes as plain tuples."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        return [tuple(rank) for rank in pool.map(lambda rank: live_as(rank, num_ranks, port), numbers)]


def live_as(rank: int, num_ranks: int, port: int) -> Rank:
    """Meet the others, and call the roll, unless it is the silent one."""
    start = time.perf_counter()
    store = JobStore(Line("127.0.0.1", port, SECRET, rank=rank, timeout_seconds=LIMIT_SECONDS), seconds=LIMIT_SECONDS)
    control = Control(ALONE, timeout_seconds=LIMIT_SECONDS)
    control.rank, control.world_size, control.store = rank, num_ranks, store
    control.store.set(f"bigbatch/host/{rank}", f"host{rank}")
    control.gather_text(f'{{"rank": {rank}, "host": "host{rank}", "local_rank": 0, "local_size": 1}}', what="meeting")
    met = time.perf_counter() - start
    if rank == 0:  # the last rank to leave the meeting
        control.store.set("go", "1")
    control.read("go", what="the start of the roll call")
    if rank == silent(num_ranks):
        return Rank(rank, met, 0.0, "")
    time.sleep(rank % 10 / 10)
    start = time.perf_counter()
    verdict = control.roll_call.call(LATE)
    control.roll_call.part()
    return Rank(rank, met, time.perf_counter() - start, verdict)


if __name__ == "__main__":
    main()
