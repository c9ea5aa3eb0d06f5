"""Write a record as a page of Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.suite.targets import TARGETS


def page(record: Mapping[str, Any]) -> str:
    """Write targets, then each case: its figures, its tables, missing measurements, and its conditions."""
    title = f"# {record['device']}: benchmarks/gpu"
    if record["size"] != "full":
        return "\n\n".join([title, "Small size: shows that all cases run, and no figure of it means anything.\n"])
    cases = record["cases"]
    return "\n\n".join([title, targets(record), *(case(name, each) for name, each in cases.items())]) + "\n"


def targets(record: Mapping[str, Any]) -> str:
    """Write this device's targets, and whether they are met."""
    rows = []
    for target in (each for each in TARGETS if each.device in record["device"]):
        value = target.value(record["cases"])
        verdict = "not measured" if value is None else "yes" if target.is_met(value) else "NO"
        rows.append([target.words, target.bound, "" if value is None else number(value), verdict])
    return table(("target", "wanted", "found", "met"), rows)


def case(name: str, found: Mapping[str, Any]) -> str:
    """Write a case's section."""
    figures = [
        [each, number(f["median"]), f"{number(f['min'])} to {number(f['max'])}", str(f["n"]), f["unit"]]
        for each, f in found["figures"].items()
    ]
    parts = [f"## {name}", table(("figure", "median", "spread", "n", "unit"), figures)]
    for rows in filter(None, found["tables"].values()):
        cells = [[each if isinstance(each, str) else number(each) for each in row.values()] for row in rows]
        parts.append(table(tuple(rows[0]), cells))
    parts += [f"Left out: {what}: {why}" for what, why in found["left_out"].items()]
    conditions = found["conditions"]
    shown = (
        "date",
        "commit",
        "torch_build",
        "cuda",
        "cudnn",
        "driver",
        "power_limit",
        "sm_clock",
        "temperature_celsius",
        "precision",
        "clock",
    )
    parts.append("Conditions: " + ", ".join(f"{key} {conditions[key]}" for key in shown if conditions.get(key)) + ".")
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def number(value: float | None) -> str:
    """Show a number with four digits."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
