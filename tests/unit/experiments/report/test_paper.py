"""A paper's table, from its sweep to LaTeX, as its author changes the sweep: with real, tiny trainings."""

import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import CHROMIUM, faults
from tiny_training import TINY, bigbatch

from bigbatch.cli import main
from bigbatch.experiments import sweep
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.trainer.datasets.generated import write_dataset

BATCH = "batch.global_batch_size"
RATES = {"lars": 2.0, "lamb": 0.01, "sgd": 0.1, "adamw": 0.01}
DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs}
\begin{document}
\thispagestyle{empty}
%s
\end{document}
"""


def table_of(latex: str) -> list[list[str]]:
    """Parse a tabular strictly: each row has as many cells as the columns that it declares, and no macro but \\pm."""
    lines = latex.strip().splitlines()
    columns = re.fullmatch(r"\\begin\{tabular\}\{(l+r+)\}", lines[1])
    assert columns
    assert (lines[2], lines[4], *lines[-2:]) == (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")
    rows = [line for line in lines[3:-2] if line != r"\midrule"]
    assert all(line.endswith(r" \\") and "\\" not in line.removesuffix(r" \\").replace(r"$\pm$", "") for line in rows)
    cells = [[cell.strip() for cell in line.removesuffix(r" \\").split("&")] for line in rows]
    assert {len(row) for row in cells} == {len(columns[1])}
    return cells


@pytest.mark.long
@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_table_of_a_paper_grows_and_is_typeset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four optimizers, two batches, three seeds; then another rate, another case and another seed."""
    write_dataset(tmp_path / "data", train_per_class=4, val_per_class=10, side_pixels=(20, 24))
    without = ("data.loader", "data.num_synthetic_samples", BATCH)
    options = {key: value for key, value in TINY.items() if key not in without}
    options |= {"data.root": str(tmp_path / "data"), "data.loader": "torchvision", "run.checkpoint_every_steps": 0}
    file, folder, ran = tmp_path / "paper.yaml", SweepFolder(tmp_path / "out"), list[int]()
    content: dict[str, Any] = {
        "config": "quickstart",
        "options": options,
        "epochs": 2,
        "seeds": 3,
        "cases": {name: {"optimizer.name": name, "schedule.base_lr": rate} for name, rate in RATES.items()},
        "grid": {BATCH: [16, 32]},
    }

    def train(plan: Any, points: Any, folder: SweepFolder, *, on_end: Any, **_: Any) -> None:
        for point in points:
            folder.write_config(point)
            done = bigbatch("train", "--config", str(folder.config(point.number)))
            assert done.returncode == 0, done.stdout + done.stderr
            ran.append(point.number)
            on_end(point, folder.change_state(point.number, state="done"))

    def go(**changes: Any) -> int:
        ran.clear()
        content.update(changes)
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        assert main(["sweep", str(file), "--folder", str(folder.path)]) == 0
        return len(ran)

    monkeypatch.setattr(sweep, "run_points", train)
    assert go() == 24
    assert go(cases=content["cases"] | {"sgd": {"optimizer.name": "sgd", "schedule.base_lr": 0.05}}) == 6
    assert go(cases=content["cases"] | {"lion": {"optimizer.name": "lion", "schedule.base_lr": 0.001}}) == 6
    assert go(seeds=4) == 10
    assert go() == 0
    assert main(["report", "--pivot", f"optimizer.name,{BATCH}", str(folder.path)]) == 0
    latex = (folder.path / "report/pivot.tex").read_text()
    head, *rows = table_of(latex)
    assert head == ["optimizer", "global batch size 16", "global batch size 32"]
    assert {row[0] for row in rows} == {*RATES, "lion"}
    for name, *cells in rows:
        for batch, cell in zip((16, 32), cells, strict=True):
            found = [100 * last_top1(folder, n) for n in folder.numbers() if is_of(folder, n, name, batch)]
            assert len(found) == 4
            mean, deviation = statistics.fmean(found), statistics.stdev(found)
            assert cell == rf"{mean:.2f} $\pm$ {deviation:.2f} (n = 4)"
    if pdflatex := shutil.which("pdflatex"):
        (tmp_path / "page.tex").write_text(DOCUMENT % latex)
        argv = [pdflatex, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "page.tex"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout
        assert not re.search("Overfull|Undefined|Missing", done.stdout)
    for width in (1280, 400) if CHROMIUM else ():
        assert faults(folder.path / "report/report.html", width=width) == ""


def is_of(folder: SweepFolder, number: int, name: str, batch: int) -> bool:
    state = folder.read_state(number)
    return state["index"] is not None and state["values"] == {"case": name, BATCH: batch}


def last_top1(folder: SweepFolder, number: int) -> float:
    records = [json.loads(line) for line in folder.run(number).metrics.read_text().splitlines()]
    return float([each for each in records if each["kind"] == "eval"][-1]["top1"])
