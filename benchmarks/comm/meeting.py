"""Time in which many ranks meet, and in which they agree which of them is lost: threads of processes on this machine.

    python -m benchmarks.comm.meeting --out benchmarks/results/comm-meeting.json

Each rank has a connection of its own to the job's store. After the meeting all but one rank report a late operation
within a second; that one stays connected and is silent. Seconds are those of the slowest rank.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import at_least, conditions, run, spread, write_record
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.failures import LATE
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections, start_store
from bigbatch.comm.rendezvous.meeting import listen

SECRET, LIMIT_SECONDS = b"of this benchmark", 300.0


class Rank(NamedTuple):
    """Seconds of one rank, and the reason of its verdict."""

    meeting_seconds: float
    roll_call_seconds: float
    reason: str


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=at_least(3), default=1024, help="(default: %(default)s)")
    add("--processes", type=at_least(1), default=4, help="that share the ranks after the first (default: %(default)s)")
    add("--rounds", type=at_least(1), default=5, help="(default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    facts, silent = conditions(options), options.ranks // 3 * 2
    rounds = [one_round(options.ranks, options.processes) for _ in range(options.rounds)]
    right = f"no answer from rank {silent} on host{silent}"
    found = {
        "ranks": options.ranks,
        **{name: spread([max(getattr(rank, name) for rank in ranks) for ranks in rounds]) for name in Rank._fields[:2]},
        "ranks_with_the_right_verdict": min(sum(rank.reason == right for rank in ranks) for ranks in rounds),
    }
    write_record(options.out, {"conditions": facts, "found": found})


def one_round(num_ranks: int, num_processes: int) -> list[Rank]:
    """Let all ranks meet and lose one."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    connections = start_store(listener, SECRET, world_size=num_ranks, timeout_seconds=LIMIT_SECONDS)
    context = get_context("spawn")
    imported = context.Barrier(num_processes + 1)
    with ProcessPoolExecutor(num_processes, context, imported.wait) as pool:
        shares = [range(first, num_ranks, num_processes) for first in range(1, num_processes + 1)]
        others = [pool.submit(live, share, num_ranks, port) for share in shares]
        imported.wait()
        first = live_as(0, num_ranks, lambda: connections)
        return [first, *(rank for share in others for rank in share.result())]


def live(share: range, num_ranks: int, port: int) -> list[Rank]:
    """Run these ranks, each on a thread."""
    gc.disable()  # a process of a real job holds the objects of one rank, which take no time to look through
    connect = partial(StoreConnections, "127.0.0.1", port, SECRET, timeout_seconds=LIMIT_SECONDS)
    with ThreadPoolExecutor(len(share)) as pool:
        return list(pool.map(lambda rank: live_as(rank, num_ranks, partial(connect, rank=rank)), share))


def live_as(rank: int, num_ranks: int, connect: Callable[[], StoreConnections]) -> Rank:
    """Meet the others, and report a late operation unless this is the silent rank."""
    start = time.perf_counter()
    store = JobStore(connect(), seconds=LIMIT_SECONDS)
    env = replace(ALONE, rank=rank, world_size=num_ranks, host=f"host{rank}")
    control = JobControl(env, timeout_seconds=LIMIT_SECONDS, joined=(store, 0))
    own = json.dumps({"rank": rank, "host": env.host, "local_rank": 0, "local_size": 1})
    control.gather_text(own, what="meeting")  # not decoded: a real rank has a core for that, and takes 2 ms
    met = time.perf_counter() - start
    if rank == 0:  # the last rank to leave the meeting
        store.set("begin", "")
    store.get("begin")
    if rank == num_ranks // 3 * 2:
        store.wait_for("end", seconds=LIMIT_SECONDS)
        return Rank(met, 0.0, "")
    time.sleep(rank % 10 / 10)
    start = time.perf_counter()
    verdict = control.detector.roll_call(LATE)
    seconds = time.perf_counter() - start
    control.detector.stop_requests()  # of rank 0: waits until the others have heard
    if rank == 0:
        store.set("end", "")
    return Rank(met, seconds, verdict.reason)


if __name__ == "__main__":
    run(main)
