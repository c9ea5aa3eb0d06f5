"""Report of the first rank on all nodes, on the terminal and in files."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbatch.errors import print_line, printable, tell
from bigbatch.files import write_named
from bigbatch.trainer.input.base import written_keys
from bigbatch.trainer.preflight.verdict import Node, NodeFinding, bits, remarks


def tell_findings(
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
    outcome = f"findings: {len(findings)}, unfit: {', '.join(bad) or 'none by itself'}" if findings else "all fit"
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
        _write(arguments.json, json.dumps(facts, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Write files; a failure to write does not change the findings."""
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
            bits(node.best_link) if node.best_link else "none measured",
            Text(printable(f"{node.free_gb[folder]:g} GB, {folder}") if folder else ""),
            f"{node.images['training']:,} + {node.images['validation']:,}" if node.images else "",
        )
    return table
