"""What an ablation leaves in its folder for people: the table in Markdown and JSON, and a plot."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.colours import COLOURS
from bigbatch.errors import RunFolderError
from bigbatch.launch.ablate.inference import Inference
from bigbatch.launch.ablate.inference import make_table as inference_table
from bigbatch.launch.ablate.plan import STEP, Ablation
from bigbatch.launch.ablate.results import RunResult, StepResult, make_table, run_result
from bigbatch.launch.report.collect import common_conditions, differences
from bigbatch.launch.report.plots import plain_text
from bigbatch.launch.report.tables import conditions_table
from bigbatch.launch.sweep.folder import DONE, MISSING, SweepFolder, damage, read_state, read_summary
from bigbatch.launch.sweep.points import Point
from bigbatch.launch.tables import Table, markdown, plain_cell
from bigbatch.trainer.run.folder import RunDir, read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Each step has the changes of all steps before it. Seconds are of training steps on one machine, without start, "
    "evaluation and checkpoints. Inference is by one process, without reading and decoding."
)


def collect(ablation: Ablation, points: Sequence[Point], folder: SweepFolder) -> list[StepResult]:
    """Return what there is of these points, step by step. Raises: LaunchOptionError for a damaged folder."""
    found = []
    for name, changes in ablation.steps.items():
        runs: list[RunResult] = []
        undone: list[str] = []
        for point in points:
            if point.values[STEP] == name:
                result = _read(point, folder, target=ablation.target_top1)
                (undone if isinstance(result, str) else runs).append(result)  # type: ignore[arg-type]
        if runs or undone:
            found.append(StepResult(name, changes, tuple(runs), tuple(undone)))
    return found


def _read(point: Point, folder: SweepFolder, *, target: float | None) -> RunResult | str:
    """Return the figures of one point, or why it has none."""
    if not folder.state(point.number).exists():
        return MISSING
    state = read_state(folder, point.number)
    if state["state"] != DONE:
        return str(state["reason"] or state["state"])
    size = point.config.batch.global_batch_size
    try:
        records = list(read_records(folder.run(point.number).metrics))
        return run_result(records, seed=point.config.run.seed, global_batch_size=size, target=target)
    except RunFolderError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return damage(error)


def conditions_of(points: Sequence[Point], folder: SweepFolder) -> dict[str, Any]:
    """Return what the figures depend on."""
    return common_conditions([summary for point in points if (summary := read_summary(folder, point.number))])


def tables_of(ablation: Ablation, steps: Sequence[StepResult], inference: Inference | None) -> list[Table]:
    """Return the table of times and accuracies, and that of inference where there is one."""
    table = make_table(f"Ablation: {ablation.name}", steps, target=ablation.target_top1)
    return [table, *([inference_table(inference)] if inference else [])]


def write(
    ablation: Ablation,
    steps: Sequence[StepResult],
    inference: Inference | None,
    conditions: dict[str, Any],
    *,
    folder: Path,
) -> None:
    """Write ablation.md, ablation.json and ablation.png. Raises: RunFolderError."""
    lines = [
        *map(markdown, tables_of(ablation, steps, inference)),
        NOTE,
        *map(plain_cell, differences(conditions)),
        markdown(conditions_table(conditions)),
    ]
    facts = {**asdict(ablation), "steps": [asdict(step) for step in steps], "conditions": conditions}
    facts["inference"] = asdict(inference) if inference else None
    out = RunDir(folder)
    out.write_text(folder / "ablation.md", "\n\n".join(lines) + "\n")
    out.write_text(folder / "ablation.json", json.dumps(facts, indent=1) + "\n")
    out.save_plot(folder / "ablation.png", _draw([step for step in steps if step.runs], title=ablation.name))


def _draw(steps: Sequence[StepResult], *, title: str) -> "Figure":
    """Draw seconds and accuracy of each step, one below the other as in the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.36 * max(1, len(steps))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [plain_text(step.name) for step in steps]
    seconds = [[run.seconds for run in step.runs] for step in steps]
    left.barh(names, [statistics.median(each) for each in seconds], color=COLOURS[0])
    for name, step, each in zip(names, steps, seconds, strict=True):
        left.plot([min(each), max(each)], [name, name], color="black", linewidth=1)
        right.plot([100 * run.top1 for run in step.runs], [name] * len(step.runs), "o", color=COLOURS[1], alpha=0.5)
    right.plot([100 * statistics.fmean(run.top1 for run in step.runs) for step in steps], names, color=COLOURS[1])
    left.invert_yaxis()
    left.set(xlabel="training (s), median and range", title=plain_text(title))
    right.set(xlabel="top-1 (%), runs and mean")
    right.grid(alpha=0.3)
    return figure
