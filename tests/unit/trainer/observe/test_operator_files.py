"""Files for operators: figures in Prometheus' format, events with reasons, and a dashboard that asks for them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from bigbatch.cli import main
from bigbatch.errors import DataError, NotFinite, PeerLostError
from bigbatch.trainer.observe.operator_files import METRICS, OperatorFiles, exposition
from bigbatch.trainer.report.job_figures import LOST, JobFigures

LINE = re.compile(r'([a-zA-Z_:][\w:]*)\{run="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)')
"""A sample in Prometheus' text format 0.0.4 with one label."""


def parsed(text: str) -> dict[str, float]:
    """Read the format by its rules: HELP and TYPE precede the samples of a name, each name once, a last line end."""
    assert text.endswith("\n")
    values: dict[str, float] = {}
    lines = text.splitlines()
    for help_line, type_line, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        found = LINE.fullmatch(sample)
        assert found, sample
        assert help_line.startswith(f"# HELP {found[1]} ")
        assert type_line in (f"# TYPE {found[1]} gauge", f"# TYPE {found[1]} counter")
        assert found[1].endswith("_total") == type_line.endswith("counter")
        assert found[1] not in values
        values[found[1]] = float(found[3])
    return values


def files(folder: Path, **how: Any) -> OperatorFiles:
    config = SimpleNamespace(run=SimpleNamespace(directory=str(folder)))
    plan, communicator = SimpleNamespace(first_step=0, num_steps=90), SimpleNamespace(rank=0, world_size=4)
    observed = {
        "config": config,
        "plan": plan,
        "communicator": communicator,
        "figures": JobFigures(),
        "say": MagicMock(),
    }
    return OperatorFiles(SimpleNamespace(**observed | how))  # type: ignore[arg-type]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


RECORD = {
    "step": 20,
    "epoch": 0.5,
    "loss": 2.25,
    "images_per_second": 1234.5,
    "input_wait_fraction": 0.125,
    "exposed_communication_fraction": None,
}


def test_metrics_hold_the_newest_figures(tmp_path: Path) -> None:
    watch = files(tmp_path)
    watch.start(iter(()))
    watch.at_report(RECORD)
    watch.at_evaluation({"top1": 0.75}, MagicMock())
    watch.at_checkpoint(tmp_path / "c", step=20, seconds=1.5)
    found = parsed((tmp_path / "metrics.prom").read_text())
    assert found.pop("bigbatch_report_timestamp_seconds") > 1.7e9
    assert found.pop("bigbatch_checkpoint_timestamp_seconds") > 1.7e9
    assert found == {
        "bigbatch_running": 1,
        "bigbatch_ranks": 4,
        "bigbatch_step": 20,
        "bigbatch_planned_steps": 90,
        "bigbatch_epoch": 0.5,
        "bigbatch_loss": 2.25,
        "bigbatch_top1_ratio": 0.75,
        "bigbatch_images_per_second": 1234.5,
        "bigbatch_input_wait_ratio": 0.125,
        "bigbatch_rank_losses_total": 0,
        "bigbatch_rank_joins_total": 0,
        "bigbatch_checkpoint_step": 20,
    }, "figures that were not measured are left out"


def test_events_have_reason_and_exit_code(tmp_path: Path) -> None:
    figures = JobFigures()
    first = files(tmp_path, figures=figures)
    first.start(iter(()))
    first.at_report(RECORD)
    first.at_checkpoint(tmp_path / "c", step=20, seconds=1.5)
    first.ended(PeerLostError("rank 3 on n1 was lost"), stopped_by=None)
    figures.count(LOST)
    second = files(tmp_path, figures=figures, communicator=SimpleNamespace(rank=0, world_size=3))
    second.start(iter(()))
    second.ended(None, stopped_by="SIGTERM on n0")
    found = [
        {k: v for k, v in each.items() if k not in ("time", "host", "process", "path", "run")}
        for each in events(tmp_path)
    ]
    assert found == [
        {"event": "start", "step": 0, "ranks": 4},
        {"event": "saved", "step": 20, "seconds": 1.5},
        {"event": "lost", "step": 20, "reason": "rank 3 on n1 was lost", "exit_code": 6},
        {"event": "healed", "step": 0, "ranks": 3, "rank_losses": 1, "rank_joins": 0},
        {"event": "ended", "step": 0, "reason": "stopped by SIGTERM on n0", "exit_code": 130},
    ]
    values = parsed((tmp_path / "metrics.prom").read_text())
    assert (values["bigbatch_running"], values["bigbatch_exit_code"], values["bigbatch_rank_losses_total"]) == (
        0,
        130,
        1,
    )


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (None, ("ended", "finished", 0)),
        (DataError("a.jpg: damaged\nmore"), ("ended", "a.jpg: damaged", 1)),
        (ZeroDivisionError("no"), ("ended", "no", 7)),
    ],
)
def test_events_of_an_end(tmp_path: Path, error: Exception | None, event: tuple[str, str, int]) -> None:
    files(tmp_path).ended(error, stopped_by=None)
    (found,) = events(tmp_path)
    assert found["event"] == event[0]
    assert found["reason"].endswith(event[1])
    assert found["exit_code"] == (getattr(error, "exit_code", event[2]))


