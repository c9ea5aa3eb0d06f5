"""Run one job on an emulated cluster and count the bytes that it sends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bigbatch.comm.rendezvous.environ import with_secret
from bigbatch.errors import EmulationError, print_lines, tell
from bigbatch.files import as_json, write_named
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.processes import NodeProcess, run_processes
from bigbatch.tools.emulate import namespaces
from bigbatch.tools.emulate.cluster import LinkBytes, count, exclusive_job, format_table, join, reporting_lost_cluster
from bigbatch.tools.emulate.plan import format_rate
from bigbatch.tools.emulate.state import EmulatedCluster

WATCHER = ("/bin/sh", "-c", "read line; kill -s KILL -- -1")
"""Kills every process of its process namespace, except the first one and itself, when its input ends."""


def run_job(
    starts: Sequence[NodeProcess],
    *,
    cluster: EmulatedCluster,
    root: Path,
    environ: Mapping[str, str],
    asks_to_stop: signal.Signals,
    counters: Path | None,
    heals: Callable[[], bool] | None = None,
    joins: int = 0,
    on_poll: Callable[[], object] = lambda: None,
) -> Ended:
    """Start the processes in their nodes and wait; return how the job ended. Other parameters: as for run_processes.

    Prints the bytes of each link on standard error, and writes them to the file counters. Processes that outlive the
    job are killed, and so is the job if this process is killed. Raises: EmulationError if another job runs, the cluster
    is removed under this one or the file cannot be written; LaunchOptionError for a missing launcher.
    """
    with exclusive_job(cluster, root=root):
        if counters:
            try:  # before the job: the file can be written, and holds no earlier job's figures
                write_named(counters, b"")
            except OSError as error:
                raise EmulationError(
                    f"--counters {counters}: {error.strerror}; name a file that can be written"
                ) from error
        before, start = _count(cluster), time.monotonic()
        join(cluster)
        kill_all_processes()  # processes left by an earlier job would share the links
        with reporting_lost_cluster(cluster), _killing_leftovers():
            enter = partial(namespaces.enter_node, cluster.keeper)
            ended = run_processes(
                starts,
                environ=with_secret(environ),
                enter=enter,
                asks_to_stop=asks_to_stop,
                heals=heals,
                joins=joins,
                on_poll=on_poll,
            )
        seconds = time.monotonic() - start
        counted = difference(_count(cluster), before)
    print_lines(format_table(counted), file=sys.stderr)
    if counters:
        try:
            facts = {
                "ranks_per_node": cluster.plan.ranks_per_node,
                "link": format_rate(cluster.plan.rate),
                "delay_us": cluster.plan.delay_us,
                "seconds": seconds,
                "exit_code": ended.code,
                "nodes": [asdict(each) for each in counted],
            }
            write_named(counters, (as_json(facts, indent=1) + "\n").encode())
        except OSError as error:  # the job is done, and its exit code says more
            tell(f"--counters {counters}: {error.strerror}")
    return ended


def difference(after: Sequence[LinkBytes], before: Sequence[LinkBytes]) -> list[LinkBytes]:
    return [
        LinkBytes(new.host, new.sent_bytes - old.sent_bytes, new.received_bytes - old.received_bytes)
        for new, old in zip(after, before, strict=True)
    ]


def _count(cluster: EmulatedCluster) -> tuple[LinkBytes, ...]:
    counted = count(cluster)
    if counted is None:
        raise EmulationError(f"{cluster.plan.name} was taken down under the job")
    return counted


@contextmanager
def _killing_leftovers() -> Iterator[None]:
    """Kill the job's remaining processes at the end; if this process is killed, a watcher in the cluster does it.

    A signal at the parent's death (prctl) would reach only the launchers, not the processes of torchrun or a rank.
    Raises: OSError if the cluster has ended.
    """
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(WATCHER, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True):
        try:
            yield
        finally:
            kill_all_processes()  # the watcher, too


def kill_all_processes() -> None:
    """Kill every process of the cluster except its keeper: in this namespace, kill reaches no others."""
    try:
        child = os.fork()
    except OSError:  # the cluster has ended, and all of its processes with it
        return
    if child == 0:
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
