"""Bytes on each node's link, counted by the kernel."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bigbatch.launch.emulate.plan import ClusterPlan, format_rate, host
from bigbatch.launch.emulate.programs import port


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a node sent and received over its link, with Ethernet and IP headers of TCP's large packets."""

    host: str
    sent_bytes: int
    received_bytes: int


def parse_counters(text: str, *, num_nodes: int) -> tuple[LinkBytes, ...]:
    """Parse /proc/net/dev of the switch: its port receives what the node sends. Raises: KeyError without a port."""
    rows = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in text.splitlines())}
    ports = [rows[port(node)] for node in range(num_nodes)]
    return tuple(LinkBytes(host(node), int(row[0]), int(row[8])) for node, row in enumerate(ports))


def difference(after: Sequence[LinkBytes], before: Sequence[LinkBytes]) -> tuple[LinkBytes, ...]:
    return tuple(
        LinkBytes(new.host, new.sent_bytes - old.sent_bytes, new.received_bytes - old.received_bytes)
        for new, old in zip(after, before, strict=True)
    )


def format_table(counted: Sequence[LinkBytes]) -> str:
    """Return the counts as a text table; MB is 1e6 bytes."""
    rows = [f"{each.host:6}{each.sent_bytes / 1e6:15.3f}{each.received_bytes / 1e6:15.3f}" for each in counted]
    return "\n".join([f"{'node':6}{'sent MB':>15}{'received MB':>15}", *rows])


def format_json(counted: Sequence[LinkBytes], *, plan: ClusterPlan, seconds: float, exit_code: int) -> str:
    facts = {
        "ranks_per_node": plan.ranks_per_node,
        "link": format_rate(plan.rate),
        "delay_us": plan.delay_us,
        "seconds": seconds,
        "exit_code": exit_code,
        "nodes": [asdict(each) for each in counted],
    }
    return json.dumps(facts, indent=1) + "\n"
