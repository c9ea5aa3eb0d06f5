"""Read the records of a finished run, and convert them to MLPerf's log events."""

from dataclasses import dataclass
from typing import Any

from bigbatch.errors import RunFolderError
from bigbatch.tools.mlperf.reference import Event
from bigbatch.trainer.config.schedule import decay_epochs
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.folder.folder import RunDir, load_run_config, read_records
from bigbatch.trainer.report.cost import durations
from bigbatch.words import has_numbers

NUMBERS_OF_JOB = ("world_size", "accumulation_steps", "steps_per_epoch", "train_samples", "eval_samples")
"""Numbers in the record of a start that the rules and the log need."""


@dataclass(frozen=True)
class FinishedRun:
    """Config and records of a run folder."""

    rundir: RunDir
    config: Config
    start: dict[str, Any]
    """The record of the first start."""
    evaluations: tuple[dict[str, Any], ...]
    job: dict[str, Any]
    """Facts that the config lacks: ranks, device, steps per epoch, images."""


def read_run(rundir: RunDir) -> FinishedRun:
    """Read a run folder. Raises: RunFolderError if it has no evaluated run; ConfigError."""
    config = load_run_config(rundir, [TRUST], prog="bigbatch verify")  # nothing is imported
    records, at = [], None
    for record, seconds in durations(read_records(rundir.metrics)):
        at = float(record["time"]) if at is None else at + seconds
        records.append(record | {"time": at})
    starts = [record for record in records if record["kind"] == "start"]
    evaluations = tuple(
        record
        for record in records
        if record["kind"] == "eval" and has_numbers(record, "step", "epoch", "top1", "seconds")
    )
    job = starts[0].get("job") if starts else None
    if not (isinstance(job, dict) and has_numbers(job, *NUMBERS_OF_JOB)):
        raise RunFolderError(f"{rundir.metrics} does not say when and how the run started: train it with this version")
    if not evaluations:
        raise RunFolderError(f"{rundir.metrics} holds no evaluation yet: train on, at least for one")
    return FinishedRun(rundir, config, starts[0], evaluations, job)


def mlperf_events(run: FinishedRun, *, target_top1: float, division: str) -> list[Event]:
    """Return the run as MLPerf's events, up to the evaluation that reached the target.

    The time before the run's first record is unknown, so initialization takes no time here. No cache was cleared.
    """
    config, job, start = run.config, run.job, float(run.start["time"])
    facts = {
        "submission_benchmark": "resnet",
        "submission_org": "bigbatch",
        "submission_division": division,
        "submission_status": "research",
        "submission_platform": f"{job['world_size']} x {job.get('device')}",
        "cache_clear": False,
        "seed": config.run.seed,
        "global_batch_size": config.batch.global_batch_size,
        "gradient_accumulation_steps": job["accumulation_steps"],
        "train_samples": job["train_samples"],
        "eval_samples": job["eval_samples"],
        "model_bn_span": config.batch.bn_span,
        "opt_name": config.optimizer.name,
        **(_lars_facts(run) if config.optimizer.name == "lars" else {}),
    }
    return [
        Event("init_start", None, start, {}, "start"),
        *(Event(key, value, start, {}) for key, value in facts.items()),
        Event("init_stop", None, start, {}, "end"),
        Event("run_start", None, start, {}, "start"),
        *_evaluation_events(run, target_top1=target_top1),
    ]


def _lars_facts(run: FinishedRun) -> dict[str, Any]:
    optimizer, schedule, run_config = run.config.optimizer, run.config.schedule, run.config.run
    return {
        "lars_opt_base_learning_rate": schedule.base_lr,
        "lars_opt_end_learning_rate": schedule.end_lr,
        "lars_opt_learning_rate_decay_poly_power": (schedule.options or {}).get("power"),
        "lars_opt_learning_rate_decay_steps": round(
            decay_epochs(schedule, epochs=run_config.epochs) * run.job["steps_per_epoch"]
        ),
        "lars_opt_learning_rate_warmup_epochs": schedule.warmup_epochs,
        "lars_epsilon": (optimizer.options or {}).get("eps"),
        "lars_opt_momentum": optimizer.momentum,
        "lars_opt_weight_decay": optimizer.weight_decay,
    }


def _evaluation_events(run: FinishedRun, *, target_top1: float) -> list[Event]:
    """Return the events of each block of training, of the evaluation after it, and of the end."""
    events: list[Event] = []
    before, since, status = 0, float(run.start["time"]), "aborted"
    for record in run.evaluations:
        epoch, end = round(record["epoch"]), float(record["time"])
        # time and seconds come from two clocks: an evaluation must not begin before the one before has ended
        begin = max(since, end - record["seconds"])
        block = {"first_epoch_num": before + 1, "epoch_count": epoch - before}
        events += [
            Event("block_start", None, since, block, "start"),
            Event("block_stop", None, begin, block, "end"),
            Event("eval_start", None, begin, {"epoch_num": epoch}, "start"),
            Event("eval_accuracy", record["top1"], end, {"epoch_num": epoch}),
            Event("eval_stop", None, end, {"epoch_num": epoch}, "end"),
        ]
        before, since = epoch, end
        if record["top1"] >= target_top1:
            status = "success"
            break
    return [*events, Event("run_stop", None, since, {"status": status}, "end")]
