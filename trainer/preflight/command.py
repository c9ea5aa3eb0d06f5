"""`bigbatch preflight`: what each rank does, and what the first one says."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbatch.comm.addresses import own_address
from bigbatch.comm.connection import choose_device, connect
from bigbatch.comm.control import Control
from bigbatch.comm.environ import ProcessEnv, read_process_env
from bigbatch.trainer.config import Config
from bigbatch.trainer.config_file import load_config
from bigbatch.trainer.preflight.facts import gather_facts, machine_id
from bigbatch.trainer.preflight.links import listening, measure_pairs, unreachable
from bigbatch.trainer.preflight.rates import Rates, measure_rates
from bigbatch.trainer.preflight.verdict import Finding, Node, bits, judge, remarks

UNFIT = 4
"""Exit code where something is wrong with a node, or between nodes."""
MEET_SECONDS = 12.0
"""How long a rank is waited for at first."""
LOOKS = 2
WORK_SECONDS = 30.0
"""The same afterwards, while ranks measure."""


def main(argv: Sequence[str]) -> int:
    """Of one rank: 0 where all is well, 4 where it is not; the same on all ranks."""
    began = time.monotonic()
    arguments, words = _parser().parse_known_args(argv)
    config = load_config(words, prog="bigbatch preflight") if words else None
    env = read_process_env()
    interface = arguments.interface or env.interface or (config.comm.interface if config else None)
    address, control = meet(env, interface=interface)
    nodes = examine(config, env, control, address=address, interface=interface, seconds=arguments.seconds)
    findings = judge(nodes) if env.rank == 0 else []
    if env.rank == 0:
        _tell(nodes, findings, arguments, columns=env.terminal_columns, seconds=time.monotonic() - began)
    # nobody leaves before rank 0 has told: a launcher that sees 4 ends the others
    verdicts = control.gather_text("unfit" if findings else "", what="verdict of the preflight")
    return UNFIT if verdicts[0] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch preflight",
        usage="bigbatch preflight [OPTION ...] [--config EXPERIMENT [--section.key VALUE ...]]",
        description="Compares the nodes of a job, in less than half a minute: versions, GPUs, disks, pictures, who "
        "reaches whom, matrix multiplication, copies, links. Each rank of the job runs it; bigbatch launch preflight "
        f"starts them. Exit code {UNFIT} where something is wrong.",
        epilog="example: bigbatch launch preflight --hosts n0:8,n1:8 -- train --config imagenet/resnet50_8k",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--interface", help="network interface between the nodes (default: the launcher's, or the experiment's)")
    add("--bad-nodes", type=Path, metavar="FILE", help="write the names of unfit nodes there, one a line")
    add("--json", type=Path, metavar="FILE", help="write all that was found there")
    add("--seconds", type=float, default=2.0, help="for computing rates (default: %(default)s)")
    return parser


@dataclass(frozen=True)
class Place:
    """Where a node is reached. All ranks know all of these, so they are short."""

    rank: int
    """Of the first rank there."""
    host: str
    address: str
    port: int
    machine: str
    """Nodes of one machine, as emulated ones are, share its cores."""


def meet(env: ProcessEnv, *, interface: str | None) -> tuple[str, Control]:
    """This host's address, and the line to the others. Raises: CommError for ranks that do not come."""
    towards = env.master[0] if env.master else None
    address = own_address(is_one_host=env.is_one_host, interface=interface, towards=towards)
    return address, Control(env, timeout_seconds=MEET_SECONDS, interface=interface)


def examine(
    config: Config | None,
    env: ProcessEnv,
    control: Control,
    *,
    address: str,
    interface: str | None,
    seconds: float,
) -> list[Node]:
    """What all nodes say and can do; none but on rank 0. Collective. Raises: CommError for ranks that do not come."""
    device = choose_device(env, backend=config.comm.backend if config else "auto")
    is_leader = env.local_rank == 0
    with listening(address) as port:
        mine = Place(env.rank, env.host, address, port, machine_id()) if is_leader else None
        texts = control.gather_text(json.dumps(mine and asdict(mine)), what="meeting of every node")
        places = [Place(**each) for each in map(json.loads, texts) if each]
        control.timeout_seconds = WORK_SECONDS  # from here on all are there, and some may have slow storage
        facts = gather_facts(config, rank=env.rank, host=env.host, is_leader=is_leader, device=device)
        missed = unreachable([(each.address, each.port) for each in places]) if is_leader else []
        texts = control.gather_text(json.dumps([places[index].host for index in missed]), what="reaching every node")
    reached = {place.host: json.loads(texts[place.rank]) for place in places}
    rates = _take_turns(control, places, env, device=device, seconds=seconds)
    links: dict[str, float] = {}
    if not any(reached.values()):  # a transport would wait for those that cannot be reached
        links = _measure_links(places, env, device=device, interface=interface)
    said = {"facts": asdict(facts), "rates": asdict(rates), "links": links}
    everyone = [json.loads(text) for text in control.collect_text(json.dumps(said), what="what every rank measured")]
    return [_node(place, everyone, reached) for place in places] if everyone else []


