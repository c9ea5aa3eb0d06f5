"""What a campaign came to, as Markdown tables: `python -m faults table`."""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigbatch.errors import FaultError, print_lines
from bigbatch.files import parse_json
from bigbatch.paths import as_path
from faults.trial import KINDS, PHASES

Record = Mapping[str, Any]
"""A line of a campaign's file: Score.record()."""


def main(argv: Sequence[str]) -> int:
    """Print the tables of a campaign's file. Raises: FaultError."""
    parser = argparse.ArgumentParser(
        prog="python -m faults table",
        description="The tables of a recorded campaign, as Markdown.",
        epilog="example: python -m faults table faults.jsonl",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=as_path, metavar="FILE", help="what python -m faults run --out wrote")
    print_lines(format_campaign(*read_records(parser.parse_args(argv).file)))
    return 0


def read_records(path: Path) -> tuple[Record, list[Record]]:
    """Return the conditions and the trials of a campaign's file. Raises: FaultError naming the path."""
    try:
        first, *rest = [parse_json(line) for line in path.read_text().splitlines()]
        conditions = first["conditions"]
        for record in rest:
            _ = record["kind"], record["phase"], record["rank"], record["broken"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not what python -m faults run --out writes"
        raise FaultError(f"{path}: {reason}") from error
    return conditions, rest


def format_campaign(conditions: Record, records: Sequence[Record]) -> str:
    """Return the conditions, a table of kinds, one of kinds by phase, and the promises that were broken."""
    stated = ", ".join(f"{name} {value}" for name, value in conditions.items())
    first = f"{len(records)} trials. Conditions: {stated}."
    return "\n\n".join((first, _kinds(records), _phases(records), _broken(records)))


def _kinds(records: Sequence[Record]) -> str:
    rows = []
    for kind, is_first in ((kind, is_first) for kind in KINDS for is_first in (True, False)):
        some = [each for each in records if each["kind"] == kind and (each["rank"] == 0) is is_first]
        if some:
            rows.append(
                (
                    f"{kind}{', rank 0' if is_first else ''}",
                    len(some),
                    _share(each["is_named"] for each in some),
                    _spread(each["detected_seconds"] for each in some),
                    _spread(each["ended_seconds"] for each in some),
                    _spread(each["resumed_seconds"] for each in some),
                    max((each["steps_lost"] for each in some if each["steps_lost"] is not None), default="-"),
                    _share(each["is_equal"] for each in some),
                    f"{sum(not each['left_behind'] for each in some)}/{len(some)}",
                    f"{sum(not each['broken'] for each in some)}/{len(some)}",
                )
            )
    head = (
        "kind",
        "n",
        "right rank named",
        "named after (s)",
        "ended after (s)",
        "stepping again after (s)",
        "steps lost, most",
        "equal bits",
        "nothing left",
        "all kept",
    )
    return _table(head, rows)


def _phases(records: Sequence[Record]) -> str:
    def cell(kind: str, phase: str) -> str:
        some = [each for each in records if each["kind"] == kind and each["phase"] == phase]
        return f"{sum(not each['broken'] for each in some)}/{len(some)}" if some else ""

    kinds = [kind for kind in KINDS if any(each["kind"] == kind for each in records)]
    return _table(("all kept", *PHASES), [(kind, *(cell(kind, phase) for phase in PHASES)) for kind in kinds])


def _broken(records: Sequence[Record]) -> str:
    counts: dict[str, list[str]] = {}
    for each in records:
        for promise in each["broken"]:
            counts.setdefault(promise, []).append(each["kind"])
    if not counts:
        return "No promise was broken."
    ordered = sorted(counts.items(), key=lambda item: -len(item[1]))
    return _table(
        ("broken", "trials", "kinds"),
        [(promise, len(kinds), ", ".join(sorted(set(kinds)))) for promise, kinds in ordered],
    )


def _share(values: Iterable[bool | None]) -> str:
    known = [each for each in values if each is not None]
    return f"{sum(known)}/{len(known)}" if known else "-"


def _spread(values: Iterable[float | None]) -> str:
    known = [each for each in values if each is not None]
    return f"{statistics.median(known):.1f}, at most {max(known):.1f}" if known else "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rules = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rules, *rows))
