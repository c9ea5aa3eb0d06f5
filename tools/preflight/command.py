"""`bigbatch preflight`: each rank measures, and rank 0 reports."""

import argparse
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbatch.comm.connect import choose_device, connect, gpu_uuid
from bigbatch.comm.rendezvous.addresses import own_address
from bigbatch.comm.rendezvous.environ import ProcessEnv, read_process_env
from bigbatch.comm.rendezvous.gpus import require_own_gpus
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.tuning.conditions import device_name
from bigbatch.errors import UNFIT, CommError, print_line, printable, tell
from bigbatch.files import as_json, write_named
from bigbatch.tools.preflight import meeting
from bigbatch.tools.preflight.checks import Host, links_are_broken
from bigbatch.tools.preflight.facts import RankGpu, gather_facts, host_fields, machine_id, query_host
from bigbatch.tools.preflight.findings import (
    RATES,
    Node,
    NodeFinding,
    find_faults,
    gbit,
    remarks,
    slow_links,
    slow_rates,
    unjudged_link,
)
from bigbatch.tools.preflight.links import listening, measure_pairs, unreachable
from bigbatch.tools.preflight.meeting import MEET_SECONDS, NodeAddress, host_faults, with_starts
from bigbatch.tools.preflight.options import make_parser
from bigbatch.tools.preflight.rates import measure_rates
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.base import written_keys
from bigbatch.trainer.machine.gpu_driver import Clock
from bigbatch.user_settings import may_share_gpus

RATE_SECONDS = 2.0
"""Seconds to measure the rates, over all measurements."""
NUM_MEASUREMENTS = 2
WORK_SECONDS = 30.0
"""Seconds to wait for a rank while others measure; with_starts adds to it."""


def main(argv: Sequence[str]) -> int:
    """Run the preflight as one rank; return 0 if all nodes are fit, else UNFIT; equal on all ranks."""
    began = time.monotonic()
    arguments, words = make_parser().parse_known_args(argv)
    config = require_own_list(load_config(words, prog="bigbatch preflight"), words) if words else None
    env = read_process_env()
    env = replace(env, interface=arguments.interface or env.interface or (config.comm.interface if config else None))
    towards = env.master[0] if env.master else None
    address = own_address(is_one_host=env.is_one_host, interface=env.interface, towards=towards)
    control = JobControl(env, timeout_seconds=with_starts(MEET_SECONDS, world_size=env.world_size))
    absent = meeting.absent_ranks(control)
    nodes: list[Node] = []
    if absent:
        findings = meeting.absence_findings(absent, control)
    else:
        nodes, findings = examine(config, env, control, address=address, stated_gbit=arguments.link_gbit)
    if env.rank == 0:
        _print_findings(nodes, findings, arguments, columns=env.terminal_columns, seconds=time.monotonic() - began)
    if absent:
        meeting.wait_for_report(control)
        return UNFIT
    # no rank exits before rank 0 has reported: a launcher that sees code 4 ends the others
    outcomes = control.gather_text("unfit" if findings else "", what="outcome of the preflight")
    return UNFIT if outcomes[0] else 0


def examine(
    config: Config | None, env: ProcessEnv, control: JobControl, *, address: str, stated_gbit: float | None = None
) -> tuple[list[Node], list[NodeFinding]]:
    """Return the nodes' facts, rates and findings, on rank 0. Collective. Raises: CommError for lost ranks."""
    device, num_gpus, complaint = _own_device(config, env)
    is_leader = env.local_rank == 0
    with listening(address) as port:
        mine = NodeAddress(env.rank, env.host, address, port, machine_id(), num_gpus, complaint) if is_leader else None
        leaders = control.gather(mine and asdict(mine), what="meeting of every node")
        places = [NodeAddress(**each) for each in leaders if each]
        if early := host_faults(places):
            return [], early
        if device is None:
            raise CommError(str(complaint))
        gpu = RankGpu(env.host, os.getpid(), gpu_uuid(device), may_share_gpus())
        gpus = [RankGpu(**each) for each in control.gather(asdict(gpu), what="comparison of GPUs")]
        try:
            require_own_gpus([(gpu.host, "" if gpu.may_be_shared else gpu.uuid) for gpu in gpus])
        except CommError as error:  # all ranks find the same
            return [], [NodeFinding(str(error))]
        # all ranks are present now, and some may have slow storage
        control.timeout_seconds = with_starts(WORK_SECONDS, world_size=env.world_size)
        looking = _query_host(config, env, places, gpus, device=device, address=address) if is_leader else Host
        measured: dict[str, Any] = {"host": env.host, "device": device_name(device)}
        if is_leader:
            measured["node"] = gather_facts(config, device=device, list_gpus=lambda: looking().driver.gpus)
        missed = unreachable([(each.address, each.port) for each in places]) if is_leader else []
        own = replace(looking(), stated_gbit_per_second=stated_gbit)
        reach = {"missed": [places[index].host for index in missed], "is_broken": links_are_broken(own)}
        heard = control.gather(reach, what="reaching every node")
    reached = {place.host: heard[place.rank]["missed"] for place in places}
    measured |= {"links": {}, "rates": []}
    _take_turns(control, places, measured, device=device)
    # a transport would wait for unreachable nodes
    if not any(each["missed"] or each["is_broken"] for each in heard):
        _measure_links(control, places, measured, env, device=device)
    if is_leader:
        links = {other: max(rounds) for other, rounds in measured["links"].items()}
        measured["node"] |= host_fields(own, links=links)
    everyone = [
        json.loads(text) for text in control.collect_text(json.dumps(measured), what="what every rank measured")
    ]
    # collect_text returns the texts on rank 0 only
    nodes = [_node(place, everyone, reached) for place in places] if everyone else []
    return nodes, find_faults(nodes) if nodes else []


