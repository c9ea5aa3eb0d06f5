"""What a run leaves behind and shows: records, plot, lines, bar, summary."""

import io
import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from error_texts import naming
from PIL import Image
from rich.console import Console
from small_run import PLAN

from bigbatch.errors import RunFolderError
from bigbatch.experiments.report.compare import read_figures
from bigbatch.trainer.checkpoint.resume import changes
from bigbatch.trainer.config.batch import Division
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.folder import folder
from bigbatch.trainer.folder.folder import RunDir, read_curves, read_records, read_summary
from bigbatch.trainer.input.report import MeasuredInput, input_settings
from bigbatch.trainer.report import metrics, summary
from bigbatch.trainer.report.cost import Spent, total_spent
from bigbatch.trainer.report.ending import closing_lines
from bigbatch.trainer.report.job_figures import JobFigures
from bigbatch.trainer.report.loggers import figures_of
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.plot import draw_run, plot_run
from bigbatch.trainer.report.progress import Bar, Lines, describe, describe_evaluation
from bigbatch.trainer.report.summary import make_hints, speed
from bigbatch.trainer.step.loop import Steps
from bigbatch.trainer.step.window import Totals

TRAIN_RECORD = {
    "step": 3,
    "epoch": 0.5,
    "loss": 1.25,
    "top1": 0.5,
    "lr": 0.1,
    "overflow_steps": 0,
    "images_per_second": 1234.5,
    "input_wait_fraction": 0.01,
    "exposed_communication_fraction": 0.02,
}
EVAL_RECORD = {"step": 3, "epoch": 0.5, "loss": 1.0, "top1": 0.25, "top5": 0.75, "count": 8, "seconds": 0.5}


def test_report_durations_do_not_follow_a_time_of_day_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = iter([0.0, 10.0, -10.0])
    clock = SimpleNamespace(time=lambda: 1.8e9 + 86400 * next(days), monotonic=iter([5.0, 5.0, 12.0, 19.0]).__next__)
    monkeypatch.setattr(metrics, "time", clock)
    log = MetricsLog(RunDir(tmp_path))
    log.begin(from_step=0)
    log.write("start", {"step": 0, "job": {"world_size": 2}})
    log.write("train", TRAIN_RECORD)
    log.write("train", TRAIN_RECORD)
    log.close()
    spent = total_spent(read_records(RunDir(tmp_path).metrics))
    assert (3600 * spent.hours, 3600 * spent.rank_hours) == pytest.approx((14, 28))


