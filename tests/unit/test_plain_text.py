"""No sentence of the pages is over 40 words, and no paragraph or list item over 90."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
WORDS = {"sentence": 40, "paragraph": 90}
STILL_TOO_LONG = {  # pages that wait to be shortened; pytest -rxX tells which of them exceed
    "docs/admin.md",
    "docs/bag.md",
    "docs/comm-bench.md",
    "docs/comm.md",
    "docs/compute.md",
    "docs/container.md",
    "docs/data.md",
    "docs/design.md",
    "docs/diff.md",
    "docs/doctor.md",
    "docs/emulate.md",
    "docs/failure-model.md",
    "docs/optimizers.md",
}
NOT_PROSE = r"^```.*?^```$|^(?:\||#|    ).*?$|<!--.*?-->"
"""Fenced blocks, then tables, headings and indented blocks, then comments."""


def too_long(text: str) -> list[str]:
    """What exceeds WORDS in a page: line of its paragraph, words, kind and beginning of each."""
    prose = re.sub(NOT_PROSE, lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S)
    line, exceeding = 1, []
    for paragraph in re.split(r"(\n\s*\n|\n(?=- |\d+\. ))", prose):  # separators, too: they have no words
        sentences = [("sentence", each) for each in re.split(r"(?<=[.!?])\s+", paragraph)]
        for kind, part in [("paragraph", paragraph), *sentences]:
            words = part.split()
            if len(words) > WORDS[kind]:
                exceeding.append(f"{line}: a {kind} of {len(words)} words: {' '.join(words[:8])} ...")
        line += paragraph.count("\n")
    return exceeding


def test_long_sentences_and_paragraphs_are_seen_with_their_line() -> None:
    code = "```console\n" + "word " * 99 + "\n```\n"
    table, indented = "| " + "word " * 99 + "|\n", "    " + "word " * 99 + "\n\n"
    item = "- " + "One two three. " * 29 + "\n"
    assert too_long(f"# Page\n{code}{table}{indented}{item}{item}") == []
    assert too_long(f"# Page\n{code}- short\n- {'word ' * 41}\n") == [
        "6: a sentence of 42 words: - word word word word word word word ..."
    ]
    assert too_long("Short.\n\n" + "One two three.\n" * 31) == [
        "3: a paragraph of 93 words: One two three. One two three. One two ..."
    ]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.xfail(strict=False) if page in STILL_TOO_LONG else ()) for page in PAGES],
)
def test_pages_are_in_short_sentences_and_paragraphs(page: str) -> None:
    exceeding = [f"{page}:{each}" for each in too_long((ROOT / page).read_text())]
    assert not exceeding, "\n".join(["split these:", *exceeding])