def _query_host(
    config: Config | None,
    env: ProcessEnv,
    places: Sequence[NodeAddress],
    gpus: Sequence[RankGpu],
    *,
    device: torch.device,
    address: str,
) -> Callable[[], Host]:
    beside = {place.host for place in places if place.machine == machine_id()}
    own = [gpu for gpu in gpus if gpu.host == env.host]
    host = Host(
        num_ranks=len(own),
        world_size=env.world_size,
        wants_gpus=not env.keeps_to_cpu and not (config and config.comm.backend == "gloo"),
        on_gpus=device.type == "cuda",
        shares_machine=len(beside) > 1,
        may_share_gpus=any(gpu.may_be_shared for gpu in own),
        own_gpus=tuple(gpu.uuid for gpu in own),
        is_interface_stated=env.interface is not None,
    )
    return query_host(host, gpus=[gpu for gpu in gpus if gpu.host in beside], address=address)


def _own_device(config: Config | None, env: ProcessEnv) -> tuple[torch.device | None, int, str | None]:
    """Return this rank's device, the number of GPUs that it sees, and the reason if it has none."""
    count = torch.cuda.device_count()
    try:
        device = choose_device(env, backend=config.comm.backend if config else "auto")
    except CommError as error:
        return None, count, str(error)
    return device, count if device.type == "cuda" else 0, None


def _take_turns(
    control: JobControl, places: Sequence[NodeAddress], measured: dict[str, Any], *, device: torch.device
) -> None:
    """Measure this rank's rates twice, and once more if its node is about to be named as slow. Collective.

    The best counts: short disturbances do not, lasting ones do. Adds each measurement to measured["rates"].
    Nodes of one machine share its cores, so they take turns; nodes of different machines measure at the same time.
    """
    machines: dict[str, list[str]] = {}
    for place in places:
        machines.setdefault(place.machine, []).append(place.host)
    seconds = RATE_SECONDS / max(map(len, machines.values())) / NUM_MEASUREMENTS

    def measure(named: Collection[str]) -> None:
        turns = [[host for host in hosts if host in named] for hosts in machines.values()]
        for turn in range(max(map(len, turns))):
            # a slice, since a machine with fewer nodes has none for this turn
            if any(hosts[turn : turn + 1] == [measured["host"]] for hosts in turns):
                measured["rates"].append(asdict(measure_rates(device, seconds=seconds)))
            control.gather_text("", what="measuring of rates")

    # the two measurements are far apart: all nodes take their turn in between
    for _ in range(NUM_MEASUREMENTS):
        measure([place.host for place in places])
    measure(_suspects(control, places, measured, find=slow_rates))


def _suspects(
    control: JobControl,
    places: Sequence[NodeAddress],
    measured: Mapping[str, Any],
    *,
    find: Callable[[list[Node]], Any],
) -> list[str]:
    """Return the hosts that the measurements of all ranks are about to name, or those of a slow pair. Collective."""
    everyone = [json.loads(text) for text in control.collect_text(json.dumps(measured), what="rates of every rank")]
    # rank 0 alone has the texts
    slow = find([Node(place.host, {}, "", **_rates(place, everyone)) for place in places]) if everyone else []
    hosts = json.dumps([host for each in slow for host in each.hosts])
    return list(
        json.loads(control.tell_all(hosts, what="hosts to measure again", timeout_seconds=control.timeout_seconds))
    )


