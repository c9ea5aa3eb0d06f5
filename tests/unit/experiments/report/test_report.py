"""`bigbatch report`: efficiency and its causes by hand, time to accuracy, and pages that stand alone."""

import html.parser
import io
import json
import math
import shutil
import statistics
import xml.etree.ElementTree
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from error_texts import naming
from PIL import Image

from bigbatch.cli import main
from bigbatch.errors import RunFolderError
from bigbatch.experiments.report.collect import RunResults, SweepResults, read_folder, to_accuracy
from bigbatch.experiments.report.plots import draw_accuracy, draw_efficiency
from bigbatch.experiments.report.predictions import PredictedRate, read_predictions, write_predictions
from bigbatch.experiments.report.publish import common_target
from bigbatch.experiments.report.tables import (
    accuracy_table,
    advice,
    doubts,
    doubts_table,
    findings,
    noise_table,
    scaling_table,
)
from bigbatch.launch.efficiency import MeasuredPoint, Step, compare, efficiency_of
from bigbatch.launch.page import make_page
from bigbatch.launch.tables import Table, markdown
from bigbatch.words import percent

GOLDEN = Path(__file__).parents[3] / "golden"
CONFIG = {"batch": {"global_batch_size": 100}, "data": {"loader": "torchvision"}}
NAME = "<script>alert('x')</script> & \"co\""


def train(
    step: int, rate: float, *, wire: float | None, wait: float, stragglers: float | None, **others: Any
) -> dict[str, Any]:
    return {
        "kind": "train",
        "time": 1000.0 + step,
        "step": step,
        "epoch": step / 10,
        "images_per_second": rate,
        "wire_wait_fraction": wire,
        "input_wait_fraction": wait,
        "straggler_fraction": stragglers,
        "energy_joules": None,
        **others,
    }


def write_run(
    folder: Path, records: list[dict[str, Any]], *, batch: int = 100, nodes: int = 1, target: float | None = None
) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"global_batch_size": batch, "num_nodes": nodes, "device": "cpu", "torch": "2", "commit": "abc"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"run": {"target_top1": target, "seed": 0}}))


def write_point(sweep: Path, number: int, values: dict[str, Any], *, state: str = "done", **figures: Any) -> None:
    folder = sweep / f"points/{number}"
    folder.mkdir(parents=True)
    facts = {"number": number, "values": values, "ranks": values["ranks"], "ranks_per_node": 1, "state": state}
    (folder / "point.json").write_text(json.dumps({**facts, "reason": figures.pop("reason", None)}))
    if state == "done":
        batch, rates = figures.pop("batch"), figures.pop("rates")
        start = {"kind": "start", "time": 1000.0, "step": 0, "job": {"world_size": values["ranks"]}}
        reports = [
            train(i + 1, rate, **figures) for i, rate in enumerate([1.0, *rates])
        ]  # the first one does not count
        write_run(folder / "run", [start, *reports], batch=batch, nodes=values["ranks"])


