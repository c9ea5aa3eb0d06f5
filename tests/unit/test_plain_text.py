"""Pages are short in lines, words, sentences and paragraphs; old words stay out of all files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
RECORDS = sorted((ROOT / "docs/decisions").glob("*.md"))
MAX_LINES = 120
MAX_WORDS = 53_200
"""All pages of docs/, as wc -w counts them, without comments."""
WORDS = {"sentence": 40, "paragraph": 90}
OLD_WORDS = r"(?<![-`\w])(whoever|nobody|whom|of which|nine of ten|quiet line|pictures?)(?![-`\w])"
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


@pytest.mark.parametrize("page", [*PAGES, *(str(path.relative_to(ROOT)) for path in RECORDS)])
def test_pages_are_in_short_sentences_and_paragraphs(page: str) -> None:
    exceeding = [f"{page}:{each}" for each in too_long((ROOT / page).read_text())]
    if "decisions/" in page:  # of a few paragraphs each
        exceeding = [each for each in exceeding if ": a sentence of " in each]
    assert not exceeding, "\n".join(["split these:", *exceeding])


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    num_lines = len(re.sub(r"^<!--.*?-->\n", "", (ROOT / page).read_text(), flags=re.M | re.S).splitlines())
    assert num_lines <= MAX_LINES, f"{page} has {num_lines} lines of {MAX_LINES}: move what few readers need"


def test_pages_have_few_words_together() -> None:
    pages = [(ROOT / page).read_text() for page in PAGES if page.startswith("docs/")]
    num_words = sum(len(re.sub(r"<!--.*?-->", "", page, flags=re.S).split()) for page in pages)
    assert num_words <= MAX_WORDS, f"{num_words} words: say it once, without history and how it was measured"


def test_pages_have_no_old_words() -> None:
    lines = (
        (path, *each)
        for path in [*map(ROOT.joinpath, PAGES), *RECORDS]
        for each in enumerate(re.sub(r"<!--.*?-->", "", path.read_text()).splitlines(), 1)
    )
    assert [f"{path}:{number}: {line}" for path, number, line in lines if re.search(OLD_WORDS, line, re.I)] == []


SOURCES = [
    path
    for room in (
        "bigbatch/*.py",
        *(f"{room}/**/*.py" for room in ("comm", "trainer", "launch", "tools", "experiments")),
    )
    for path in ROOT.glob(room)
] + [path for room in ("benchmarks", "tests") for path in ROOT.glob(f"{room}/**/*.py") if path != Path(__file__)]
SOURCES += [ROOT / name for name in ("Makefile", "Dockerfile", "setup.py", "pyproject.toml", "tests/container/run")]
SOURCES += [path for found in (".ci/*", "configs/**/*.yaml", "examples/*.*") for path in ROOT.glob(found)]
OLD_WORDS_OF_CODE = (
    "whoever",
    "nobody",
    "whom",
    "somebody",
    "nine of ten",
    "quiet line",
    "anew",
    "mend",
    "dotted name",
    '"""of ',
    '"""whose ',
)
QUOTED = {"tests/cluster/test_emulate.py": "nobody"}
"""File -> the old word that it may have: the name of a Unix user."""


def test_code_and_tests_have_no_old_words() -> None:
    """No docstring begins with 'Of', which leaves the reader to guess the noun."""
    found = []
    for path in SOURCES:
        name, text = str(path.relative_to(ROOT)), path.read_text().lower()
        for word in OLD_WORDS_OF_CODE:
            if word in text and word != QUOTED.get(name):  # most files have none: a search in whole files is fast
                ends = re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)" if word[-1] != " " else word, text)
                found += [f"{name}:{text.count(chr(10), 0, each.end()) + 1}: {word}" for each in ends]
    assert found == [], "\n".join(found)
