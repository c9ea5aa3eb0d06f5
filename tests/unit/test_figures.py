"""Pages have the figures of their records, and records their commits."""

import csv
import hashlib
import json
import re
import statistics
import subprocess
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import figures as figures_of_pages
import figures_age
import pytest
from figures import FILES, figures, without_record
from figures_age import PAGES, commits

from bigbatch.tools.simulate.interval import FACTORS, UNCHECKED_REACH
from bigbatch.trainer.report.ending import closing_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def read_table(name: str) -> list[dict[str, str]]:
    with (ROOT / f"benchmarks/results/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def history() -> set[str]:
    """The commits of this copy of the sources."""
    log = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {line[:12] for line in log.stdout.split()}


def test_figures_are_those_of_their_records() -> None:
    found = [(path, shown, expected) for path in FILES for _, shown, expected in figures(path.read_text())]
    assert len(found) > 800
    other = [f"{path.relative_to(ROOT)}: {shown}: {expected}" for path, shown, expected in found if shown != expected]
    assert not other, "\n".join(["make figures writes what the records have:", *other])


def test_figures_are_written_in_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures_of_pages.Row(rate=1234.56, error=2.649e-8, rows=[figures_of_pages.Row(model="a", times=0.5)])
    monkeypatch.setattr(figures_of_pages, "record", {"some-cpu": found}.__getitem__)
    for before, after in (
        (
            "ResNet-18: 9.00 in `x 1`<!--= some-cpu: rate -->, 9",
            "ResNet-18: 1,234.56 in `x 1`<!--= some-cpu: rate -->, 9",
        ),
        ("[-9.1](a-9.md)<!--= some-cpu: rows[0].times - 2 -->", "[-1.5](a-9.md)<!--= some-cpu: rows[0].times - 2 -->"),
        ("9e-08<!--= some-cpu: error -->", "3e-8<!--= some-cpu: error -->"),
        (
            "| batch 9 | 9 | 7.0 (0.1) |\n<!--= some-cpu: [rate, None, [find(rows, model='a').times]] -->",
            "| batch 9 | 1,235 | 7.0 (0.5) |\n<!--= some-cpu: [rate, None, [find(rows, model='a').times]] -->",
        ),
    ):
        assert figures_of_pages.written(before) == after
    with pytest.raises(AssertionError, match="fewer figures than values"):
        figures_of_pages.written("nothing<!--= some-cpu: rate -->")


def test_measurements_have_a_record() -> None:
    found = [f"{path.relative_to(ROOT)}: {each}" for path in PAGES for each in without_record(path.read_text())]
    assert not found, "\n".join(["no marker <!--= RECORD: EXPRESSION --> takes these from a record:", *found])


def test_last_lines_of_the_quick_start_are_those_of_its_record() -> None:
    block = (ROOT / "README.md").read_text().partition("`make train` ends with:\n\n")[2].partition("\n\n")[0]
    summary = record("quickstart-2cores")["summaries"][0]
    assert textwrap.dedent(block).splitlines() == closing_lines(summary, Path("runs/quickstart"), num_classes=10)


def test_each_record_names_a_commit() -> None:
    named = {path.stem: list(commits(json.loads(path.read_text()))) for path in RESULTS.glob("*.json")}
    assert [name for name, found in named.items() if not found] == []
    unclean = {name for name, found in named.items() if not all(re.fullmatch("[0-9a-f]{12}", each) for each in found)}
    assert not unclean


def test_commits_of_records_are_in_the_history() -> None:
    """Measure at a commit that is on the main branch already: one that is rebased later leaves the history."""
    if "78985a8faaf9" not in history():
        pytest.skip("this copy of the sources has no history, or a part of it")
    found = {path.stem: set(commits(json.loads(path.read_text()))) for path in RESULTS.glob("*.json")}
    assert [name for name, named in found.items() if not named <= history()] == []


def test_age_of_a_figure_is_the_share_of_its_code_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_age, "ROOT", tmp_path)
    for name, lines in (("one.py", 6), ("two.py", 4)):
        (tmp_path / name).write_text("".join(f"{name} = {line}\n" for line in range(lines)))
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for step in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "first")):
        figures_age.git(*step)
    first = figures_age.git("rev-parse", "HEAD").strip()
    assert figures_age.new_share(first, ["one.py", "two.py"]) == 0.0
    (tmp_path / "two.py").write_text("two = 0\n" * 5)
    assert figures_age.new_share(first, ["one.py", "two.py"]) == 5 / 11