def make_sweep(folder: Path) -> Path:
    """One rank takes 1 s for 100 images: 0.9 s of computing and 0.1 s of waiting for them."""
    folder.mkdir()
    stated = {"name": NAME, "config": "quickstart", "where": "local", "steps": 40}
    stated["options"] = {"data.loader": "synthetic", "comm.overlap": True}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(stated))
    none = {"wire": 0.0, "wait": 0.1, "stragglers": 0.0}
    one = {"batch": 100, "rates": [90.0, 100.0, 110.0], **none}
    write_point(folder, 0, {"scaling": "weak", "ranks": 1}, **one)
    write_point(folder, 1, {"scaling": "strong", "ranks": 1}, **one)
    # 400 images in 1.25 s: 0.9375 computing, 0.125 wire, 0.125 input, 0.0625 stragglers
    weak = {"wire": 0.1, "wait": 0.1, "stragglers": 0.05}
    write_point(folder, 2, {"scaling": "weak", "ranks": 4}, batch=400, rates=3 * [320.0], **weak)
    # 100 images in 0.5 s: 0.275 computing, 0.2 wire, 0.025 input
    strong = {"wire": 0.4, "wait": 0.05, "stragglers": 0.0}
    write_point(folder, 3, {"scaling": "strong", "ranks": 4}, batch=100, rates=3 * [200.0], **strong)
    write_point(folder, 4, {"scaling": "strong", "ranks": 8}, state="failed", reason="out of memory: <b>9 GB</b>")
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return make_sweep(tmp_path / "sweep")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a larger sweep on GPUs that were measured and have a price, with its report.

    Of CUDA graphs only input is split: 300 images take 1 s instead of 0.75, input 0.2 instead of 0.075. Of `alone` the
    point of 1 rank has failed. The point of 4 ranks in weak scaling takes 720 J for the 400 images of a step.
    """
    folder = make_sweep(tmp_path_factory.mktemp("told") / "sweep")
    none: dict[str, Any] = {"wire": None, "stragglers": None}
    write_point(folder, 5, {"scaling": "graph", "ranks": 1}, batch=100, rates=3 * [100.0], wait=0.1, **none)
    write_point(folder, 6, {"scaling": "graph", "ranks": 4}, batch=300, rates=3 * [300.0], wait=0.2, **none)
    alone = {"batch": 100, "rates": 3 * [200.0], "wire": 0.0, "wait": 0.0, "stragglers": 0.0}
    write_point(folder, 7, {"scaling": "alone", "ranks": 1}, state="failed", reason="lost")
    for number, ranks in ((8, 4), (9, 8)):
        write_point(folder, number, {"scaling": "alone", "ranks": ranks}, **alone)
    for summary in folder.glob("points/*/run/summary.json"):
        change(summary, device="NVIDIA H100")
    metrics = folder / "points/2/run/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"energy_joules": null', '"energy_joules": 720.0'))
    with redirect_stdout(io.StringIO()):
        report(folder, "--price", "2.50")
    return folder


def test_a_single_number_of_ranks_has_no_efficiency(sweep: Path) -> None:
    write_point(
        sweep, 7, {"scaling": "single", "ranks": 4}, batch=100, rates=3 * [200.0], wire=0.0, wait=0.1, stragglers=0.0
    )
    report(sweep)
    lines = (sweep / "report/report.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| single |") and "to 200.0" in line)
    assert "100.0%" not in row


@pytest.mark.parametrize("name", ["report.md", "report.json"])
def test_report_is_written_as_in_the_golden_files(name: str, told: Path) -> None:
    """Among others: 4 ranks at 320 images/s take 3125 s for 10^6 images, 3.472 GPU-hours, 8.68 at 2.50 an hour."""
    assert (told / "report" / name).read_text().replace(str(told), "FOLDER") == (GOLDEN / name).read_text()


def report(folder: Path, *options: str) -> dict[str, Any]:
    assert main(["report", str(folder), *options]) == 0
    return dict(json.loads((folder / "report/report.json").read_text()))


# --- figures ---


def test_report_efficiency_and_its_causes_by_hand(told: Path) -> None:
    (rows,) = json.loads((told / "report/report.json").read_text())["sweeps"].values()
    found = {(row["values"]["scaling"], row["ranks"]): row for row in rows}
    assert found["weak", 1]["efficiency"] == found["strong", 1]["efficiency"] == 1
    # weak: 400 / 1.25 s = 320 images/s, 3.2 times as many on 4 ranks
    weak = found["weak", 4]
    assert weak["efficiency"] == pytest.approx(0.8)
    assert weak["losses"] == pytest.approx(
        {
            "slower computing": (0.9375 - 0.9) / 1.25,
            "exposed communication": 0.125 / 1.25,
            "input": (0.125 - 0.1) / 1.25,
            "stragglers": 0.0625 / 1.25,
        }
    )
    # strong: the ideal step takes 0.25 s, 0.225 computing and 0.025 input; the real one takes 0.5
    strong = found["strong", 4]
    assert strong["efficiency"] == pytest.approx(0.5)
    assert strong["losses"] == pytest.approx(
        {
            "smaller local batch": (0.275 - 0.225) / 0.5,
            "exposed communication": 0.2 / 0.5,
            "input": 0,
            "stragglers": 0,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("seed", [0, 3])
def test_report_parts_add_up_exactly(seed: int) -> None:
    def point(ranks: int, batch: int, *parts: float) -> MeasuredPoint:
        named = dict(zip(("computing", "communication", "input", "stragglers"), parts, strict=True))
        return MeasuredPoint((), ranks, ranks, batch, Step(sum(parts), named), (1.0,), 2, None, "cpu")

    base = point(2, 64, 0.5 + seed, 0.1, 0.0, 0.2)
    other = point(6, 60 * (seed + 1), 0.3, 0.05 * seed, 0.4, 0.0)
    found = efficiency_of(other, base)
    assert found.unsplit is None
    assert sum(share or 0.0 for share in found.losses.values()) == pytest.approx(1 - found.efficiency, abs=1e-12)
    assert found.efficiency == pytest.approx((other.rate / 6) / (base.rate / 2))


def test_report_share_of_nearly_nothing_has_no_sign() -> None:
    assert [percent(share) for share in (-0.0004, 0.0004, -0.0006, 0.923)] == ["0.0%", "0.0%", "-0.1%", "92.3%"]


# --- efficiencies that are not a headline ---


def measured(ranks: int, rates: tuple[float, ...], *, device: str = "cpu (1 thread per rank)") -> MeasuredPoint:
    """Return a point of 100 images a rank that only computes."""
    seconds = 100 * ranks / statistics.median(rates)
    parts = {"computing": seconds, "communication": 0.0, "input": 0.0, "stragglers": 0.0}
    return MeasuredPoint((), ranks, ranks, 100 * ranks, Step(seconds, parts), rates, 1, None, device)


ONE = measured(1, (99.0, 100.0, 101.0))
DOUBTED = [
    (measured(2, (1036.0,)), "too few reports (2 ranks: 1 report, not 3 or more)"),
    (
        measured(2, (150.0, 151.0, 152.0), device="cpu (2 threads per rank)"),
        "other devices or threads per rank (1 rank: cpu (1 thread per rank), 2 ranks: cpu (2 threads per rank))",
    ),
    # quartiles 90 and 150 beside a median of 120
    (measured(2, (60.0, 120.0, 180.0)), "a busy machine (2 ranks: half of the reports lie 50.0% apart)"),
    (measured(2, (322.0, 322.0, 322.0)), "more than perfect (the machine was busy at 1 rank, or"),
]


@pytest.mark.parametrize(("point", "why"), DOUBTED)
def test_report_efficiency_in_doubt_is_no_headline(point: MeasuredPoint, why: str) -> None:
    found = compare([ONE, point])
    (told,) = findings(found, name=None)
    assert told.startswith("all: no efficiency is stated for 2 ranks, as it is in doubt: ")
    assert why in told
    assert "times as fast" not in told
    assert percent(found[1].efficiency) not in told
    table = scaling_table(found, name=None, is_gpu=False, price=None)
    base, doubted = (dict(zip(table.head, row, strict=True)) for row in table.rows)
    assert doubted["efficiency"].endswith("% ?")
    assert base["efficiency"] == "100.0%"
    reasons = doubts_table(found, name=None, rerun=str)
    assert why in reasons.rows[0][1]


def test_report_names_the_point_that_is_to_be_measured_again() -> None:
    for point, again in (
        (measured(2, (180.0, 180.0)), "take more steps, or lower run.log_every_steps"),
        (measured(2, (180.0,) * 3, device="gpu"), "state compute.cpu_threads in options, or take the same devices"),
        (measured(2, (60.0, 120.0, 180.0)), "measure 2 ranks again: do 2"),  # it is restless
        (measured(2, (322.0, 322.0, 322.0)), "measure 1 rank again: do 1"),  # 161%: the one beside it was disturbed
    ):
        assert advice(compare([ONE, point])[1], rerun=lambda point: f"do {point.ranks}") == again


def test_report_headline_is_the_largest_point_that_can_be_stated() -> None:
    found = compare([ONE, measured(2, (180.0, 180.0, 180.0)), measured(4, (2000.0,))])
    stated, doubted = findings(found, name=None)
    assert stated.startswith("all: 2 ranks on 2 nodes train 1.80 times as fast as 1 (90.0% efficiency).")
    assert "for 4 ranks" in doubted


def test_report_without_doubts_has_no_table_of_them() -> None:
    found = compare([ONE, measured(2, (209.0, 209.0, 209.0))])
    assert doubts(found[1]) == [], "as it varies, 104.5% is perfect"
    assert doubts_table(found, name=None, rerun=str).rows == ()


def test_report_plot_leaves_out_what_is_in_doubt() -> None:
    (axes,) = draw_efficiency(compare([ONE, measured(2, (180.0,) * 3), measured(4, (2000.0,))]), name=None).axes
    line = axes.get_lines()[1]  # after the ideal one
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == pytest.approx([100, 90])
    assert axes.get_ylim()[1] < 110
    assert axes.get_title().endswith("(without 1 point in doubt)")


def test_plot_of_efficiency_has_a_band_over_reports_the_ideal_line_and_the_recorded_prediction(tmp_path: Path) -> None:
    points = [replace(ONE, numbers=(0,)), replace(measured(2, (160.0, 180.0, 190.0)), numbers=(1,))]
    rates = {0: PredictedRate(100.0, 99.0, 101.0), 1: PredictedRate(190.0, 170.0, 196.0)}
    write_predictions(tmp_path, rates, cluster="emulated")
    (axes,) = draw_efficiency(compare(points), name=None, predicted=read_predictions(tmp_path)).axes
    ideal, measured_line, predicted, *_ = axes.get_lines()
    assert (ideal.get_label(), list(ideal.get_ydata())) == ("ideal", [100, 100])
    assert list(measured_line.get_ydata()) == pytest.approx([100, 90])
    assert list(predicted.get_ydata()) == pytest.approx([100, 95])
    band, interval = (np.concatenate([path.vertices for path in each.get_paths()]) for each in axes.collections[:2])
    assert {round(y, 6) for x, y in band if x == 2} == {80.0, 95.0}, "lowest and highest report"
    assert {round(y, 6) for x, y in interval if x == 2} == {85.0, 98.0}


@pytest.mark.parametrize("damage", ["[", "{}", '{"points": {"0": {"rate": 1}}}', '{"points": {"a": {}}}'])
def test_damaged_predictions_name_their_file(tmp_path: Path, damage: str) -> None:
    (tmp_path / "predicted.json").write_text(damage)
    with pytest.raises(RunFolderError, match=naming("predicted.json is not readable", "--predict")):
        read_predictions(tmp_path)


# --- as people read it ---


def test_report_text_of_runs_is_neither_markup_nor_a_control_sequence_in_its_pages() -> None:
    text = "[a](javascript:b) \\[c](d) <e>|f\x1b[31m"
    told = "\\[a](javascript:b) \\\\\\[c](d) &lt;e&gt;\\|f\\\\x1b\\[31m"
    assert markdown(Table(text, (text,), ((text,),))).splitlines() == [
        f"## {told}",
        "",
        *(f"| {each} |" for each in (told, "---", told)),
    ]
    page = make_page(title=text, findings=[text], images={}, tables=[Table(text, (text,), ((text,),))], note=None)
    assert "\x1b" not in page
    assert page.count("&lt;e&gt;|f\\x1b[31m") == 6


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_report_nodes_are_those_of_the_run(sweep: Path) -> None:
    change(sweep / "points/2/run/summary.json", num_nodes=3)
    found = read_folder(sweep)
    assert isinstance(found, SweepResults)
    assert {(dict(each.variant)["scaling"], each.ranks): each.nodes for each in found.measured}["weak", 4] == 3


def test_report_states_no_efficiency_between_two_modes(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The point of 4 ranks in weak scaling was captured, the one of 1 rank was not; strong scaling has one mode."""
    config = sweep / "points/2/run/config.yaml"
    compute = {"compile": "default", "cuda_graph": True}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"compute": compute}))
    found = read_folder(sweep)
    assert isinstance(found, SweepResults)
    relative = {
        (each.point.ranks, *dict(each.point.variant).values()): each.base.ranks for each in compare(found.measured)
    }
    assert relative == {
        (1, "weak", "eager"): 1,
        (4, "weak", "compiled, CUDA graph"): 4,
        (1, "strong"): 1,
        (4, "strong"): 1,
    }
    assert not any(each.lacks_base for each in compare(found.measured))
    facts = report(sweep)
    told = capsys.readouterr().out
    assert "weak, compiled, CUDA graph: measured on 4 ranks alone, which says nothing about scaling." in told
    assert "The points are not comparable: mode differs (compiled, CUDA graph; eager)." in told
    assert {
        row["ranks"]: row["efficiency"] for row in facts["sweeps"][str(sweep)] if row["values"]["scaling"] == "weak"
    }[4] == 1


