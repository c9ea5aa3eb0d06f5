"""The short preflight of a node before a job: findings that need no other node, no measurement and no torch."""

import argparse
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bigbatch.errors import UNFIT, print_line, printable
from bigbatch.tools.preflight.checks import CHECKS, Host
from bigbatch.tools.preflight.facts import RankGpu, foreign_processes, read_host, start_query
from bigbatch.trainer.machine.nvidia import NO_ANSWER, Driver, may_have_gpus, query_driver
from bigbatch.user_settings import may_share_gpus, stated_gpus

SECONDS = 8.0
"""Most seconds for all queries of a node, which run at the same time; then its driver counts as hung."""


def main(argv: Sequence[str]) -> int:
    """Print the findings on this node, one a line; return UNFIT if there is one, else 0."""
    parser = argparse.ArgumentParser(prog="bigbatch preflight --short", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the job")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks on this node")
    arguments, _ = parser.parse_known_args(argv)
    return report(num_ranks=arguments.ranks_per_node, world_size=arguments.ranks, visible=stated_gpus())


def report(*, num_ranks: int, world_size: int, visible: str | None) -> int:
    """Print the findings on this node; return UNFIT if there is one, else 0."""
    findings = find(num_ranks=num_ranks, world_size=world_size, visible=visible)
    for text in findings:
        print_line(f"bigbatch: {printable(socket.gethostname())}: {text}; --preflight off starts the job nevertheless")
    return UNFIT if findings else 0


def find(*, num_ranks: int, world_size: int, visible: str | None, root: Path = Path("/")) -> list[str]:
    """Return the findings on this node, with their remedies; none if it has no GPU, or the job's ranks see none.

    visible: value of CUDA_VISIBLE_DEVICES, indices or beginnings of UUIDs; None: all GPUs.
    A fact that cannot be read, for example without nvidia-smi or without permission, is no finding.
    """
    if visible in ("", "-1") or not may_have_gpus(root):
        return []
    late = Driver(complaint=f"{NO_ANSWER} {SECONDS:g} s")
    asking = start_query(query_driver, late=late, seconds=SECONDS)
    host = Host(num_ranks=num_ranks, world_size=world_size, may_share_gpus=may_share_gpus())
    # no address: the interface between nodes matters to no finding here
    host = start_query(partial(read_host, host, address="127.0.0.1", root=root), late=host, seconds=SECONDS)()
    driver = asking()
    if not driver.gpus and not (driver.complaint or "").startswith(NO_ANSWER):
        return []  # a driver that is not loaded: the job's ranks compute on the CPU, or say why they cannot
    own = own_gpus(list(driver.health), visible=visible, num_ranks=num_ranks)
    gpus = [RankGpu(socket.gethostname(), 0, uuid) for uuid in own]
    foreign = foreign_processes(driver.processes, gpus, root=root)
    host = replace(host, driver=driver, on_gpus=bool(driver.gpus), own_gpus=own, foreign=foreign)
    return [f"{text}: {check.remedy}" for check in CHECKS if check.is_finding for text in check.find(host)]


def own_gpus(uuids: Sequence[str], *, visible: str | None, num_ranks: int) -> tuple[str, ...]:
    """Return the GPUs of the node's ranks: the first visible ones, one for each rank."""
    if visible is None:
        return tuple(uuids[:num_ranks])
    found = []
    for word in visible.split(",")[:num_ranks]:
        matches = [uuids[int(word)]] if word.isdecimal() and int(word) < len(uuids) else []
        found += matches or [uuid for uuid in uuids if word and uuid.startswith(word)]
    return tuple(found)