def test_command_that_measures_again_is_found() -> None:
    own = figures_age.command_of("quickstart-2cores", record("quickstart-2cores"))
    assert own == record("quickstart-2cores")["command"]
    for name, module in (
        ("recompute-cpu", "gpu.recompute"),  # of a page
        ("comm-scaling-resnet50-1gbit-2", "comm.run"),
        ("prototypes-cpu", "gpu.suite.prototypes"),  # of the Makefile
        ("input-s3-latency", "input.s3_latency"),  # of a docstring
    ):
        command = str(figures_age.command_of(name, {}))
        assert command.startswith(f"python -m benchmarks.{module} ")
        assert "benchmarks/__init__.py" in figures_age.code_of(command)
    assert figures_age.command_of("checkpoints", {}) is None
    assert figures_age.command_of("none", {"commands": ["bigbatch a", "bigbatch b"]}) == "bigbatch a; bigbatch b"
    assert "examples/language_model.py" in figures_age.code_of("python examples/language_model.py --cell CELL")


def test_each_record_names_what_measures_it_again_or_the_commit_of_its_script() -> None:
    scripts = {}
    for path in RESULTS.glob("*.json"):
        found = record(path.stem)
        if command := figures_age.command_of(path.stem, found):
            assert figures_age.code_of(command), f"{path.name}: no code of {command}"
        else:
            scripts[path.stem] = found["script"]
    assert len(scripts) < 10, "measure by a command of today, or delete the figure"
    if "78985a8faaf9" in history():
        for name, script in scripts.items():
            assert figures_age.git("cat-file", "-t", script) == "blob\n", name


def test_each_record_has_a_figure_on_a_page() -> None:
    text = "".join(path.read_text() for path in FILES)
    unused = [path.stem for path in RESULTS.glob("*.json") if not re.search(rf"{path.stem}(?![\w-])", text)]
    assert unused == []


def test_intervals_have_the_widths_of_the_record_and_hold_for_new_families_over_each_carrier() -> None:
    found = record("simulate-published")
    below, above = UNCHECKED_REACH
    names = {"ladder": "same_system", "stranger": "other_system"}  # of an earlier release
    widths = {names.get(key, key): width for key, width in found["widths"].items()}
    assert widths == pytest.approx({**FACTORS, "below": below, "above": above}, abs=0.005)
    summary = found["summaries"]["left out"]
    assert 0.85 <= summary["held by the band"] <= 0.95
    for name, carrier in summary["carriers"].items():
        assert 0.85 <= round(carrier["held"], 2) <= 0.955, name


def test_outcomes_are_those_of_the_predictions_that_were_committed_first() -> None:
    promised, found = record("simulate-unseen"), record("simulate-unseen-outcomes")
    assert found["promised"] == {key: promised[key] for key in ("sha256", "commit")}
    lines = [",".join((name, *values)) for name, values in promised["predictions"].items()]
    text = "\n".join(("id,ms_per_step,low,high,extrapolated,scaled_from", *lines, ""))
    assert hashlib.sha256(text.encode()).hexdigest() == promised["sha256"]
    assert found["rows"].keys() == promised["predictions"].keys()
    asked, answered = (read_table(f"simulate-unseen-{name}") for name in ("questions", "answers"))
    others = dict.fromkeys(("role", "ms_per_step", "images_per_second"))
    assert [row | others for row in answered] == [row | others for row in asked]
    assert {row["id"]: float(row["ms_per_step"]) for row in answered} == {
        name: row["measured"] for name, row in found["rows"].items()
    }
    for name, row in found["rows"].items():
        assert [row[key] for key in ("predicted", "low", "high")] == list(map(float, promised["predictions"][name][:3]))
    held = [row["low"] <= row["measured"] <= row["high"] for row in found["rows"].values()]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in found["rows"].values()]
    assert found["summaries"]["all"]["held"] == pytest.approx(statistics.fmean(held), abs=1e-3)
    assert found["summaries"]["all"]["ours"] == pytest.approx(statistics.median(errors), abs=1e-4)