def test_report_has_the_mode_in_which_a_run_continued(sweep: Path) -> None:
    """The point of 4 ranks could not compile, whatever its config states; an older record has no mode."""
    for number in (0, 2):
        config = sweep / f"points/{number}/run/config.yaml"
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"compute": {"compile": "default"}}))
    metrics = sweep / "points/2/run/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"world_size": 4', '"world_size": 4, "mode": "eager"'))
    found = read_folder(sweep)
    assert isinstance(found, SweepResults)
    modes = {each.ranks: dict(each.variant).get("mode") for each in found.measured if "weak" in str(each.variant)}
    assert modes == {1: "compiled", 4: "eager"}
    assert found.conditions["mode"] == "DIFFER: compiled; eager"


@pytest.mark.long
def test_report_tells_two_sweeps_apart_by_their_folders(sweep: Path, tmp_path: Path) -> None:
    other = tmp_path / "other$-x$"
    shutil.copytree(sweep, other)
    (link := tmp_path / "link").symlink_to(sweep)
    assert main(["report", str(sweep), str(other), str(sweep), str(link), "--output", str(sweep / "report")]) == 0
    facts = json.loads((sweep / "report/report.json").read_text())
    assert list(facts["sweeps"]) == [str(sweep), str(other)]
    assert [told[0] for told in facts["unmeasured"]] == [str(sweep), str(other)]
    assert {f"{folder}: config" for folder in (sweep, other)} <= set(facts["conditions"])
    text = (sweep / "report/report.md").read_text()
    for folder in (sweep, other):
        assert f"## Speed and efficiency: {folder}\n" in text
        assert f"## What is lost, as shares of the step: {folder}\n" in text
        assert f"{folder}: weak: 4 ranks on 4 nodes train" in text


