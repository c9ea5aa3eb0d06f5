"""The names that `import bigbatch` offers: all load, `dir` lists them, and the page says how stable each is."""

import re
from pathlib import Path

import bigbatch

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_are_listed_and_load() -> None:
    assert set(bigbatch.__all__) <= set(dir(bigbatch))
    assert {name: getattr(bigbatch, name).__name__ for name in bigbatch.__all__} == {n: n for n in bigbatch.__all__}


def test_public_names_all_stand_on_their_page_with_their_stability() -> None:
    table = (ROOT / "docs/python.md").read_text().split("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|.*\| (\S.*) \|$", table, re.M)
    assert sorted(name.strip("`") for names, _ in rows for name in names.split(", ")) == sorted(bigbatch.__all__)
    assert {stability for _, stability in rows} <= {"stable", "may change"}


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == bigbatch.__version__
