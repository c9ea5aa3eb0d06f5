"""`bigbatch preflight`: what each rank does, and what the first one says."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
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
from bigbatch.trainer.preflight.facts import Facts, gather_facts
from bigbatch.trainer.preflight.links import listen, measure_pairs, unreachable
from bigbatch.trainer.preflight.rates import Rates, measure_rates
from bigbatch.trainer.preflight.verdict import Finding, Node, bits, judge, remarks
from bigbatch.trainer.rundir import writing

UNFIT = 4
"""Exit code where something is wrong with a node, or between nodes."""
MEET_SECONDS = 12.0
"""How long a rank is waited for."""


def main(argv: Sequence[str]) -> int:
    """Of one rank: 0 where all is well, 4 where it is not; the same on all ranks."""
    began = time.monotonic()
    arguments, words = _parser().parse_known_args(argv)
    config = load_config(words, prog="bigbatch preflight") if words else None
    interface = arguments.interface or (config.comm.interface if config else None)
    env = read_process_env()
    address, control = meet(env, config, interface=interface)
    nodes = examine(config, env, control, address=address, interface=interface, seconds=arguments.seconds)
    findings = judge(nodes)
    if env.rank == 0:
        _tell(nodes, findings, arguments, columns=env.terminal_columns, seconds=time.monotonic() - began)
    control.gather_text("", what="end of the preflight")  # a rank that left with 4 before would end rank 0, too
    return UNFIT if findings else 0


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
    add("--interface", help="network interface between the nodes (default: the experiment's comm.interface)")
    add("--bad-nodes", type=Path, metavar="FILE", help="write the names of unfit nodes there, one a line")
    add("--json", type=Path, metavar="FILE", help="write all that was found there")
    add("--seconds", type=float, default=2.0, help="for computing rates (default: %(default)s)")
    return parser


def meet(env: ProcessEnv, config: Config | None, *, interface: str | None) -> tuple[str, Control]:
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
    """What all nodes say and can do. Collective. Raises: CommError for ranks that do not come."""
    device = choose_device(env, backend=config.comm.backend if config else "auto")
    is_leader = env.local_rank == 0
    with listen(address) as server:
        facts = gather_facts(
            config,
            rank=env.rank,
            host=env.host,
            is_leader=is_leader,
            address=address,
            port=server.getsockname()[1],
            device=device,
        )
        everyone = [Facts(**each) for each in _share(control, dataclasses.asdict(facts), what="facts of every node")]
        leaders = [each for each in everyone if each.is_leader]
        missed = unreachable([(each.address, each.port) for each in leaders]) if is_leader else []
        reached = _share(control, [leaders[index].host for index in missed], what="reaching every node")
    rates = _take_turns(control, everyone, env, device=device, seconds=seconds)
    pairs: dict[int, dict[str, float]] = {}
    if not any(reached):  # a transport would wait for those that cannot be reached
        pairs = _measure_links(control, leaders, env, device=device, interface=interface)
    return [_node(each, everyone, rates, pairs.get(each.rank, {}), reached[each.rank]) for each in leaders]


def _share(control: Control, mine: Any, *, what: str) -> list[Any]:
    return [json.loads(text) for text in control.gather_text(json.dumps(mine), what=what)]


def _take_turns(
    control: Control, everyone: Sequence[Facts], env: ProcessEnv, *, device: torch.device, seconds: float
) -> list[Rates]:
    """Rates of every rank. Nodes of one machine share its cores, so they take turns; real ones measure all at once."""
    hosts: dict[str, list[str]] = {}
    for each in everyone:
        same = hosts.setdefault(each.machine, [])
        if each.host not in same:
            same.append(each.host)
    turns = max(len(same) for same in hosts.values())
    mine = None
    for turn in range(turns):
        if env.host in [same[turn] for same in hosts.values() if turn < len(same)]:
            mine = measure_rates(device, seconds=seconds / turns)
        control.gather_text("", what="measuring of rates")
    assert mine is not None
    return [Rates(**each) for each in _share(control, dataclasses.asdict(mine), what="rates of every rank")]


def _measure_links(
    control: Control,
    leaders: Sequence[Facts],
    env: ProcessEnv,
    *,
    device: torch.device,
    interface: str | None,
) -> dict[int, dict[str, float]]:
    """Of each leader, bytes per second to the hosts it met."""
    backend = "nccl" if device.type == "cuda" else "tcp"
    communicator = connect(
        backend=backend, algorithm="ring", interface=interface, timeout_seconds=MEET_SECONDS, env=env, device=device
    )
    ranks = [each.rank for each in leaders]
    mine = measure_pairs(communicator, ranks) if env.rank in ranks else {}
    named = {leaders[place].host: rate for place, rate in mine.items()}
    found = _share(control, named, what="measuring of links")
    communicator.close()
    return {rank: found[rank] for rank in ranks}


def _node(
    leader: Facts, everyone: Sequence[Facts], rates: Sequence[Rates], links: dict[str, float], missed: Sequence[str]
) -> Node:
    own = [each.rank for each in everyone if each.host == leader.host]
    devices = [everyone[rank].device for rank in own]
    return Node(
        host=leader.host,
        versions=leader.versions,
        devices=", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        address=leader.address,
        free_gb=leader.free_gb,
        pictures=leader.pictures,
        complaint=leader.complaint,
        gpus=leader.gpus,
        multiply_gflops=min(rates[rank].multiply_gflops for rank in own),
        copy_gb_per_second=min(rates[rank].copy_gb_per_second for rank in own),
        link_bytes_per_second=links,
        unreachable=missed,
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
        with writing(arguments.bad_nodes):
            arguments.bad_nodes.write_text("".join(f"{host}\n" for host in bad))
    if arguments.json:
        facts = {
            "nodes": [dataclasses.asdict(node) for node in nodes],
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "seconds": seconds,
        }
        with writing(arguments.json):
            arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


def _table(nodes: Sequence[Node]) -> Table:
    table = Table(
        "node", "devices", "multiply (slowest rank)", "copy", "link, best pair", "least free disk", "pictures"
    )
    for node in nodes:
        folder = min(node.free_gb, key=lambda name: node.free_gb[name], default=None)
        table.add_row(
            Text(node.host),
            Text(node.devices),
            f"{node.multiply_gflops:,.1f} GFLOP/s",
            f"{node.copy_gb_per_second:.1f} GB/s",
            bits(node.best_link) if node.best_link else "none measured",
            Text(f"{node.free_gb[folder]:g} GB, {folder}" if folder else ""),
            f"{node.pictures['training']:,} + {node.pictures['validation']:,}" if node.pictures else "",
        )
    return table
