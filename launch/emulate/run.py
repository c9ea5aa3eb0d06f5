"""Run one job on an emulated cluster and count what it sends."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from bigbatch.launch.emulate import namespaces
from bigbatch.launch.emulate.cluster import only_job
from bigbatch.launch.emulate.counters import LinkBytes, difference, format_json, format_table, read_counters
from bigbatch.launch.emulate.errors import EmulationError
from bigbatch.launch.emulate.launchers import Start
from bigbatch.launch.emulate.state import Cluster, is_alive
from bigbatch.launch.emulate.supervise import run_together


def run_job(
    starts: Sequence[Start],
    *,
    cluster: Cluster,
    root: Path,
    environ: Mapping[str, str],
    asks_to_stop: signal.Signals,
    counters: Path | None,
) -> int:
    """Start the processes in their nodes and wait; the job's exit code.

    Bytes of each link go to standard error, and to the file counters. What outlives the job is killed. Raises:
    EmulationError when another job runs, or the cluster is removed under this one; ConfigError for a missing launcher.
    """
    with only_job(cluster, root=root):
        before, start = _count(cluster), time.monotonic()
        namespaces.enter_cluster(cluster.keeper)
        sweep()
        try:
            enter = partial(namespaces.enter_node, cluster.keeper)
            code = run_together(starts, environ=environ, enter=enter, asks_to_stop=asks_to_stop)
        finally:
            seconds = time.monotonic() - start
            sweep()
        counted = difference(_count(cluster), before)
    print(format_table(counted), file=sys.stderr, flush=True)
    if counters:
        counters.write_text(format_json(counted, plan=cluster.plan, seconds=seconds, exit_code=code))
    return code


def _count(cluster: Cluster) -> tuple[LinkBytes, ...]:
    with suppress(OSError):
        if is_alive(cluster):
            return read_counters(cluster.keeper, num_nodes=cluster.plan.num_nodes)
    raise EmulationError(f"{cluster.plan.name} was taken down under the job")


def sweep() -> None:
    """Kill every process of the cluster but its keeper: here, everything outside counts as not there."""
    try:
        child = os.fork()
    except OSError:  # the cluster is gone, and all of its processes with it
        return
    if child == 0:
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