def _take_turns(
    control: Control, places: Sequence[Place], env: ProcessEnv, *, device: torch.device, seconds: float
) -> Rates:
    """Of this rank, the better of two looks: what disturbs for a moment does not count, what lasts does.

    Nodes of one machine share its cores, so they take turns; real ones measure all at once.
    """
    machines: dict[str, list[str]] = {}
    for place in places:
        machines.setdefault(place.machine, []).append(place.host)
    num_turns = max(map(len, machines.values()))
    found = []
    for turn in [*range(num_turns)] * LOOKS:
        if any(hosts[turn : turn + 1] == [env.host] for hosts in machines.values()):
            found.append(measure_rates(device, seconds=seconds / num_turns / LOOKS))
        control.gather_text("", what="measuring of rates")
    return Rates(max(each.multiply_gflops for each in found), max(each.copy_gb_per_second for each in found))


def _measure_links(
    places: Sequence[Place], env: ProcessEnv, *, device: torch.device, interface: str | None
) -> dict[str, float]:
    """Bytes per second to the hosts that this rank met, if it is the first of its host. Collective."""
    communicator = connect(
        backend="nccl" if device.type == "cuda" else "tcp",
        algorithm="ring",
        interface=interface,
        timeout_seconds=WORK_SECONDS,
        env=env,
        device=device,
    )
    ranks = [place.rank for place in places]
    rates = measure_pairs(communicator, ranks) if env.rank in ranks else {}
    communicator.close()
    return {places[index].host: rate for index, rate in rates.items()}


def _node(place: Place, everyone: Sequence[dict[str, Any]], reached: dict[str, list[str]]) -> Node:
    """Out of what its ranks said."""
    own = [each for each in everyone if each["facts"]["host"] == place.host]
    leader = everyone[place.rank]
    return Node(
        host=place.host,
        device=", ".join(dict.fromkeys(each["facts"]["device"] for each in own)),
        num_ranks=len(own),
        address=place.address,
        multiply_gflops=min(each["rates"]["multiply_gflops"] for each in own),
        copy_gb_per_second=min(each["rates"]["copy_gb_per_second"] for each in own),
        link_bytes_per_second=leader["links"],
        unreachable=reached[place.host],
        **leader["facts"]["node"],
    )


def _tell(
    nodes: Sequence[Node],
    findings: Sequence[Finding],
    arguments: argparse.Namespace,
    *,
    columns: int | None,
    seconds: float,
) -> None:
    bad = list(dict.fromkeys(host for finding in findings for host in finding.hosts))
    Console(width=columns or 160, force_terminal=columns is not None).print(_table(nodes))
    for finding in findings:
        print(f"bigbatch: {finding.text}")
    for remark in remarks(nodes):
        print(f"remark: {remark}")
    outcome = f"findings: {len(findings)}, unfit: {', '.join(bad) or 'none by itself'}" if findings else "all fit"
    print(f"preflight: nodes: {len(nodes)}, {outcome}; {seconds:.1f} s", flush=True)
    if arguments.bad_nodes:
        _write(arguments.bad_nodes, "".join(f"{host}\n" for host in bad))
    if arguments.json:
        facts = {
            "nodes": [asdict(node) for node in nodes],
            "findings": [asdict(finding) for finding in findings],
            "seconds": seconds,
        }
        _write(arguments.json, json.dumps(facts, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """What was found counts more than that it could be written."""
    try:
        path.write_text(text)
    except OSError as error:
        print(f"bigbatch: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _table(nodes: Sequence[Node]) -> Table:
    table = Table(
        "node", "devices", "multiply (slowest rank)", "copy", "link, best pair", "least free disk", "pictures"
    )
    for node in nodes:
        folder = min(node.free_gb, key=lambda name: node.free_gb[name], default=None)
        table.add_row(
            Text(node.host),
            Text(f"{node.num_ranks} x {node.device}"),
            f"{node.multiply_gflops:,.1f} GFLOP/s",
            f"{node.copy_gb_per_second:.1f} GB/s",
            bits(node.best_link) if node.best_link else "none measured",
            Text(f"{node.free_gb[folder]:g} GB, {folder}" if folder else ""),
            f"{node.pictures['training']:,} + {node.pictures['validation']:,}" if node.pictures else "",
        )
    return table