def test_event_after_half_a_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    """As a node leaves it that lost power."""
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "sav')
    files(tmp_path).ended(None, stopped_by=None)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[1] == '{"event": "sav'
    assert json.loads(lines[2])["event"] == "ended"


def test_runs_of_one_name_in_two_work_folders_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    files(Path("runs")).ended(None, stopped_by=None)
    assert events(tmp_path / "runs")[0]["run"] == str(tmp_path / "runs")
    assert f'{{run="{tmp_path}/runs"}}' in (tmp_path / "runs/metrics.prom").read_text()


@pytest.mark.parametrize(("ranks", "event"), [(1, "ended"), (2, "interrupted")])
def test_run_of_one_rank_that_diverges_has_ended(tmp_path: Path, ranks: int, event: str) -> None:
    """Several ranks go back to a checkpoint, and look for one whose device is the cause."""
    watch = files(tmp_path, communicator=SimpleNamespace(rank=0, world_size=ranks))
    watch.ended(NotFinite("the loss is nan at step 7"), stopped_by=None)
    assert (events(tmp_path)[0]["event"], events(tmp_path)[0]["exit_code"]) == (event, 1)


def test_files_of_other_ranks_and_on_a_full_disk(tmp_path: Path) -> None:
    other = files(tmp_path, communicator=SimpleNamespace(rank=1, world_size=2))
    other.start(iter(()))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "events.jsonl").mkdir()
    say = MagicMock()
    watch = files(tmp_path, say=say)
    watch.start(iter(()))
    watch.at_report(RECORD)
    watch.ended(None, stopped_by=None)
    say.assert_called_once()
    assert "run.operator_files" in say.call_args[0][0]
    assert parsed((tmp_path / "metrics.prom").read_text())["bigbatch_exit_code"] == 0


def test_label_of_a_strange_folder() -> None:
    text = exposition({"bigbatch_step": 3, "bigbatch_loss": float("nan")}, run='a"b\\c\nd')
    assert text.splitlines() == [
        "# HELP bigbatch_step optimizer steps done",
        "# TYPE bigbatch_step gauge",
        'bigbatch_step{run="a\\"b\\\\c\\nd"} 3.0',
    ]
    parsed(text)
    parser = pytest.importorskip("prometheus_client.parser")
    (family,) = parser.text_string_to_metric_families(text)
    assert family.samples[0].labels == {"run": 'a"b\\c\nd'}


def test_every_metric_is_in_the_format_of_prometheus() -> None:
    text = exposition(dict.fromkeys(METRICS, 1), run="runs/a")
    assert parsed(text) == dict.fromkeys(METRICS, 1.0)
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    assert [(each.samples[0].name, each.type, each.documentation) for each in families] == [
        (name, *facts) for name, facts in METRICS.items()
    ]


def test_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((Path(__file__).parents[4] / "examples/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"bigbatch_\w+", query)}
    assert asked == {*METRICS}


def test_run_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.loader=synthetic", "--data.num_synthetic_samples=64", "--data.image_size=16", "--run.loggers=[]"]
    words += ["--model.options.width=2", "--data.probe_seconds=0", "--batch.global_batch_size=32", "--run.epochs=1"]
    words += ["--batch.microbatch_size=16", "--batch.bn_span=16", "--schedule.warmup_epochs=0"]
    words += ["--run.eval_every_epochs=1", f"--run.directory={tmp_path}/r", "--run.operator_files=true"]
    assert main(["train", "--config", "quickstart", "--quiet", *words]) == 0
    assert [each["event"] for each in events(tmp_path / "r")] == ["start", "saved", "ended"]
    values = parsed((tmp_path / "r/metrics.prom").read_text())
    assert (values["bigbatch_step"], values["bigbatch_running"], values["bigbatch_exit_code"]) == (2, 0, 0)
    assert values["bigbatch_checkpoint_step"] == 2
