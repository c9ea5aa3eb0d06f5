"""The links between nodes: the goodput of a plain TCP stream, the bytes that they carried, and their limit."""

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.comm.job import Job
from bigbatch.comm.rendezvous.addresses import own_address
from bigbatch.errors import CommError
from bigbatch.tools.measure.cost_model import lower_bound_seconds

NUM_TESTS = 3
"""Number of measurements of a link if iperf3 reports nothing."""
NUM_TRIES = 50
"""Number of tries of its client to reach its server, every TRY_SECONDS."""
TRY_SECONDS = 0.1


def read_sent_bytes(interface: str | None = None) -> int:
    """Read the bytes that this node has sent over one interface, or over all but loopback, since it was made.

    Raises: CommError for an interface that does not exist.
    """
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    sent = {name: each.bytes_sent for name, each in counters.items() if name != "lo"}
    if interface is None:
        return sum(sent.values())
    if interface not in sent:
        raise CommError(f"--interface {interface}: there is none such here; there is {', '.join(sent) or 'only lo'}")
    return sent[interface]


def limit_seconds(num_bytes: float, *, num_nodes: int, goodput: float) -> float:
    """Compute an all-reduce's least time: 2(m-1)/m * bytes / goodput, over m nodes; goodput in bits per second."""
    return lower_bound_seconds(num_bytes, num_nodes=num_nodes, bytes_per_second=goodput / 8)


def best_goodput(goodput: Sequence[float | None]) -> float | None:
    """Return the highest measured goodput: it makes the strictest limit. None if there is no link."""
    return max((each for each in goodput if each), default=None)


def find_goodput(job: Job, given_mbit: float | None, *, seconds: float, control: str | None = None) -> float | None:
    """Return the bits per second of a link as given, else of iperf3's stream from the second node to the first.

    Collective. control: the stream's congestion control, None for the system's. None if there is one node. Raises:
    CommError without iperf3, or if it fails repeatedly; on all ranks.
    """
    if given_mbit:
        return given_mbit * 1e6
    if job.num_nodes < 2:
        return None
    for _ in range(NUM_TESTS):
        goodput, problem = _test_once(job, seconds=seconds, control=control)
        if goodput:
            return float(goodput)
    raise CommError(f"iperf3 did not measure the link: {problem}; give --goodput-mbit")


def _test_once(job: Job, *, seconds: float, control: str | None) -> tuple[float | None, str | None]:
    """Measure the goodput, or return the error, the same on all ranks. Collective."""
    receiver, sender = job.communicator.connection.topology.leaders[:2]
    server, where, problem = None, None, None
    if job.rank == receiver:
        try:
            where, server = _start_server(job)
        except OSError as error:
            problem = f"{error}; apt-get install iperf3"
    where, problem = job.gather([where, problem])[receiver]
    answer: list[Any] = [None, problem]
    if job.rank == sender and not problem:
        answer = list(_run_client(*where, seconds=seconds, control=control))
    goodput, problem = job.gather(answer)[sender]
    if server:
        server.kill()
        server.wait()
    return goodput, problem


def _start_server(job: Job) -> tuple[tuple[str, int], "subprocess.Popen[bytes]"]:
    address = own_address(is_one_host=False, interface=job.interface)
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    argv = ["iperf3", "-s", "-1", "-B", address, "-p", str(port)]
    return (address, port), subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _run_client(address: str, port: int, *, seconds: float, control: str | None) -> tuple[float | None, str | None]:
    argv = ["iperf3", "-c", address, "-p", str(port), "-J", "-t", f"{seconds:g}"]
    argv += ["-C", control] if control else []
    problem = ""
    for _ in range(NUM_TRIES):  # the server needs time to start
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, str(error)
        try:
            return parse_iperf3(done.stdout), None
        except ValueError as error:
            problem = str(error)
        if "refused" not in problem:
            break
        time.sleep(TRY_SECONDS)
    return None, problem


def parse_iperf3(text: str) -> float:
    """Read the received bits per second from iperf3 -J. Raises: ValueError with iperf3's own words."""
    try:
        report = json.loads(text)
        return float(report["end"]["sum_received"]["bits_per_second"])
    except KeyError:
        raise ValueError(report.get("error", "iperf3 reports no sum")) from None


def least_exposed_seconds(ready: Sequence[float], num_bytes: Sequence[int], *, num_nodes: int, goodput: float) -> float:
    """Compute the communication that no schedule can hide behind the backward pass that made these gradients ready.

    Bytes that are ready at t or later cannot be sent before t, so with R(t) of them the sums end no sooner than
    t + limit(R(t)); the least exposed time is the maximum of that over t, minus the end of backward, which is the
    last ready time. For t = the first gradient's this is: time of all bytes - (end of backward - first ready).
    """
    order = sorted(range(len(ready)), key=lambda i: ready[i], reverse=True)
    later, latest_end = 0, 0.0
    for i in order:
        later += num_bytes[i]
        latest_end = max(latest_end, ready[i] + limit_seconds(later, num_nodes=num_nodes, goodput=goodput))
    return max(0.0, latest_end - max(ready))
