"""Argument lists of ip and tc that build the network; pure, so that --dry-run and tests can read them."""

from bigbatch.tools.emulate.plan import ClusterPlan, address, host, mac

MIN_BURST_BYTES = 16_384
BURST_SECONDS = 1e-3
"""How late a timer of a busy machine may be without a loss of throughput; its cost: docs/preflight.md, "Burst"."""

QUEUE_MS = 20
"""How long a packet may wait in a full link before it is dropped."""

MAX_GSO_BYTES = 65_536

BRIDGE = "sw0"
"""Not `br`: ip takes a short name for an abbreviation of `broadcast`."""


def port(node: int) -> str:
    return f"p{node}"


def burst_bytes(rate: int) -> int:
    """Return the bytes that an idle link passes at once: as small as timers allow, since it distorts the rate."""
    return max(MIN_BURST_BYTES, round(rate * BURST_SECONDS / 8))


def shape_commands(device: str, rate: int | None) -> list[list[str]]:
    """Return commands that limit the rate out of a device. Both ends of a link are shaped: it is full duplex."""
    # TCP hands the link packets of half a burst at most, as larger ones stall a small bucket
    largest = MAX_GSO_BYTES if rate is None else min(MAX_GSO_BYTES, burst_bytes(rate) // 2)
    gso = ["ip", "link", "set", "dev", device, "gso_max_size", str(largest)]
    if rate is None:
        return [gso, ["tc", "qdisc", "replace", "dev", device, "root", "noqueue"]]
    bucket = ["tbf", "rate", f"{rate}bit", "burst", f"{burst_bytes(rate)}b", "latency", f"{QUEUE_MS}ms"]
    return [gso, ["tc", "qdisc", "replace", "dev", device, "root", *bucket]]


def cut_command(device: str) -> list[str]:
    """Return a command that silently drops all packets out of a device until it is shaped: none fits its queue."""
    return ["tc", "qdisc", "replace", "dev", device, "root", "bfifo", "limit", "1"]


def build_commands(plan: ClusterPlan) -> list[tuple[str, list[str]]]:
    """Return all commands in order, each with its place: a host name or 'switch', the namespace of process 1.

    With a delay there is no bridge: the keeper forwards the packets from port to port.
    """
    is_bridged = plan.delay_us == 0
    set_, quiet = ["ip", "link", "set", "dev"], ["addrgenmode", "none"]  # no IPv6 chatter among the counted bytes
    switch: list[list[str]] = []
    if is_bridged:
        switch = [
            ["ip", "link", "add", "name", BRIDGE, "type", "bridge", "mcast_snooping", "0"],
            [*set_, BRIDGE, *quiet],
            [*set_, BRIDGE, "up"],
        ]
    commands = [("switch", argv) for argv in switch]
    for node in range(plan.num_nodes):
        veth = ["type", "veth", "peer", "name", port(node), "netns", "1"]
        inside = [
            [*set_, "lo", "up"],
            ["ip", "link", "add", "name", "eth0", "address", mac(node), *veth],
            [*set_, "eth0", *quiet],
            ["ip", "address", "add", f"{address(node)}/24", "dev", "eth0"],
            [*set_, "eth0", "up"],
            *shape_commands("eth0", plan.rate),
        ]
        outside = [
            [*set_, port(node), *quiet],
            *([[*set_, port(node), "master", BRIDGE]] if is_bridged else []),
            [*set_, port(node), "up"],
            *shape_commands(port(node), plan.rate),
        ]
        commands += [(host(node), argv) for argv in inside] + [("switch", argv) for argv in outside]
    return commands
