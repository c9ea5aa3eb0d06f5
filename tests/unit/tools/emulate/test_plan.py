"""The emulated cluster as text: plans, counters, the switch's decisions; argument lists are in tests/golden, too."""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import LaunchOptionError
from bigbatch.interpreter import python_argv
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.tools.emulate import agent
from bigbatch.tools.emulate.cluster import LinkBytes, parse_counters
from bigbatch.tools.emulate.launchers import StartContext, mpirun_processes
from bigbatch.tools.emulate.namespaces import enter_cluster
from bigbatch.tools.emulate.plan import (
    ClusterPlan,
    format_rate,
    mac,
    parse_delay,
    parse_name,
    parse_ranks,
    parse_rate,
)
from bigbatch.tools.emulate.run import difference
from bigbatch.tools.emulate.switch import TIME, VNET_HEADER_BYTES, age_ns, destinations

UNEVEN = ClusterPlan("box", (3, 2, 2, 1), 200_000_000)
JOB = JobSpec(("train", "--config", "quickstart"), 8)
# --- plan ---


@pytest.mark.parametrize(
    ("text", "nodes", "named"),
    [
        ("2", None, ("--nodes 4", "--ranks-per-node 3,2,2,1")),
        ("0", 4, ("--ranks-per-node '0'",)),
        ("3,0", 2, ("--ranks-per-node '3,0'",)),
        ("", 4, ("--ranks-per-node ''",)),
        ("2;rm", 4, ("--ranks-per-node '2;rm'",)),
        ("2\n", 4, (r"--ranks-per-node '2\n'",)),
        ("3,2", 3, ("--ranks-per-node 3,2", "--nodes 3")),
        ("2", 0, ("--nodes 0", "100")),
        ("2", 101, ("--nodes 101", "100")),
    ],
)
def test_emulated_nodes_that_cannot_be_are_refused(text: str, nodes: int | None, named: tuple[str, ...]) -> None:
    with pytest.raises(LaunchOptionError, match=naming(*named)):
        parse_ranks(text, nodes=nodes)


@pytest.mark.parametrize(
    ("parse", "legal"),
    [
        (parse_rate, {"200mbit": 200_000_000, "2.5gbit": 2_500_000_000, "5000kbit": 5_000_000, "none": None}),
        (parse_delay, {"0": 0, "500us": 500, "2ms": 2000, "1000ms": 1_000_000}),
    ],
)
def test_emulated_link_numbers(parse: Callable[[str], int | None], legal: dict[str, int | None]) -> None:
    assert {text: parse(text) for text in legal} == legal
    if parse is parse_rate:
        assert [parse(format_rate(rate)) for rate in legal.values()] == [*legal.values()]


@pytest.mark.parametrize(
    ("parse", "option", "texts"),
    [
        (parse_rate, "--link", ("200", "200mb", "0mbit", "1kbit", "200gbit", "-1mbit", "1e3mbit", "200mbit ")),
        (parse_delay, "--delay", ("500", "1s", "-1us", "1001ms", "", "0.5ms")),
        (parse_name, "--name", ("", "../x", "a/b", "-x", "Box", "x" * 21, "a b")),
    ],
)
def test_emulated_words_that_are_none_are_refused(
    parse: Callable[[str], object], option: str, texts: tuple[str, ...]
) -> None:
    for text in texts:
        with pytest.raises(LaunchOptionError, match=option):
            parse(text)


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_keeper_is_no_process_beside_us() -> None:
    """Its number was reused: a kill that is meant for all of the cluster would reach all of this machine."""
    with pytest.raises(OSError, match=r"keeper|setns") as caught:
        enter_cluster(os.getpid())
    assert caught.value.errno in (errno.ESRCH, errno.EPERM), "not allowed at all without root"


# --- launchers ---


