"""What the pages say of the house is so, and `make docs` refuses what would lead a reader nowhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sphinx = pytest.importorskip("sphinx")

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OURS = r"(?:bigbatch|comm|trainer|launch|tools|experiments|configs|tests|docs|benchmarks|examples)"


def build_site(root: Path, out: Path) -> tuple[int, list[str]]:
    """Build the pages below root as `make docs` does, but in no colours, which CI=true would bring.

    Returns the exit code, and file and kind of each warning.
    """
    strict = ["-qnEWN", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(out / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *strict, str(root), str(out / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, re.findall(r"^(\S+?)(?::\d+)?: WARNING: .*(\[.*\])$", done.stderr, re.M)


def test_site_is_built_of_what_the_index_names_under_its_headings(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "LICENSE").write_text("text")
    (tmp_path / "README.md").write_text("# House\n[licence](LICENSE), [room](docs/room.md#the-door)\n")
    (tmp_path / "docs/index.md").write_text("# Pages\n## Upstairs\n[room](room.md#the-door), [room](room.md)\n")
    (tmp_path / "docs/room.md").write_text("# Room\n## The door\n[back](../README.md)\n")
    assert build_site(tmp_path, tmp_path / "build") == (0, [])
    page = (tmp_path / "build/site/README.html").read_text()
    assert re.search(
        r'class="caption"[^>]*><span class="caption-text">Upstairs</span>.{,200}docs/room.html', page, re.S
    )
    assert "docs/room" in (tmp_path / "build/site/searchindex.js").read_text()


@pytest.mark.skipif(sphinx.version_info < (8, 2), reason="an older Sphinx, as Python 3.10 has, misses some")
def test_site_takes_dead_ends_for_errors(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# House\n[a](docs/room.md#no-door), [b](LICENSE), [c](docs/room.md)\n")
    (tmp_path / "docs/room.md").write_text("# Room\n[d](nowhere.md), ![e](picture.png)\n")
    (tmp_path / "docs/attic.md").write_text("# Attic\n")
    (tmp_path / "docs/index.md").write_text("# Pages\n## Upstairs\n[room](room.md)\n")
    code, warnings = build_site(tmp_path, tmp_path / "build")
    readme, room, attic = (str(tmp_path / name) for name in ("README.md", "docs/room.md", "docs/attic.md"))
    assert code == 1
    assert sorted(warnings) == sorted(
        [
            (readme, "[myst.xref_missing]"),  # the anchor
            (readme, "[myst.xref_missing]"),  # the file
            (room, "[myst.xref_missing]"),
            (room, "[image.not_readable]"),
            (attic, "[toc.not_included]"),
        ]
    )


def test_readme_is_short_enough_for_a_stranger() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 90
    assert len(re.findall(r"\]\(", text)) <= 25


def test_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)[)#]", (ROOT / "docs/index.md").read_text()))
    assert {path.name for path in ROOT.glob("docs/*.md")} - named == {"index.md"}


def test_files_that_pages_name_in_code_exist() -> None:
    named = {
        (page.relative_to(ROOT), path)
        for page in PAGES
        for path in re.findall(rf"`({OURS}/[\w./-]+)`", page.read_text())
    }
    assert len(named) > 50
    assert {(str(page), path) for page, path in named if not (ROOT / path).exists()} == set()


def test_design_lists_files_to_follow_that_exist_and_counts_them() -> None:
    rows = re.findall(r"^\| an? .*: (\d+) files \| (.*) \|$", (ROOT / "docs/design.md").read_text(), re.M)
    assert len(rows) == 3
    for number, text in rows:
        folders = re.findall(r"`([\w/]+)`: ((?:`\w+`(?:, )?)+)", text)
        files = {f"{folder}/{name}.py" for folder, names in folders for name in re.findall(r"\w+", names)}
        assert {file for file in files if not (ROOT / file).exists()} == set()
        path = re.findall(r"`([\w/]+)`: ((?:`\w+`(?:, )?)+)", text.partition(". ")[0])
        assert sum(names.count("`") // 2 for _, names in path) == int(number), text


def test_design_names_every_room() -> None:
    text = (ROOT / "docs/design.md").read_text()
    rooms = {
        path.parent.relative_to(ROOT)
        for top in ("comm", "trainer", "launch", "tools", "experiments")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert {str(room) for room in rooms if len(room.parts) > 1 and f"`{room}`" not in text} == set()
