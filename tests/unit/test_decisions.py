"""The index of decisions lists each record once, by its own title."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs/decisions"
MOST = 71


def test_index_lists_every_decision_by_its_title() -> None:
    listed = dict(re.findall(r"^- \[\d{3}\]\((\S+)\) (.+)$", (FOLDER / "README.md").read_text(), re.M))
    titles = {path.name: path.read_text().splitlines()[0].removeprefix("# ") for path in FOLDER.glob("[0-9]*.md")}
    assert listed == titles
    assert len(titles) < MOST, "merge two records, or remove one whose subject is gone"
