"""A self-contained HTML page."""

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from bigbatch.colours import ignore_missing_glyphs
from bigbatch.launch.tables import Table, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
h1, h2, p { overflow-wrap: anywhere; }
.finding { font-size: 1.1rem; background: #f2f6fa; border-left: 4px solid #0072B2; padding: .5rem 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid #ddd; }
td { max-width: 32rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
svg { max-width: 100%; height: auto; }
.note { color: #666; font-size: .85rem; }
.shots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; }
.shots figure { width: 160px; font-size: .85rem; overflow-wrap: anywhere; }
"""


def make_page(
    *, title: str, findings: Sequence[str], images: Mapping[str, str], tables: Sequence[Table], note: str | None
) -> str:
    """Return the page. images: name -> our own SVG or HTML; all other text is escaped. note: explanation of terms."""
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_html(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{_html(title)}</h1>",
        *(f'<p class="finding">{_html(text)}</p>' for text in findings),
        *(f'<figure aria-label="{escape(name)}">{svg}</figure>' for name, svg in images.items()),
        *(_table(table) for table in tables),
        *([f'<p class="note">{escape(note)}</p>'] if note else []),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def as_svg(figure: "Figure") -> str:
    """Return the svg element without the file's header."""
    from matplotlib import rc_context

    ignore_missing_glyphs()
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "bigbatch"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(table: Table) -> str:
    kinds = [' class="number"' if is_number else "" for is_number in table.is_number]
    top = _cells("th", table.head, kinds) if any(table.head) else ""
    body = "\n".join(_cells("td", row, kinds) for row in table.rows)
    return f'<h2>{_html(table.title)}</h2>\n<div class="scroll"><table>{top}\n{body}</table></div>'


def _cells(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    tags = (f"<{tag}{kind}>{_html(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
    return f"<tr>{''.join(tags)}</tr>"


def _html(text: str) -> str:
    return escape(plain(text))
