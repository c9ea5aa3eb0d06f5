"""One HTML page that needs no other file."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bigbatch.launch.report.tables import Table

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.finding { font-size: 1.1rem; background: #f2f6fa; border-left: 4px solid #0072B2; padding: .5rem 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #ddd; }
td { white-space: nowrap; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
svg { max-width: 100%; height: auto; }
.note { color: #666; font-size: .85rem; }
"""

EXPLAINED = (
    "Efficiency: images per second and rank, beside the fewest ranks. A step is computing, waiting for the wire, for "
    "pictures and for slower ranks; what each takes beyond its share of the ideal step adds up to what efficiency "
    "lacks. Medians over a run's reports but the first."
)


def make_page(
    *,
    title: str,
    findings: Sequence[str],
    images: Mapping[str, str],
    tables: Sequence[Table],
    conditions: Mapping[str, Any],
    note: str = EXPLAINED,
) -> str:
    """Write the page; pictures: name -> SVG of ours; all other text is escaped."""
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="finding">{escape(text)}</p>' for text in findings),
        *(f'<figure aria-label="{escape(name)}">{svg}</figure>' for name, svg in images.items()),
        *(_table(table) for table in tables),
        "<h2>Conditions</h2>",
        _table_rows([(key, str(value)) for key, value in conditions.items()]),
        f'<p class="note">{escape(note)}</p>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(table: Table) -> str:
    return f"<h2>{escape(table.title)}</h2>\n" + _table_rows(table.rows, head=table.head)


def _table_rows(rows: Sequence[Sequence[str]], *, head: Sequence[str] = ()) -> str:
    top = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>" if head else ""
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}\n{body}</table></div>'