def test_report_of_a_run_says_its_newest_noise_scale(tmp_path: Path) -> None:
    figures = {"noise_scale": 1130.0, "noise_scale_low": 900.0, "noise_scale_high": None}
    early, none = {**figures, "noise_scale": 10.0}, dict.fromkeys(figures)
    reports = [{"kind": "train", "step": step, **each} for step, each in enumerate((none, early, figures), start=1)]
    write_run(tmp_path / "run", [*RECORDS, *reports, {"kind": "train", "step": 9, **none}])
    write_run(tmp_path / "other", RECORDS)
    runs = [read_folder(tmp_path / name) for name in ("run", "other")]
    assert noise_table(runs).rows == ((str(tmp_path / "run"), "1,130 (900 to no bound)"),)


# --- files ---


class Page(html.parser.HTMLParser):
    """Tags, and what they load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action") and not (value or "").startswith("#"):
                self.loads.append(str(value))


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_figures")
def test_report_page_stands_alone_beside_its_plots(sweep: Path) -> None:
    report(sweep)
    text = (sweep / "report/report.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert "script" not in page.tags, "text of files is escaped"
    assert "b" not in page.tags
    assert page.tags.count("svg") == 2
    assert "@import" not in text
    assert "url(http" not in text
    assert "80.0% efficiency" in text
    for name in ("efficiency", "split"):
        with Image.open(sweep / f"report/{name}.png") as image:
            assert image.size[0] > 500
        root = xml.etree.ElementTree.parse(sweep / f"report/{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_report_of_a_sweep_without_figures_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.yaml").write_text("name: none\n")
    write_point(tmp_path, 0, {"ranks": 2}, batch=10, rates=[], wire=0.0, wait=0.0, stragglers=0.0)
    write_point(tmp_path, 1, {"ranks": 4}, state="pending")
    report(tmp_path)
    printed = capsys.readouterr().out
    assert "fewer than 2 log records: raise steps, or lower run.log_every_steps" in printed
    assert "pending" in printed


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "x is not a folder: name the folder of a sweep or a run"),
        (lambda path: path.mkdir(), "x holds neither a sweep (sweep.yaml) nor a run"),
        (lambda path: write_sweep(path, "["), "sweep.yaml is not readable"),
        (lambda path: write_sweep(path, aliases_of_aliases(9)), "sweep.yaml is not readable: &a0: "),
        (lambda path: write_sweep(path, "[]"), "sweep.yaml holds no keys and values"),
    ],
)
def test_report_refuses_other_folders(
    make: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The catalogue of this room's messages: elsewhere only what they name is asked."""
    make(tmp_path / "x")
    assert main(["report", str(tmp_path / "x")]) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def aliases_of_aliases(levels: int) -> str:
    """Return YAML of some hundred bytes whose last value would have 10 ** levels items."""
    tens = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(["a0: &a0 [x]", *tens, f"name: *a{levels - 1}"])


