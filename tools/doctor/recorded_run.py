"""`bigbatch doctor RUN`: find from its records what limits a finished or running run. Imports no torch."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bigbatch.errors import ConfigError, RunFolderError, print_line, print_lines
from bigbatch.files import as_json
from bigbatch.paths import as_path
from bigbatch.tools.doctor.limit import limiting_wait
from bigbatch.trainer.config.batch import divide_batch
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir, load_run_config, read_records
from bigbatch.trainer.report.cost import ELAPSED
from bigbatch.words import is_number

SHARES = {"input_wait_fraction": "wait for images", "exposed_communication_fraction": "wait for sums over ranks"}
STRAGGLER = "straggler_fraction"
SLOW = 0.7
"""Share of the median rate below which a report counts as slow."""


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Holds medians over the reports of a run's last start, without its first report."""

    step: int
    num_reports: int
    images_per_second: float
    compute_images_per_second: float | None
    loader_images_per_second: float | None
    """Rate of the input alone, if data.probe_seconds measured it."""
    shares: Mapping[str, float | None]
    """Name in SHARES, or STRAGGLER: share of a step; None if a CUDA graph hides it."""
    uneven_share: float
    """Share of the ranks' time in which they wait because others have a microbatch more."""
    world_size: int
    """0 if the records do not state it."""
    slow_steps: tuple[int, ...]
    """Last steps of reports with a rate below SLOW of the median."""
    step_seconds: float
    """Seconds in steps, over all reports of this start."""
    other_seconds: float
    """Seconds of start, evaluations and checkpoints."""


def main(argv: Sequence[str]) -> int:
    """Print what limits the run that argv names. Raises: RunFolderError; ConfigError."""
    arguments = _parser().parse_args(argv)
    rundir = RunDir(arguments.run)
    config = load_run_config(rundir, [], prog="bigbatch doctor")
    times = run_times(list(read_records(rundir.metrics)), config)
    if times is None:
        raise RunFolderError(f"{rundir.path} has no report of training steps yet: wait for run.log_every_steps of them")
    if arguments.json:
        print(as_json({**asdict(times), "limit": limit_of_run(times)}))
        return 0
    is_done = rundir.summary.exists()
    age = max(0.0, time.time() - rundir.metrics.stat().st_mtime)
    state = "finished" if is_done else f"last report {age:,.0f} s ago"
    print_line(f"{rundir.path}: {state}, after step {times.step}; medians of {times.num_reports} reports")
    print_line(f"{times.images_per_second:,.0f} images/s")
    Console(width=100).print(_table(times))
    print_lines("\n".join(explain(times, config)))
    return 0


def run_times(records: Sequence[Mapping[str, Any]], config: Config) -> RunTimes | None:
    """Compute the times of a run's last start, without damaged records; None before its first report."""
    starts = [index for index, record in enumerate(records) if record["kind"] == "start"]
    own = records[starts[-1] if starts else 0 :]
    reports = [
        each
        for each in own
        if each["kind"] == "train"
        and isinstance(each.get("step"), int)
        and (_number(each, "images_per_second") or 0.0) > 0
    ]
    if not reports:
        return None
    first_step = next((each["step"] for each in own if isinstance(each.get("step"), int)), 0)
    seconds = 0.0
    for before, report in zip([first_step, *(each["step"] for each in reports)], reports, strict=False):
        seconds += max(0, report["step"] - before) * config.batch.global_batch_size / report["images_per_second"]
    elapsed = max((value for each in own if (value := _number(each, ELAPSED)) is not None), default=seconds)
    settled = reports[1:] or reports  # the first one includes compilation and filling of caches
    rate = median(each["images_per_second"] for each in settled)
    job = own[0].get("job")
    world_size = job.get("world_size") if isinstance(job, dict) else None
    world_size = world_size if isinstance(world_size, int) and world_size > 0 else 0
    uneven_share = 0.0
    with suppress(ConfigError):  # edited records: no such job could start
        uneven_share = 1 - divide_batch(config.batch, world_size=world_size or 1).used_share
    measured_input = [value for each in own if (value := _number(each, "loader_images_per_second"))]
    return RunTimes(
        step=reports[-1]["step"],
        num_reports=len(settled),
        images_per_second=rate,
        compute_images_per_second=_median(settled, "compute_images_per_second"),
        loader_images_per_second=measured_input[-1] if measured_input else None,
        shares={name: _median(settled, name) for name in (*SHARES, STRAGGLER)},
        uneven_share=uneven_share,
        world_size=world_size,
        slow_steps=tuple(each["step"] for each in settled if each["images_per_second"] < SLOW * rate),
        step_seconds=seconds,
        other_seconds=max(0.0, elapsed - seconds),
    )


