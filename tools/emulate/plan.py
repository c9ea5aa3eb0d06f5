"""The emulated cluster as data: nodes, names, addresses, rates. Integers and strings only; starts nothing."""

import re
from dataclasses import dataclass

from bigbatch.errors import LaunchOptionError

DEFAULT_NAME = "box"
MAX_NODES = 100
MAX_DELAY_US = 1_000_000
UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
MIN_RATE, MAX_RATE = 1_000_000, 100_000_000_000


@dataclass(frozen=True)
class ClusterPlan:
    """Plan of a cluster for `up`. rate is in bits per second, each way; None: as fast as this machine."""

    name: str
    ranks_per_node: tuple[int, ...]
    rate: int | None
    delay_us: int = 0
    """Added one-way delay between two nodes."""
    slurm: bool = False
    """True if a real Slurm runs on it, with a CPU for each rank."""

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_per_node)

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_node)


def make_plan(*, name: str, nodes: int | None, ranks_per_node: str, link: str | None, delay: str | None) -> ClusterPlan:
    """Parse the values of the command line. Raises: LaunchOptionError."""
    return ClusterPlan(
        parse_name(name),
        parse_ranks(ranks_per_node, nodes=nodes),
        parse_rate(link or "none"),
        parse_delay(delay or "0"),
    )


def parse_name(text: str) -> str:
    """Return the name, which becomes that of a folder. Raises: LaunchOptionError."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,19}", text):
        raise LaunchOptionError(f"--name {text!r}: use up to 20 lower-case letters, digits and dashes, such as box")
    return text


def parse_ranks(text: str, *, nodes: int | None) -> tuple[int, ...]:
    """Read '2' for 4 nodes -> (2, 2, 2, 2); '3,2,2,1' -> (3, 2, 2, 1), for which nodes may be None.

    Raises: LaunchOptionError.
    """
    if not re.fullmatch(r"[1-9]\d{0,2}(,[1-9]\d{0,2})*", text, re.ASCII):
        raise LaunchOptionError(
            f"--ranks-per-node {text!r}: give a number, such as 2, or one for each node, such as 3,2,2,1"
        )
    ranks = tuple(int(word) for word in text.split(","))
    if nodes is None and len(ranks) == 1:
        raise LaunchOptionError("state the number of nodes: --nodes 4, or --ranks-per-node 3,2,2,1 for each node")
    total = len(ranks) if nodes is None else nodes
    if not 1 <= total <= MAX_NODES:
        raise LaunchOptionError(f"--nodes {total} is not between 1 and {MAX_NODES}")
    if len(ranks) not in (1, total):
        raise LaunchOptionError(f"--ranks-per-node {text} names {len(ranks)} nodes, --nodes {total}: make them agree")
    return ranks * total if len(ranks) == 1 else ranks


def parse_rate(text: str) -> int | None:
    """Read '200mbit' -> 200000000 bits per second; 'none' -> None. Raises: LaunchOptionError."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(kbit|mbit|gbit)", text, re.ASCII)
    rate = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not MIN_RATE <= rate <= MAX_RATE:
        raise LaunchOptionError(f"--link {text!r}: give a rate from 1mbit to 100gbit, such as 200mbit, or none")
    return rate


def parse_delay(text: str) -> int:
    """Read '500us' -> 500, '2ms' -> 2000, '0' -> 0. Raises: LaunchOptionError."""
    match = re.fullmatch(r"(\d{1,7})(us|ms)|0", text, re.ASCII)
    delay_us = int(match[1] or 0) * (1000 if match[2] == "ms" else 1) if match else MAX_DELAY_US + 1
    if delay_us > MAX_DELAY_US:
        raise LaunchOptionError(f"--delay {text!r}: give a one-way delay of up to one second, such as 500us or 2ms")
    return delay_us


def parse_node(text: str, *, num_nodes: int, option: str = "--node") -> int:
    """Read 'n2' -> 2. Raises: LaunchOptionError if there is no such node."""
    names = [host(node) for node in range(num_nodes)]
    if text not in names:
        raise LaunchOptionError(f"{option} {text!r}: there is no such node; there are {names[0]} to {names[-1]}")
    return names.index(text)


def host(node: int) -> str:
    return f"n{node}"


def address(node: int) -> str:
    """Return a node's IPv4 address. The network is the cluster's own: several clusters may use the same addresses."""
    return f"10.77.0.{node + 1}"


def mac(node: int) -> str:
    """Return a node's Ethernet address (locally administered); it follows from the number, so no switch learns it."""
    return f"02:62:62:00:00:{node + 1:02x}"


def hosts_file(plan: ClusterPlan) -> str:
    """Write /etc/hosts of every node.

    A server socket for IPv4 and IPv6 sees its peers under mapped addresses, which torch looks up.
    """
    nodes = range(plan.num_nodes)
    lines = [f"{address(node)} {host(node)}" for node in nodes]
    lines += [f"::ffff:{address(node)} {host(node)}-mapped" for node in nodes]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *lines]) + "\n"


def format_rate(rate: int | None) -> str:
    """Write 200000000 -> '200mbit', as parse_rate reads it."""
    if rate is None:
        return "none"
    unit = "gbit" if rate >= UNITS["gbit"] else "mbit"
    return f"{rate / UNITS[unit]:.6g}{unit}"


def place_ranks(ranks_per_node: tuple[int, ...], *, order: str) -> list[tuple[int, int]]:
    """Return node and local rank of each rank: block fills node after node, cyclic deals ranks out in turn."""
    places = [(node, local) for node, count in enumerate(ranks_per_node) for local in range(count)]
    return places if order == "block" else sorted(places, key=lambda place: place[::-1])