def write_sweep(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "sweep.yaml").write_text(text)


def reports_at(rate: float) -> str:
    lines = [json.dumps(train(step, rate, wire=0, wait=0, stragglers=0)) for step in (1, 2)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("run/summary.json", "{}", "its files are damaged: 'global_batch_size' is missing"),
        ("run/summary.json", "{", "summary.json is not readable"),
        ("run/metrics.jsonl", "7\n{}\n", "fewer than 2 log records"),
        ("run/metrics.jsonl", 2 * '{"kind": "train", "wire_wait_fraction": null}\n', "a report without its step"),
        *(("run/metrics.jsonl", reports_at(rate), "a valid rate") for rate in (10**400, 0.0, math.nan)),
        ("run/config.yaml", json.dumps(CONFIG | {"compute": {"cuda_graph": None}}), "its files are damaged: TypeError"),
        ("point.json", "{", "point.json is not readable"),
        ("point.json", '{"state": "done", "number": 3, "values": {"ranks": 0}, "ranks": 0}', "0 ranks"),
        ("point.json", '{"state": "failed", "number": 3, "reason": {"a": 1}}', "point.json is not readable"),
    ],
)
def test_report_tells_of_a_damaged_point_and_has_the_others(file: str, text: str, why: str, sweep: Path) -> None:
    (sweep / "points/3" / file).write_text(text)
    found = read_folder(sweep)
    assert isinstance(found, SweepResults)
    measured = {(dict(each.variant)["scaling"], each.ranks) for each in found.measured}
    assert measured == {("weak", 1), ("weak", 4), ("strong", 1)}
    assert any(why in told for _, told in found.unmeasured), found.unmeasured


