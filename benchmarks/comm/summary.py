"""The records of one run of benchmarks/comm as Markdown. Pure but for reading the files.

python -m benchmarks.comm.summary benchmarks/results
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import table

Record = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(summarise(read_records(parser.parse_args().folder)))


def read_records(folder: Path) -> dict[str, Record]:
    """Read case -> record from the files of run.py; ignores other JSON files."""
    paths = sorted(folder.glob("comm-*.json"))
    found = {path.stem.removeprefix("comm-"): json.loads(path.read_text()) for path in paths}
    return {case: record for case, record in found.items() if record.get("benchmark") in TABLES}


def summarise(records: Mapping[str, Record]) -> str:
    """Write all of it."""
    parts = ["# All-reduce of gradients, measured", *_conditions(records)]
    for case, record in records.items():
        parts += [f"## {case}", _origin(record), TABLES[record["benchmark"]](record)]
    return "\n\n".join(parts)


def median(row: Record) -> float:
    """Return the median of a row's seconds."""
    return float(row["seconds"]["median"])


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
    lines = []
    for row in record["rows"]:
        efficiency = ("", "")
        if found := row.get("efficiency"):
            spread = f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})"
            efficiency = spread, f"{row['limit_efficiency']:.3f}"
        seconds = (f"{row['compute_seconds']:.3f}", f"{row['seconds']['median']:.3f}")
        lines.append((row["scaling"], row["contestant"], *seconds, *efficiency, str(row["seconds"]["n"])))
    head = ("scaling", "", "forward and backward", "step", "efficiency (spread)", "limit", "n")
    nodes = f"{record['num_nodes']} node{'s' if record['num_nodes'] > 1 else ''}"
    return f"{record['model']}, {nodes}, seconds; {_goodput(record)}.\n\n{table(head, lines)}"


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
        "All ranks of a case share these cores. Times are medians of the slowest rank's."
    ]


TABLES = {
    "gradients": gradients_table,
    "scaling": scaling_table,
    "reducer_overhead": overhead_table,
}


if __name__ == "__main__":
    main()