def test_report_curves_of_a_long_run_are_of_reports_evenly_spread_and_of_all_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MAX_REPORTS", 10)
    records = [{"kind": "train", "step": step} for step in range(1, 101)]
    records[50:50] = [{"kind": "eval", "step": 50}, {"kind": "start", "step": 50}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = read_curves(tmp_path / "metrics.jsonl")
    reports = [record["step"] for record in found if record["kind"] == "train"]
    assert len(reports) in range(5, 11)
    assert {after - before for before, after in pairwise(reports)} == {16}
    assert [record["kind"] for record in found[len(reports) :]] == ["eval", "start"]


def test_report_two_starts_from_one_step_leave_one_record_of_each(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    log = MetricsLog(rundir)
    for from_step in (0, 2, 2):
        with rundir.metrics.open("a") as file:
            file.write('{"step": 4, "cut sho')
        before = time.time()
        log.begin(from_step=from_step)
        log.write("start", {"step": from_step, "job": {}})
        log.write("input", {"step": from_step})
        for step in (from_step + 1, from_step + 2):
            log.write("train", {**TRAIN_RECORD, "step": step})
        log.write("skipped", {"step": from_step + 2, "images": {}})
        log.write("hint", {"step": from_step + 2, "hint": "x"})
        log.close()
    records = list(read_records(rundir.metrics))
    assert before <= records[-1]["time"] <= time.time()
    kept = [(record["kind"], record["step"]) for record in records]
    first = [("start", 0), ("input", 0), ("train", 1), ("train", 2), ("skipped", 2), ("hint", 2)]
    assert kept == [*first, ("start", 2), ("input", 2), ("train", 3), ("train", 4), ("skipped", 4), ("hint", 4)]


def test_report_a_run_that_heals_goes_on_in_the_open_file_and_leaves_no_record_twice(tmp_path: Path) -> None:
    """After a loss in step 3 or 4, again before a step is done, and by going back to a checkpoint."""
    rundir = RunDir(tmp_path)
    log = MetricsLog(rundir)
    files = []
    for from_step in (0, 2, 2, 1):
        log.begin(from_step=from_step)
        files.append(rundir.metrics.stat().st_ino)
        log.write("start", {"step": from_step, "job": {}})
        for step in range(from_step + 1, 3):
            log.write("train", {**TRAIN_RECORD, "step": step})
    log.write("audit", {"step": 3})  # of a step that a loss ends
    log.begin(from_step=2)
    log.close()
    kept = [(record["kind"], record["step"]) for record in read_records(rundir.metrics)]
    assert kept == [("start", 0), ("train", 1), ("start", 1), ("train", 2)]
    assert files[0] == files[1], "nothing to remove: the file stays"


def test_report_a_resumed_run_drops_records_that_it_cannot_have_written(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    whole = {"kind": "train", "time": 1.0, "step": 1, "energy_joules": 0.0}
    odd = [{"time": None}, {"time": "1"}, {"step": "1"}, {"step": None}, {"kind": "start"}, {"kind": "start", "job": 7}]
    records = [whole, *({**whole, **change} for change in odd), {"kind": "train"}]
    rundir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    MetricsLog(rundir).begin(from_step=1)
    assert list(read_records(rundir.metrics)) == [whole]
    assert total_spent(read_records(rundir.metrics)) == Spent()


def test_report_numbers_that_json_lacks_are_null_for_every_reader(tmp_path: Path) -> None:
    """A metric without a value, and a loss that is not finite."""
    rundir, log = RunDir(tmp_path), MetricsLog(RunDir(tmp_path))
    older = {"kind": "eval", "time": 1.0, **EVAL_RECORD, "metrics": {"balanced": math.nan}}
    rundir.metrics.write_text(json.dumps(older) + "\n")  # as earlier releases wrote it
    log.begin(from_step=3)
    record = {**EVAL_RECORD, "step": 4, "epoch": 1.0, "loss": math.inf, "metrics": {"balanced": None, "right": 0.5}}
    log.write("eval", record)
    log.close()
    found = [json.loads(line, parse_constant=pytest.fail) for line in rundir.metrics.read_text().splitlines()]
    assert [each["metrics"]["balanced"] for each in found] == [None, None]
    assert (found[1]["loss"], found[1]["metrics"]["right"]) == (None, 0.5)
    names = {"epoch", "top1", "top5", "count", "seconds", "metrics/right"}
    assert figures_of(found[1]).keys() == figures_of(record).keys() == names
    panels = draw_run(found, title="a run", label_smoothing=0.0).axes
    assert [[line.get_xdata().tolist() for line in panel.get_lines()] for panel in panels] == [
        [[0.5]],
        [[0.5, 1.0], [0.5, 1.0]],
        [],
    ]
    assert "loss inf  balanced no value  right 0.5  (8 images" in describe_evaluation(record, num_classes=4)
    assert closing_lines(found[1], Path("run"), num_classes=4)[0].endswith(", balanced no value, right 0.5")
    start = {"kind": "train", **TRAIN_RECORD}
    figures = read_figures([start, *found], global_batch_size=8, target=0.2, is_generated=False)
    assert (figures.top1, figures.loss) == (0.25, None)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_records_that_have_no_end_are_refused(kind: str, tmp_path: Path) -> None:
    path = RunDir(tmp_path).metrics
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(RunFolderError, match=naming(path, "not a regular file")):
        list(read_records(path))


@pytest.mark.parametrize("text", ["", "[1]", "[" * 10_000])
def test_summary_that_is_damaged_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """A node that lost its power may leave an empty one."""
    RunDir(tmp_path).summary.write_text(text)
    with pytest.raises(RunFolderError, match=naming(RunDir(tmp_path).summary, "remove it")):
        read_summary(RunDir(tmp_path))


class Ranks:
    """Threads that report together: sums are over all of them."""

    def __init__(self, num: int) -> None:
        self.barrier = threading.Barrier(num)
        self.tensors: list[torch.Tensor] = []

    def sum_(self, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        self.tensors.append(tensor_N)
        self.barrier.wait()
        return torch.stack(self.tensors).sum(0)

    def report(
        self,
        rank: int,
        *,
        seconds: float,
        wait: float,
        exposed: float,
        joules: float = float("nan"),
        before: Totals | None = None,
    ) -> tuple[dict[str, Any], Totals]:
        """What a rank gets that had 40 images, and waited and exposed so many of its seconds."""
        communicator = SimpleNamespace(
            rank=rank,
            world_size=self.barrier.parties,
            device=torch.device("cpu"),
            sum_=self.sum_,
            gather=lambda value: [value],
        )
        parts: Any = SimpleNamespace(
            model=torch.nn.Identity(),
            average=None,
            accumulation=None,
            communicator=communicator,
            reducer=SimpleNamespace(grid=None, exposed=SimpleNamespace(take_seconds=lambda: exposed)),
            statistics=SimpleNamespace(take_beyond=lambda: 0),
            take_joules=lambda: joules,
            schedule=lambda step: 0.1,
            is_captured=False,
            precision=SimpleNamespace(figures=dict),
        )
        steps = Steps(PLAN, parts, iter(()))
        steps.totals, window = before or steps.totals, steps.train_step.window
        window.sums_3 += torch.tensor([80.0, 10.0, 40.0], dtype=torch.float64)
        window.steps, window.start, steps.stream.wait_seconds = 5, time.perf_counter() - seconds, wait
        record, replaced = steps.report(5)
        assert not replaced
        return record, steps.totals


def reports(*facts: dict[str, Any]) -> list[tuple[dict[str, Any], Totals]]:
    """What each rank gets; a rank had 100 s and waited for nothing if its facts do not say otherwise."""
    ranks, usual = Ranks(len(facts)), {"seconds": 100.0, "wait": 0.0, "exposed": 0.0}
    with ThreadPoolExecutor(len(facts)) as pool:
        results = [pool.submit(ranks.report, rank, **(usual | own)) for rank, own in enumerate(facts)]
    return [result.result() for result in results]


def test_report_a_wait_of_one_rank_is_a_wait_of_all() -> None:
    for record, totals in reports({"wait": 1.0, "exposed": 60.0}, {"wait": 80.0}, {"exposed": 30.0}):
        assert (record["loss"], record["top1"]) == (2.0, 0.25)
        expected = {
            "input_wait_fraction": 0.8,
            "images_per_second": 120 / 100,
            "compute_images_per_second": 120 / 20,
            "exposed_communication_fraction": 0.3,  # a mean
        }
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=0.01)
        measured = (totals.steps, totals.step_seconds, totals.input_wait_seconds, totals.exposed_seconds)
        assert measured == pytest.approx((5, 100, 80, 30), rel=0.01)


def test_report_a_rank_whose_window_is_the_longest_cannot_wait_longer_than_a_step_lasts() -> None:
    """Rank 0 starts late, as it wrote a checkpoint: rank 1 meanwhile waited for longer than their mean window."""
    for record, totals in reports({"seconds": 10.0}, {"seconds": 50.0, "wait": 40.0}):
        assert record["input_wait_fraction"] == pytest.approx(0.8, rel=0.01)
        assert record["compute_images_per_second"] == pytest.approx(80 / 30 / 0.2, rel=0.01)
        assert totals.input_wait_seconds == pytest.approx(0.8 * 30, rel=0.01)


def test_report_the_first_report_names_no_straggler() -> None:
    """What happens once in a run happens there, and no rank is to blame."""
    for record, totals in reports({}, {"exposed": 50.0}):
        assert record["straggler_fraction"] == pytest.approx(0.25, rel=0.01)
        assert (totals.straggler_seconds, totals.lag_seconds_P) == (0.0, [0.0, 0.0])
        assert totals.first_report_seconds == pytest.approx(100, rel=0.01)


def test_report_what_ranks_wait_for_adds_up() -> None:
    """Rank 1 is slow: the others wait 20 s for it and 5 s, as it does, for the wire; each waits 3 s for images."""
    once = [Totals(first_report_seconds=40.0, lag_seconds_P=[0.0] * 4) for _ in range(4)]
    facts = [{"wait": 3.0, "exposed": 25.0, "joules": 100.0 * rank, "before": once[rank]} for rank in range(4)]
    facts[1]["exposed"] = 5.0
    for record, totals in reports(*facts):
        assert record["exposed_communication_fraction"] == pytest.approx(0.2, rel=0.01)  # 15 of it for rank 1
        assert record["straggler_fraction"] == pytest.approx(0.15, rel=0.01)
        assert totals.straggler_seconds == pytest.approx(15, rel=0.01)
        assert totals.lag_seconds_P == pytest.approx([0, 20, 0, 0], abs=0.2)
        assert record["wire_wait_fraction"] == pytest.approx(0.05, rel=0.01)
        assert record["energy_joules"] == 600


def summary_of(
    *words: str,
    algorithm: str,
    why: str,
    figures: dict[str, float | None] | None = None,
) -> dict[str, Any]:
    """This start took 36 s of 4 GPUs on 2 hosts."""
    communicator: Any = SimpleNamespace(
        world_size=4,
        device=torch.device("cuda"),
        connection=SimpleNamespace(control=SimpleNamespace(host_of=lambda rank: f"n{rank // 2}")),
        transport=SimpleNamespace(backend=SimpleNamespace(name="nccl")),
        algorithm=algorithm,
        why=why,
    )
    job = JobFigures()
    job._began -= 36
    return summary.make_summary(
        Totals(last_evaluation={"top1": 0.5, "top5": 0.75}),
        load_config(["--config", "quickstart", *words]),
        summary.Ending("run.epochs", None, {}, job, figures or {}),
        communicator=communicator,
        plan=PLAN,
        best=None,
        spent=Spent(hours=2.0, rank_hours=7.0, joules=3.6e6),
    )


@pytest.mark.parametrize(
    ("words", "algorithm", "why", "expected"),
    [
        ((), "native", "one rank", ("native", "comm.algorithm=auto: one rank")),
        (("--comm.algorithm=ring",), "ring", "", ("ring", "comm.algorithm=ring")),
        (("--optimizer.sharded=true",), "native", "one rank", ("reduce-scatter", "optimizer.sharded")),
    ],
)
def test_report_a_summary_says_what_summed_and_why(
    words: tuple[str, ...], algorithm: str, why: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "device_name", lambda device: "NVIDIA H100")
    found = summary_of(*words, algorithm=algorithm, why=why)
    assert (found["algorithm"], found["algorithm_why"]) == expected


def test_report_a_summary_tells_of_all_starts_hosts_the_site_and_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "device_name", lambda device: "NVIDIA H100")
    a_run = partial(summary_of, algorithm="ring", why="")
    found = a_run()
    assert not {"site", "grid_underflow_fraction"} & found.keys()
    assert (found["gpu_hours"], found["energy_joules"], round(found["seconds"])) == (7.0, 3.6e6, 36)
    assert found["total_seconds"] == 7200
    assert not [name for name in found if "rank_" in name], "no rank was lost or joined"
    assert (found["world_size"], found["num_nodes"]) == (4, 2)
    monkeypatch.setenv("BIGBATCH_SITE", '{"/etc/bigbatch/bigbatch.toml": {"env": {"NCCL_IB_HCA": "mlx5"}}}')
    found = a_run(figures={"grid_underflow_fraction": 0.25})
    assert found["site"] == {"/etc/bigbatch/bigbatch.toml": {"env": {"NCCL_IB_HCA": "mlx5"}}}
    assert found["grid_underflow_fraction"] == 0.25


def test_report_a_noise_scale_is_said_and_drawn_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "device_name", lambda device: "NVIDIA H100")
    assert "noise_scale" not in summary_of(algorithm="native", why="one rank")
    noise = {"noise_scale": 1130.0, "noise_scale_low": 900.0, "noise_scale_high": None}
    for figures, expected in (
        (noise, "1,130 (900 to no bound) images"),
        (noise | {"noise_scale": None}, "above 900 images"),  # measured all the same
        (dict.fromkeys(noise), "not measured yet"),
    ):
        shown = closing_lines(
            summary_of(algorithm="native", why="one rank", figures=figures), Path("run"), num_classes=10
        )
        assert [line for line in shown if line.startswith("noise")] == [f"noise     {expected}"]
    assert "noise scale 1,130 (900 to no bound)" in describe({**TRAIN_RECORD, **noise})
    assert "noise scale" not in describe(TRAIN_RECORD)
    measured = [
        record | noise | {"noise_scale": 100.0 * record["epoch"]} for record in RUN if record["kind"] == "train"
    ]
    *_, axes = draw_run(
        [{**RUN[0], **dict.fromkeys(noise)}, *measured], title="a run", label_smoothing=0.0, global_batch_size=512
    ).axes
    curve, batch = axes.get_lines()
    assert list(curve.get_ydata()) == [100, 200, 300]
    assert set(batch.get_ydata()) == {512}
    assert axes.get_ylabel() == "images"


FINISHED: dict[str, Any] = {
    "top1": 0.75,
    "top5": 0.9,
    "best_top1": 0.8125,
    "ended_by": "run.target_top1",
    "epochs": 12,
    "steps": 1152,
    "resumed_after_step": 300,
    "global_batch_size": 128,
    "world_size": 2,
    "images_per_second": 1342.06,
    "loader_images_per_second": 5100.0,
    "input_wait_fraction": 0.005,
    "input_limit": "decode",
    "exposed_communication_fraction": 0.018,
    "straggler_fraction": 0.006,
    "energy_joules": 12345.0,
    "gpu_hours": 0.25,
    "seconds": 64.31,
    "total_seconds": 151.5,
    "device": "cpu (1 thread per rank)",
    "precision": "fp32",
}


def test_report_a_run_ends_in_few_lines_for_a_person() -> None:
    assert closing_lines(FINISHED, Path("runs/my run"), num_classes=10) == [
        "result    top-1 75.00%, top-5 90.00%, best top-1 81.25%",
        "training  12 epochs, 1152 steps, 128 images in a step, ended by run.target_top1, resumed after step 300",
        "speed     64.3 s since the resume, 151.5 s in this folder, 1,342.1 images/s, 2 ranks, "
        "cpu (1 thread per rank), fp32",
        "step      limited by computing, 97.7% of the time; waiting for gradients 1.2%; "
        "waiting for slow ranks 0.6%; waiting for images 0.5%",
        "input     5,100.0 images/s alone, without training; its slowest stage is decode",
        "cost      0.25 GPU-hours, 12,345 J",
        "files     runs/my run: plot.png, summary.json, metrics.jsonl, checkpoints",
        "next      bigbatch evaluate 'runs/my run' or bigbatch report 'runs/my run'",
    ]


def test_report_ranks_that_were_lost_and_joined_have_a_line() -> None:
    healed = {"num_rank_losses": 2, "rank_loss_seconds": 1.25, "num_rank_joins": 1, "rank_join_seconds": 0.875}
    lines = closing_lines(FINISHED | healed, Path("run"), num_classes=10)
    assert "ranks     2 losses, 1.2 s until steps continued; 1 join, 0.9 s until steps continued" in lines
    (line,) = (line for line in closing_lines({"num_rank_losses": 1}, Path("run"), num_classes=10) if "loss" in line)
    assert line == "ranks     1 loss"


def test_report_the_largest_share_of_a_step_limits_a_run() -> None:
    """What a graph's replay could not measure is said, and none of it is taken for computing alone."""
    found = {**FINISHED, "input_wait_fraction": 0.625, "exposed_communication_fraction": None}
    (line,) = (line for line in closing_lines(found, Path("run"), num_classes=10) if line.startswith("step"))
    assert line == (
        "step      limited by waiting for images, 62.5% of the time; computing 36.9%; waiting for slow ranks 0.6%; "
        "waits for gradients were not measured"
    )


def test_report_the_last_lines_are_few_whatever_the_summary_holds() -> None:
    found = {
        **FINISHED,
        "metrics": dict.fromkeys("abcde", 0.5),
        "skipped": ["x [1]: cut off"] * 500,
        "noise_scale": 7.0,
    }
    lines = closing_lines(found, Path("run"), num_classes=10)
    assert lines[0].endswith("a 0.5, b 0.5, c 0.5, and 2 more in summary.json")
    assert (
        "skipped   500 bad images: x [1]: cut off; x [1]: cut off; x [1]: cut off, and 497 more in summary.json"
        in lines
    )
    assert len(lines) <= 12
    assert closing_lines({**FINISHED, "best_top1": 0.75}, Path("run"), num_classes=5)[0] == "result    top-1 75.00%"


@pytest.mark.parametrize(
    "value", ["x", 10**400, True, None, [], {}], ids=["text", "huge", "bool", "null", "list", "map"]
)
def test_report_a_summary_that_was_edited_is_no_defect(value: object) -> None:
    edited = dict.fromkeys([*FINISHED, "metrics", "skipped", "noise_scale", "noise_scale_low"], value)
    lines = closing_lines(edited, Path("run"), num_classes=10)
    assert lines[-1] == "next      bigbatch evaluate run or bigbatch report run"
    assert closing_lines({}, Path("run"), num_classes=10)[-1] == lines[-1]
    assert closing_lines({}, Path("-run"), num_classes=10)[-1].endswith("bigbatch report ./-run")


RATES = {"loader": 500.0, "read": 900.0, "decode": 600.0, "copy": None, "augment": 700.0}


def measured_on(*ranks: dict[str, float | None]) -> MeasuredInput:
    config = load_config(["--config", "quickstart"])
    return MeasuredInput(ranks, input_settings(config, sizes=[], num_cores=2, is_on_gpu=False, is_packed=False))


def test_report_speed_of_a_summary_by_hand() -> None:
    totals = Totals(steps=10, step_seconds=8.0, input_wait_seconds=3.0, exposed_seconds=2.0, straggler_seconds=1.0)
    totals.first_report_seconds = 3.0
    measured = measured_on(RATES, {**RATES, "loader": 100.0, "augment": 200.0})
    assert speed(totals, measured, global_batch_size=40) == {
        "images_per_second": 400 / 8,
        "compute_images_per_second": 400 / 5,
        "loader_images_per_second": 2 * 100,
        "input_wait_fraction": 3 / 8,
        "input_limit": "augment",
        "exposed_communication_fraction": 2 / 8,
        "straggler_fraction": 1 / 5,
    }
    assert set(speed(Totals(), None, global_batch_size=40).values()) == {None}


hints_of = partial(make_hints, host_of="n{}".format)


def test_report_hints_of_a_run() -> None:
    config = load_config(["--config", "quickstart", "--data.probe_seconds=0"])
    size = config.batch.global_batch_size
    totals = Totals(steps=10, step_seconds=10 * size / 400, input_wait_seconds=5 * size / 400)  # 800 without waiting
    waits, augments = hints_of(totals, config, measured=measured_on(RATES))
    assert "steps wait 50% of their time for images" in waits
    assert "alone the input delivers 500 images/s, the model takes 800" in waits
    assert "takes 100% of a step's time" in augments
    (unknown,) = hints_of(totals, config, measured=None)
    assert unknown.endswith("data.probe_seconds=1 does that")
    config = load_config(["--config", "quickstart", "--data.probe_seconds=1"])
    (unknown,) = hints_of(totals, config, measured=None)
    assert "met an image that cannot be used" in unknown
    assert hints_of(Totals(), config, measured=None) == []


def test_report_ranks_that_wait_for_a_larger_share_are_not_slow() -> None:
    """36 microbatches on 5 ranks leave 10% of the ranks' time unused; what is lost beyond that has another cause."""
    config = load_config(["--config", "quickstart"])
    totals = Totals(steps=10, step_seconds=10.0, straggler_seconds=1.2, lag_seconds_P=[9.0, 1.0, 1.0, 1.0, 1.0])
    (named,) = hints_of(totals, config, measured=None)
    assert named.startswith("steps lose 12% of their time to slower ranks, most to rank 0 on n0")
    assert hints_of(totals, config, measured=None, used_share=Division(36, 5).used_share) == []


def test_report_a_key_that_an_older_config_lacks_had_its_default() -> None:
    adamw = ["--config", "quickstart", "--optimizer.name=adamw", "--optimizer.options.eps=1e-8"]
    older = yaml.safe_load(dump_config(load_config(adamw)))
    for key in ("options", "clip_norm", "ema_decay", "momentum"):
        del older["optimizer"][key]
    text = yaml.safe_dump(older)
    assert changes(text, dump_config(load_config(adamw))) == {}
    new = load_config([*adamw, "--optimizer.clip_norm=1", "--optimizer.options.betas=[0.9, 0.99]"])
    assert changes(text, dump_config(new)) == {
        "optimizer.options.betas": "[0.9, 0.99] (was [0.9, 0.999])",
        "optimizer.clip_norm": "1.0 (was null)",
    }


def test_report_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    log = MetricsLog(rundir)
    log.begin(from_step=0)
    with Path("/dev/full").open("ab") as full:
        log._file = full
        with pytest.raises(RunFolderError, match=naming(rundir.metrics, "No space left on device")):
            log.write("train", TRAIN_RECORD)
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl"):
            log.close()


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "eval", **EVAL_RECORD, "top1": "x"},
        {"kind": "train", **TRAIN_RECORD, "lr": 10**400},
        {"kind": "train", **TRAIN_RECORD, "epoch": math.nan},
    ],
)
def test_report_record_that_no_run_writes_is_left_out_of_the_plot(odd: dict[str, Any]) -> None:
    """A run comes to its plot after it has trained, and before its summary."""
    records = [{"kind": "train", **TRAIN_RECORD}, {"kind": "eval", **EVAL_RECORD}]
    panels = draw_run([odd, *records], title="a run", label_smoothing=0.0).axes
    assert [[line.get_xdata().tolist() for line in panel.get_lines()] for panel in panels] == [
        [[0.5], [0.5]],
        [[0.5], [0.5]],
        [[0.5]],
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_figures")
def test_report_plot_is_an_image_with_lines(tmp_path: Path) -> None:
    records = [{"kind": "train", **TRAIN_RECORD}, {"kind": "eval", **EVAL_RECORD}]
    plot_run(records, tmp_path / "plot.png", title="a run", label_smoothing=0.0)
    plot_run([], tmp_path / "empty.png", title="a run", label_smoothing=0.0)
    image, empty = (Image.open(tmp_path / name).convert("RGB") for name in ("plot.png", "empty.png"))
    assert image.width > 800
    assert image.tobytes() != empty.tobytes()


RUN = [
    *({"kind": "train", **TRAIN_RECORD, "epoch": epoch, "lr": epoch / 2} for epoch in (1, 2, 3)),
    {"kind": "eval", **EVAL_RECORD, "epoch": 3, "top1": 0.5, "top5": 0.9},
]


def test_report_plot_draws_each_figure_once_over_all_epochs() -> None:
    loss, accuracy, rate = draw_run(RUN, title="a run", label_smoothing=0.1).axes
    training, evaluation = loss.get_lines()
    assert training.get_label() == "training (raised by label smoothing of 0.1)"
    (top1, top5), (steps,) = accuracy.get_lines(), rate.get_lines()
    assert (list(top1.get_ydata()), list(top5.get_ydata())) == ([50], [90])
    assert list(steps.get_ydata()) == [0.5, 1, 1.5]
    assert {axes.get_xlim() for axes in (loss, accuracy, rate)} == {(0, 3)}, "that of one evaluation, too"
    assert accuracy.get_ylim() == (0, 100)
    colors = [line.get_color() for line in (training, evaluation, top1, top5, steps)]
    assert colors == [colors[0], colors[1], colors[1], colors[1], colors[0]]
    assert colors[0] != colors[1]


def test_report_plot_draws_the_rate_of_each_step_and_that_of_the_records_if_a_resume_changed_it() -> None:
    """Peaks between two reports are seen, too; the records alone know the rates of a run's earlier starts."""
    rates = [0.25, 0.5, 1.0, 0.5, 0.25, 0.0]
    records = [{"kind": "train", **TRAIN_RECORD, "step": n, "epoch": n / 2, "lr": rates[n - 1]} for n in (2, 4, 6)]
    draw = partial(draw_run, title="a run", label_smoothing=0.0, schedule=lambda step: rates[step])
    (drawn,) = draw(records).axes[2].get_lines()
    assert list(drawn.get_xdata()) == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert list(drawn.get_ydata()) == rates
    (drawn,) = draw([{**records[0], "lr": 0.4}, *records[1:]]).axes[2].get_lines()
    assert list(drawn.get_ydata()) == [0.4, 0.5, 0.0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("records", [RUN, RUN[:1]])
def test_report_plot_has_no_legend_over_a_curve(records: list[dict[str, Any]]) -> None:
    figure = draw_run(records, title="a run", label_smoothing=0.1)
    figure.draw_without_rendering()
    assert {round(axes.bbox.width) for axes in figure.axes} == {round(figure.axes[0].bbox.width)}
    boxes = [legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())]
    assert not any(box.overlaps(boxes[0]) for box in boxes[1:])
    for box in boxes:
        assert figure.bbox.fully_contains(*box.min)
        assert figure.bbox.fully_contains(*box.max)
        assert not any(
            box.overlaps(axes.bbox) or box.overlaps(axes.xaxis.label.get_window_extent()) for axes in figure.axes
        )


def test_report_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(num_steps=3)
    lines.advance(TRAIN_RECORD)
    lines.close()
    printed = capsys.readouterr().out
    assert "step 3  loss 1.250  top-1 50.0%  lr 0.1  1,234 images/s  input wait 1.0%" in printed
    assert "\x1b" not in printed
    expected = "evaluation: top-1 25.00%  top-5 75.00%  loss 1.000  (8 images in 0.5 s)"
    assert describe_evaluation(EVAL_RECORD, num_classes=6) == expected
    perfect = {**EVAL_RECORD, "top5": 1.0}  # as always of five classes or fewer
    assert describe_evaluation(perfect, num_classes=5) == expected.replace("top-5 75.00%  ", "")
    assert describe_evaluation(perfect, num_classes=6) == expected.replace("75.00%", "100.00%")


def test_report_plain_lines_say_how_long_the_rest_takes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([100.0, 130.0, 190.0, 7300.0])  # the second interval has an evaluation in it
    lines = Lines(num_steps=100, clock=lambda: next(clock))
    for step in (10, 20, 30, 100):
        lines.advance({**TRAIN_RECORD, "step": step})
    ends = [line.partition("exposed communication")[2] for line in capsys.readouterr().out.splitlines()]
    # 80 steps at 30 s / 10; 70 at 60 s / 10, since step 20; none: what came before the first report is not a rate
    lefts = [left for _, _, left in (end.partition("  left ") for end in ends)]
    assert lefts == ["", "0:04:00", "0:07:00", ""]


def test_report_remaining_time_follows_a_run_that_became_slower(capsys: pytest.CaptureFixture[str]) -> None:
    """50 steps take 1 s each and the others 3 s: at step 75 the pace is that since step 40, 85 s for 35 steps."""
    clock = iter(float(step if step <= 50 else 50 + 3 * (step - 50)) for step in range(5, 80, 5))
    lines = Lines(num_steps=110, clock=lambda: next(clock))
    for step in range(5, 80, 5):
        lines.advance({**TRAIN_RECORD, "step": step})
    assert capsys.readouterr().out.rstrip().endswith("  left 0:01:25")


def test_report_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    bar = Bar(Console(file=screen, force_terminal=True, width=200), first_step=0, num_steps=10)
    bar.advance(TRAIN_RECORD)
    bar.say("top-1 25.00%")
    bar.close()
    bar.say("top1 [/red]50.00 %")
    shown = screen.getvalue()
    assert "3/10" in shown
    assert "top-1 25.00%" in shown
    assert "top1 [/red]50.00 %" in shown


def test_report_bar_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[dict[str, str]] = []

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id
        shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: shown.append(bundle))

    cell = Lines(first_step=2, num_steps=10, display=display)
    cell.advance(TRAIN_RECORD)
    cell.say("top-1 25.00%")
    assert [each["text/plain"].split()[0] for each in shown] == ["2/10", "3/10"]
    assert '<progress value="3" max="10">' in shown[-1]["text/html"]
    assert capsys.readouterr().out == "top-1 25.00%\n"