@pytest.mark.slow
def test_report_tells_of_points_that_do_not_compare(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep / "points/2/run/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cpu (1 thread per rank)"}))
    report(sweep)
    told = "The points are not comparable: device differs (cpu; cpu (1 thread per rank))."
    assert told in capsys.readouterr().out
    assert told in (sweep / "report/report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_figures")
def test_report_values_are_no_mathematics_and_no_markup(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("name: odd\n")
    for number, ranks in enumerate((1, 2)):
        values = {"run.directory": "x$a$b$\\frac{$ | <b>\n# top", "ranks": ranks}
        write_point(tmp_path, number, values, batch=10, rates=[5.0], wire=0.0, wait=0.0, stragglers=0.0)
    report(tmp_path)
    text = (tmp_path / "report/report.md").read_text()
    assert "<b>" not in text
    assert "\n# top" not in text
    assert "\\| &lt;b&gt; # top" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("target", value) for value in ("75.9", "0", "-1", "nan")] + [("price", value) for value in ("0", "-1", "inf")],
)
def test_report_target_is_a_share_and_price_a_number(
    option: str, value: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(sweep), f"--{option}={value}"]) == 1
    assert f"--{option} {value}" in capsys.readouterr().err


# --- runs ---

HOUR = 3600.0


def evaluation(hour: float, top1: float, step: int) -> dict[str, Any]:
    return {"kind": "eval", "time": HOUR * hour, "step": step, "epoch": step / 10, "top1": top1}


def start(hour: float, ranks: int, device: str = "NVIDIA H100") -> dict[str, Any]:
    return {"kind": "start", "time": HOUR * hour, "step": 0, "job": {"world_size": ranks, "device": device}}