def _measure_links(
    control: JobControl,
    places: Sequence[NodeAddress],
    measured: dict[str, Any],
    env: ProcessEnv,
    *,
    device: torch.device,
) -> None:
    """Add host -> bytes per second of each measurement to measured["links"] of the first rank of a host. Collective.

    Links that are about to be named as slow are measured once more.
    """
    backend = "nccl" if device.type == "cuda" else "tcp"
    communicator = connect(
        backend=backend, algorithm="ring", timeout_seconds=control.timeout_seconds, env=env, device=device
    )
    ranks = [place.rank for place in places]

    def measure(named: Collection[str]) -> None:
        indices = [index for index, place in enumerate(places) if place.host in named]
        for index, rate in measure_pairs(communicator, ranks, of=indices).items() if env.rank in ranks else ():
            measured["links"].setdefault(places[index].host, []).append(rate)

    measure([place.host for place in places])
    measure(_suspects(control, places, measured, find=slow_links))
    communicator.close()


def _rates(place: NodeAddress, everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return Node's fields with rates: the best of its slowest rank, and of the links of its first rank."""
    own = [each["rates"] for each in everyone if each["host"] == place.host]
    links = everyone[place.rank]["links"]
    rounds = {name: min(([each[name] for each in rates] for rates in own), key=max) for name in RATES}
    return {
        **{name: max(rounds[name]) for name in RATES},
        "link_bytes_per_second": {other: max(found) for other, found in links.items()},
        "rounds": rounds | links,
    }


def _node(place: NodeAddress, everyone: Sequence[dict[str, Any]], reached: dict[str, list[str]]) -> Node:
    own = {rank: each for rank, each in enumerate(everyone) if each["host"] == place.host}
    clocks = {rank: [clock for rates in each["rates"] if (clock := rates["clock"])] for rank, each in own.items()}
    shares = [[share for rates in each["rates"] if (share := rates["cpu_share"]) is not None] for each in own.values()]
    return Node(
        host=place.host,
        device=", ".join(dict.fromkeys(each["device"] for each in own.values())),
        num_ranks=len(own),
        address=place.address,
        clocks={rank: Clock(**max(found, key=lambda each: each["mhz"])) for rank, found in clocks.items() if found},
        cpu_share=min((max(found) for found in shares if found), default=None),
        unreachable=reached[place.host],
        **_rates(place, everyone),
        **everyone[place.rank]["node"],
    )


def _print_findings(
    nodes: Sequence[Node],
    findings: Sequence[NodeFinding],
    arguments: argparse.Namespace,
    *,
    columns: int | None,
    seconds: float,
) -> None:
    """Print a table, all findings and a summary line; write the files that the options name."""
    bad = list(dict.fromkeys(host for finding in findings for host in finding.hosts))
    if nodes:
        Console(width=columns or 160, force_terminal=columns is not None).print(_table(nodes))
    for finding in findings:
        print_line(f"bigbatch: {finding.text}")
    for remark in remarks(nodes):
        print_line(f"remark: {remark}")
    unjudged = unjudged_link(nodes)
    if unjudged:
        print_line(f"remark: {unjudged}")
    fit = "no fault found, the link is not judged" if unjudged else "all fit"
    outcome = f"findings: {len(findings)}, unfit: {', '.join(bad) or 'no single node'}" if findings else fit
    measured = f"nodes: {len(nodes)}" if nodes else "nothing measured"
    print_line(f"preflight: {measured}, {outcome}; {seconds:.1f} s")
    if arguments.bad_nodes:
        _write(arguments.bad_nodes, "".join(f"{host}\n" for host in bad))
    if arguments.json:
        facts = {
            "nodes": [asdict(node, dict_factory=written_keys) for node in nodes],
            "findings": [asdict(finding) for finding in findings],
            "seconds": seconds,
        }
        _write(arguments.json, as_json(facts, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Write text to path; a failure prints a line and does not change the findings."""
    try:
        write_named(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        tell(f"{path} cannot be written: {error.strerror}")


def _table(nodes: Sequence[Node]) -> Table:
    table = Table("node", "devices", "multiply (slowest rank)", "copy", "link, best pair", "least free disk", "images")
    for node in nodes:
        folder = min(node.free_gb, key=lambda name: node.free_gb[name], default=None)
        table.add_row(
            Text(printable(node.host)),
            Text(printable(f"{node.num_ranks} x {node.device}")),
            f"{node.multiply_gflops:,.1f} GFLOP/s",
            f"{node.copy_gb_per_second:.1f} GB/s",
            gbit(node.best_link) if node.best_link else "none measured",
            Text(printable(f"{node.free_gb[folder]:g} GB, {folder}") if folder else ""),
            f"{node.images['training']:,} + {node.images['validation']:,}" if node.images else "",
        )
    return table
