"""What sweeps and runs have left in their folders."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bigbatch.launch.report.split import Measured, Step, median_step
from bigbatch.launch.sweep.folder import DONE, SweepFolder, read_state
from bigbatch.trainer.errors import ConfigError
from bigbatch.trainer.rundir import RunDir, read_records

WARM_UP_REPORTS = 1
"""Reports at a run's start that do not count: libraries choose their algorithms, and buffers are made."""


@dataclass(frozen=True)
class SweepResults:
    """A sweep's folder."""

    name: str
    folder: Path
    measured: tuple[Measured, ...]
    unmeasured: tuple[tuple[str, str], ...]
    """Points without figures: their values, and why."""
    conditions: dict[str, Any]


@dataclass(frozen=True)
class RunResults:
    """A run's folder."""

    folder: Path
    config: dict[str, Any]
    records: tuple[dict[str, Any], ...]
    conditions: dict[str, Any]


def read_folder(path: Path) -> SweepResults | RunResults:
    """A sweep, or a run. Raises: ConfigError for anything else."""
    if (path / "sweep.yaml").is_file():
        return read_sweep_results(SweepFolder(path))
    run = RunDir(path)
    if run.config.is_file() and run.metrics.is_file():
        return read_run_results(run)
    what = "it holds neither a sweep (sweep.yaml) nor a run (config.yaml and metrics.jsonl)"
    raise ConfigError(f"{path}: {what if path.is_dir() else 'no such folder'}; name the folder of either")


def read_sweep_results(folder: SweepFolder) -> SweepResults:
    """Repeats of a point are taken together. Raises: ConfigError for a damaged folder."""
    try:
        sweep = yaml.safe_load(folder.sweep.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder.sweep} is not readable") from error
    groups: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]]] = {}
    unmeasured: list[tuple[str, str]] = []
    conditions: dict[str, Any] = {}
    for number in folder.numbers():
        state = read_state(folder, number)
        shown = describe(state["values"])
        if state["state"] != DONE:
            unmeasured.append((shown, state["reason"] or state["state"]))
            continue
        run = folder.run(number)
        records = train_records(run)
        if not records:
            unmeasured.append(
                (shown, f"fewer than {WARM_UP_REPORTS + 1} reports: take more steps, or fewer between reports")
            )
            continue
        summary = read_json(run.summary)
        conditions = conditions or conditions_of(summary)
        groups.setdefault(json.dumps(state["values"]), []).append((state, records, summary))
    measured = tuple(_measure(repeats) for repeats in groups.values())
    conditions |= {key: sweep[key] for key in ("config", "where", "launch", "options", "steps") if key in sweep}
    return SweepResults(str(sweep.get("name")), folder.path, measured, tuple(unmeasured), conditions)


def _measure(repeats: Sequence[tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]]) -> Measured:
    state, _, summary = repeats[0]
    batch = summary["global_batch_size"]
    records = [record for _, own, _ in repeats for record in own]
    variant = tuple((key, _hashable(value)) for key, value in state["values"].items() if key != "ranks")
    step: Step = median_step(records, global_batch_size=batch)
    return Measured(
        variant,
        ranks=state["ranks"],
        nodes=state["ranks"] // state["ranks_per_node"],
        global_batch_size=batch,
        step=step,
        rates=tuple(record["images_per_second"] for record in records),
    )


def read_run_results(run: RunDir) -> RunResults:
    """Of `bigbatch train`. Raises: ConfigError for a damaged folder."""
    try:
        config = yaml.safe_load(run.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{run.config} is not readable") from error
    summary = read_json(run.summary) if run.summary.is_file() else {}
    return RunResults(run.path, config, tuple(read_records(run.metrics)), conditions_of(summary))


def train_records(run: RunDir) -> list[dict[str, Any]]:
    """Reports of the newest start, but for its first."""
    records: list[dict[str, Any]] = []
    for record in read_records(run.metrics):
        if record["kind"] == "start":
            records = []
        elif record["kind"] == "train":
            records.append(record)
    found = records[WARM_UP_REPORTS:]
    if found and "wire_wait_fraction" not in found[0]:
        raise ConfigError(f"{run.metrics} was written by an older bigbatch, which did not split communication")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ConfigError."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable: {error}") from error


def conditions_of(summary: dict[str, Any]) -> dict[str, Any]:
    """What a figure depends on."""
    return {key: summary[key] for key in ("device", "torch", "commit", "backend", "precision") if key in summary}


def describe(values: dict[str, Any]) -> str:
    """In one line."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value)