def passed(hour: float, joules: float | None = None) -> dict[str, Any]:
    return {"kind": "train", "time": HOUR * hour, "step": 1, "energy_joules": joules}


RECORDS = [
    *(start(10, 8), passed(11, 3.6e6), evaluation(11.5, 0.5, 10)),
    # ended, and continued five hours later on twice the GPUs
    *(start(16.5, 16), passed(17, 1.8e6), evaluation(17.5, 0.75, 20), evaluation(18.5, 0.7, 30)),
]


def test_report_reads_no_run_for_a_target_that_a_folder_states() -> None:
    run = Mock(spec=RunResults, target=None)
    assert common_target([Mock(spec=SweepResults, target=0.9), run]) == 0.9
    run.to_accuracy.assert_not_called()


def test_report_time_to_accuracy_leaves_out_the_time_between_two_starts() -> None:
    found = to_accuracy(RECORDS, target=0.75)
    assert found.reached is not None
    assert (found.reached.step, found.reached.hours) == (20, 2.5)
    assert found.reached.rank_hours == 1.5 * 8 + 1 * 16
    assert found.reached.joules == 5.4e6
    assert found.is_gpu


def test_report_target_that_was_not_reached() -> None:
    found = to_accuracy(RECORDS, target=0.76)
    assert found.reached is None
    assert found.shown is found.best
    assert found.best is not None
    assert found.best.top1 == 0.75
    assert to_accuracy(RECORDS, target=None).target == 0.75
    assert to_accuracy([start(1, 1, "cpu (1 thread per rank)")], target=0.5).shown is None


def test_report_has_no_column_of_unknown_energy() -> None:
    untold, told = (
        to_accuracy([start(0, 1), passed(1, joules), evaluation(2, 0.5, 1)], target=0.5) for joules in (None, 3.6e6)
    )
    assert "energy" not in accuracy_table([(Path("a"), untold)], price=None).head
    rows = accuracy_table([(Path("a"), untold), (Path("b"), told)], price=None).rows
    assert [row[-1] for row in rows] == ["not reported by a driver", "1.0000 kWh"]


def test_report_of_a_short_run_on_a_cpu_has_minutes_and_no_cost() -> None:
    records = [start(0, 2, "cpu (1 thread per rank)"), evaluation(0.05, 0.5, 1), evaluation(0.1, 0.75, 2)]
    found = to_accuracy(records, target=None)
    table = accuracy_table([(Path("a"), found)], price=None)
    assert dict(zip(table.head, table.rows[0], strict=True)) == {
        "run": "a",
        "top-1": "75.00 %",
        "target": "its best",
        "epoch": "0.2",
        "time": "6.0 min",
        "energy": "0.0000 kWh",
    }
    (line,) = draw_accuracy([("a", found)]).axes[0].lines
    assert (line.axes.get_xlabel(), list(line.get_xdata())) == ("minutes", [3.0, 6.0])
    (row,) = accuracy_table([(Path("a"), to_accuracy(records, target=0.4))], price=10).rows
    assert row[2:6] == ("40.00 %", "0.1", "3.0 min", "0.100 hours of a rank on a CPU, 1.00 at 10 an hour")
    (row,) = accuracy_table([(Path("a"), to_accuracy(records, target=0.5))], price=None).rows
    assert row[1:3] == ("50.00 %", "50.00 %"), "reached exactly, and not its best"


@pytest.mark.long
@pytest.mark.usefixtures("rendered_figures")
def test_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", RECORDS, target=0.75)
    facts = report(tmp_path / "run")
    assert facts["runs"][str(tmp_path / "run")]["reached"]["hours"] == 2.5
    printed = capsys.readouterr().out
    assert "energy" in printed
    assert "reached 75.0% top-1 after 2.50 h, 28.000 GPU-hours." in printed
    assert "1.5000 kWh" in printed
    assert main(["report", str(tmp_path / "run"), "--target", "0.8"]) == 0
    assert "did not reach 80.0%; its best is 75.0% top-1" in capsys.readouterr().out
    report(tmp_path / "run", "--price", "2.50")
    assert "after 2.50 h, 28.000 GPU-hours, 70.00 at 2.5 an hour." in capsys.readouterr().out
    assert (tmp_path / "run/report/accuracy.png").stat().st_size > 1000
