"""The records of one run of benchmarks/comm as Markdown. Pure but for reading the files.

python -m benchmarks.comm.summary benchmarks/results
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comm.cases import prefix

Record = Mapping[str, Any]


def main() -> None:
    """Print the summary of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="summarise the records of run.py --quick")
    options = parser.parse_args()
    print(summarise(read_records(options.folder, quick=options.quick)))


def read_records(folder: Path, *, quick: bool = False) -> dict[str, Record]:
    """Read case -> record from the files of run.py; ignores other JSON files."""
    start = prefix(quick=quick)
    paths = sorted(folder.glob(f"{start}*.json"))
    found = {
        path.stem.removeprefix(start): json.loads(path.read_text())
        for path in paths
        if quick or not path.name.startswith(prefix(quick=True))
    }
    return {case: record for case, record in found.items() if record.get("benchmark") in TABLES}


def summarise(records: Mapping[str, Record]) -> str:
    """Write all of it."""
    parts = ["# All-reduce of gradients, measured", *_conditions(records)]
    for case, record in records.items():
        parts += [f"## {case}", _origin(record), TABLES[record["benchmark"]](record)]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def exchange_table(record: Record) -> str:
    """Write milliseconds and shares of the limit by size and contestant; single measurements in brackets."""
    rows = record["rows"]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = []
    for size in sorted({row["size"] for row in rows}):
        at = {row["contestant"]: row for row in rows if row["size"] == size}
        lines.append((show_size(size), *(show_cell(at.get(name)) for name in names)))
    return "\n\n".join(
        (
            f"Milliseconds (share of the limit), median of the repetitions; {_goodput(record)}. "
            + "; ".join(f"{name}: {tuned['table']}" for name, tuned in record["tuned"].items())
            + ".",
            table(("", *names), lines),
            "Sent over a node's link per byte of the tensor, and cores used by all ranks, at the largest size of each: "
            + "; ".join(_cost(name, rows) for name in names if _cost(name, rows))
            + ".",
        )
    )


def median(row: Record) -> float:
    """Return the median of a row's seconds."""
    return float(row["seconds"]["median"])


def show_size(num_bytes: int) -> str:
    """Show 1000 as '1 KB'; decimal units."""
    for unit, name in ((1_000_000, "MB"), (1_000, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"


def show_cell(row: Record | None) -> str:
    """Write one contestant at one size."""
    if row is None:
        return ""
    share = row["limit_share"]
    text = f"{1e3 * median(row):.3g}" if median(row) < 1 else f"{1e3 * median(row):.0f}"
    text += f" ({share:.2f})" if share is not None and share >= 0.005 else ""
    return text if row["seconds"]["n"] > 1 else f"[{text}]"


def _cost(name: str, rows: Sequence[Record]) -> str:
    mine = [row for row in rows if row["contestant"] == name and "node_bytes" in row]
    if not mine:
        return ""
    last = max(mine, key=lambda row: int(row["size"]))
    return (
        f"{name} {last['node_bytes'] / last['size']:.2f} B, {last['cores_used']:.2f} cores ({show_size(last['size'])})"
    )


def gradients_table(record: Record) -> str:
    """Write seconds of each contestant, and how many times faster ours are."""
    rows = {row["contestant"]: row for row in record["rows"]}
    lines = []
    for name, row in rows.items():
        seconds = row["seconds"]
        lines.append(
            (
                name,
                f"{seconds['median']:.3f}",
                f"{seconds['min']:.3f} to {seconds['max']:.3f}",
                str(seconds["n"]),
                f"{median(rows['ddp']) / seconds['median']:.2f}" if "ddp" in rows else "",
                f"{median(rows['horovod']) / seconds['median']:.2f}" if "horovod" in rows else "",
                f"{row['node_bytes'] / record['num_bytes']:.2f}",
                f"{row['cores_used']:.2f}",
            )
        )
    limit = record["limit_seconds"]
    head = ("", "seconds", "spread", "n", "DDP / this", "Horovod / this", "sent per byte", "cores")
    at_limit = f"; limit at fp32 {limit:.3f} s" if limit else ""
    return (
        f"{record['model']}, {record['num_bytes'] / 1e6:.1f} MB; {_goodput(record)}{at_limit}.\n\n{table(head, lines)}"
    )


def scaling_table(record: Record) -> str:
    """Write the efficiency of each contestant, by the kind of scaling."""
    lines = [
        (
            row["scaling"],
            row["contestant"],
            f"{row['compute_seconds']:.3f}",
            f"{row['seconds']['median']:.3f}",
            *(show_efficiency(row) if "efficiency" in row else ("", "")),
            str(row["seconds"]["n"]),
        )
        for row in record["rows"]
    ]
    head = ("scaling", "", "forward and backward", "step", "efficiency (spread)", "limit", "n")
    nodes = f"{record['num_nodes']} node{'s' if record['num_nodes'] > 1 else ''}"
    return f"{record['model']}, {nodes}, seconds; {_goodput(record)}.\n\n{table(head, lines)}"


def show_efficiency(row: Record) -> tuple[str, str]:
    """Show median and spread, and the limit."""
    found = row["efficiency"]
    return (
        f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})",
        f"{row['limit_efficiency']:.3f}",
    )


def overhead_table(record: Record) -> str:
    """Write milliseconds of a step without and with the reducer."""
    lines = [
        (
            kind,
            f"{1e3 * each['plain_seconds']['median']:.3f}",
            f"{1e3 * each['reducer_seconds']['median']:.3f}",
            f"{each['ratio']['median']:.4f} ({each['ratio']['min']:.4f} to {each['ratio']['max']:.4f})",
            str(each["ratio"]["n"]),
        )
        for kind, each in record["results"].items()
    ]
    device = record["conditions"]["device"]
    return f"{device}.\n\n" + table(("", "ms without", "ms with the reducer", "ratio", "n"), lines)


def _goodput(record: Record) -> str:
    known = [f"{each / 1e6:.1f}" for each in record["goodput_bits_per_second"] if each]
    return f"goodput of a link by iperf3, before and after: {' and '.join(known)} Mbit/s" if known else "no links"


def _origin(record: Record) -> str:
    """Return the conditions of a case that others may not share."""
    facts = record["conditions"]
    day = str(facts.get("date") or "")[:10]
    return ", ".join(filter(None, (f"Commit {facts['commit']}", day, facts.get("machine")))) + "."


def _conditions(records: Mapping[str, Record]) -> list[str]:
    facts = [record["conditions"] for record in records.values() if record["benchmark"] != "reducer_overhead"]
    if not facts:
        return []

    def stated(text: str) -> str:
        """Fill the text with each record's facts, once for equal ones."""
        return ", ".join(sorted({text.format_map(each) for each in facts}))

    versions = sorted({f"{name} {version}" for each in facts for name, version in each["versions"].items() if version})
    days = sorted({each["date"][:10] for each in facts})
    return [
        f"Commit {stated('{commit}')}; {stated('{cores[0]} cores of {machine}, {memory_gib} GiB')}; "
        f"{stated('{kernel}')}; Python {stated('{python}')}; torch {stated('{torch}')}; {', '.join(versions)}; "
        f"TCP {stated('{congestion_control[system]} ({congestion_control[backend tcp]} in backend tcp)')}; "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}. "
        "All ranks of a case share these cores. Times are medians of the slowest rank's; [ ] marks what there was time "
        "for only once."
    ]


TABLES = {
    "exchange": exchange_table,
    "gradients": gradients_table,
    "scaling": scaling_table,
    "reducer_overhead": overhead_table,
}


if __name__ == "__main__":
    main()