def limit_of_run(times: RunTimes) -> str:
    """Return what limits the run: the larger wait, as limiting_wait, or "compute" if both are short.

    A wait for sums is "uneven" if unequal shares of the batch cause most of it, "straggler" if slow ranks do.
    """
    images, sums = (times.shares[name] or 0.0 for name in SHARES)
    alone = {"input_alone": times.loader_images_per_second, "model_alone": times.compute_images_per_second}
    wait = limiting_wait(images, sums, **alone) or "compute"
    if wait != "network":
        return wait
    if times.uneven_share > sums / 2:
        return "uneven"
    return "straggler" if (times.shares[STRAGGLER] or 0.0) - times.uneven_share > sums / 2 else wait


def explain(times: RunTimes, config: Config) -> Iterator[str]:
    shares = {name: times.shares[name] or 0.0 for name in times.shares}
    alone = times.loader_images_per_second
    words = {
        "input": f"the input: steps wait {shares['input_wait_fraction']:.0%} of their time for images. Raise "
        f"data.num_threads (now {config.data.num_threads}), pack the images (`bigbatch data pack`) or set data.stage",
        "cores": f"cores: steps wait {shares['input_wait_fraction']:.0%} of their time for images, although the input "
        f"alone delivers {alone or 0:,.0f} images/s. Model and input use the same cores: lower compute.cpu_threads "
        f"(now {config.compute.cpu_threads or 'all cores of the rank'}), or give each rank more cores",
        "straggler": f"a slow rank: the others wait {shares[STRAGGLER]:.0%} of a step for it. The run's last lines "
        "name it, and `bigbatch launch preflight` compares the nodes",
        "uneven": f"uneven shares: {config.batch.global_batch_size // config.batch.microbatch_size} microbatches on "
        f"{times.world_size} ranks, so ranks wait {times.uneven_share:.0%} of a step for those with one more. Use a "
        "number of ranks that divides the microbatches",
        "network": f"communication: steps wait {shares['exposed_communication_fraction']:.0%} of their time for sums. "
        "`bigbatch comm bench` measures the link, `bigbatch comm tune` the fusion plan",
        "compute": "the model's own work. `bigbatch doctor --config` tries what could make it faster",
    }
    yield f"limited by {words[limit_of_run(times)]}."
    if times.slow_steps:
        steps = ", ".join(map(str, times.slow_steps[:5]))
        yield (
            f"{len(times.slow_steps)} reports have less than {SLOW:.0%} of the median rate, at steps {steps}"
            f"{' ...' if len(times.slow_steps) > 5 else ''}: look at what else used the machine or the storage then."
        )
    total = times.step_seconds + times.other_seconds
    yield (
        f"{times.step_seconds:,.0f} of {total:,.0f} s were training steps, {times.other_seconds:,.0f} s the start, "
        "evaluations and checkpoints."
    )


def _table(times: RunTimes) -> Table:
    table = Table("part of a step", "%", title="Where the step's time goes")
    waits = [times.shares[name] for name in SHARES]
    for name, share in zip(SHARES.values(), waits, strict=True):
        table.add_row(name, "not measured" if share is None else f"{share:.1%}")
    table.add_row("computing and the rest", f"{1 - sum(share or 0.0 for share in waits):.1%}")
    table.columns[1].justify = "right"
    return table


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for each in records if (value := _number(each, name)) is not None]
    return median(values) if values else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch doctor",
        usage="bigbatch doctor RUN [--json]",
        description="Say what limits a finished or running run, by the records in its folder. Starts nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=as_path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