def test_mpirun_starts_from_the_first_emulated_node() -> None:
    site = StartContext(
        order="cyclic",
        mpirun="/opt/mpirun",
        folder=Path("/tmp/x"),
        terminal_columns=80,
        variables=("PATH", "NCCL_DEBUG"),
    )
    (start,) = mpirun_processes(JOB, UNEVEN, site)
    assert start.node == 0
    assert list(start.argv) == [
        *("/opt/mpirun", "-n", "8", "--stdin", "none", "--bind-to", "none", "--map-by", "node"),
        *("--prtemca", "plm", "ssh"),
        *("--prtemca", "plm_ssh_agent", f"{' '.join(python_argv())} -m bigbatch.tools.emulate.agent"),
        *("--prtemca", "prte_tmpdir_base", "/tmp/x", "--mca", "mpi_yield_when_idle", "1"),
        *("--allow-run-as-root", "--host", "n0:3,n1:2,n2:2,n3:1"),
        *("-x", "NCCL_DEBUG", "-x", "PYTHONSAFEPATH", "-x", "BIGBATCH_TERMINAL_COLUMNS=80"),
        *(sys.executable, "-m", "bigbatch", *JOB.command),
    ]
    assert start.variables == (("PYTHONSAFEPATH", "1"),)


@pytest.mark.parametrize("path", ["/home/a b/python", "/home/a:b/python"])
def test_mpirun_is_not_told_of_a_python_that_it_would_take_apart(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", path)
    with pytest.raises(LaunchOptionError, match=naming(repr(path), "--launcher torchrun", "plain")):
        mpirun_processes(JOB, UNEVEN, StartContext())


def test_agent_takes_its_words_as_ssh_does() -> None:
    assert agent.split_words(["-x", "-q", "n12", "prted", "--flag", "'a b'"]) == (12, "prted --flag 'a b'")


@pytest.mark.parametrize("argv", [[], ["-x"], ["n0"], ["localhost", "ls"], ["n1;ls", "ls"], ["n1\n", "ls"]])
def test_agent_knows_no_other_hosts(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        agent.split_words(argv)


# --- counters ---

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       7       0    0    0    0     0          0         0        7       0    0    0    0     0       0          0
    p0:    1000       9    0    0    0     0          0         0     3000       8    0    0    0     0       0          0
    p1:    3000       9    0    0    0     0          0         0     1000       8    0    0    0     0       0          0
"""  # noqa: E501


def test_counters_say_that_the_node_has_sent_what_the_switch_receives() -> None:
    counted = parse_counters(DEV, num_nodes=2)
    assert counted == (LinkBytes("n0", 1000, 3000), LinkBytes("n1", 3000, 1000))
    assert difference(counted, (LinkBytes("n0", 1, 2), LinkBytes("n1", 3, 4)))[1] == LinkBytes("n1", 2997, 996)


# --- switch ---


@pytest.mark.parametrize(
    ("target", "ports"), [("02:62:62:00:00:03", [2]), ("ff:ff:ff:ff:ff:ff", [0, 2]), ("33:33:00:00:00:01", [0, 2])]
)
def test_switch_sends_packets_where_they_are_addressed(target: str, ports: list[int]) -> None:
    addresses = [bytes.fromhex(mac(node).replace(":", "")) for node in range(3)]
    packet = bytes(VNET_HEADER_BYTES) + bytes.fromhex(target.replace(":", "")) + bytes(60)
    assert list(destinations(packet, source=1, addresses=addresses)) == ports


def test_switch_bounds_the_age_of_a_packet_if_the_clock_is_set() -> None:
    def stamp(seconds_ago: float) -> list[tuple[int, int, bytes]]:
        return [(1, 35, TIME.pack(*divmod(time.time_ns() - round(seconds_ago * 1e9), 10**9)))]

    assert 100_000 <= age_ns(stamp(100e-6)) < 1_000_000
    assert age_ns(stamp(3600)) == 1_000_000
    assert age_ns(stamp(-3600)) == age_ns([]) == 0
