"""A run's introduction, its summary, and hints for a faster run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from bigbatch import __version__
from bigbatch.comm.algorithms.wire import rounding_note
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.parts import load
from bigbatch.trainer.checkpoint.checkpoint import Checkpoint
from bigbatch.trainer.checkpoint.rank_memory import sharded_note
from bigbatch.trainer.checkpoint.sums import summing_algorithms
from bigbatch.trainer.config.batch import shares, uneven
from bigbatch.trainer.config.optimizer import optimizer_notes, precision_notice
from bigbatch.trainer.config.schedule import schedule_notes
from bigbatch.trainer.config.schema import Config, describe_step
from bigbatch.trainer.input.report import InputWait, MeasuredInput, hints, limiting_stage
from bigbatch.trainer.machine.gpu_driver import compute_capability
from bigbatch.trainer.report.cost import Spent
from bigbatch.trainer.report.job_figures import JobFigures
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.window import Totals, straggler_hint
from bigbatch.user_settings import site_settings
from bigbatch.words import count

if TYPE_CHECKING:
    from bigbatch.comm.gradients.grid import Grid


def introduction(
    config: Config, parts: Parts, communicator: Communicator, *, plan: Plan, images: list[int], placement: Sequence[str]
) -> Iterator[str]:
    """Yield the lines to print before the first step.

    images: numbers of those to train on and to validate on. placement: lines on CPU binding and location of the data.
    """
    num_train, num_val = images
    batch, optimizer, division = config.batch, config.optimizer, plan.division
    yield f"{communicator}; device {device_name(communicator.device)}, {optimizer.precision}"
    if communicator.why and communicator.world_size > 1 and not optimizer.sharded:
        yield f"all-reduce {communicator.algorithm}, chosen by comm.algorithm=auto: {communicator.why}"
    yield f"{num_train} training and {num_val} validation images; loader {config.data.loader}"
    spread = f" over {division.ranks_per_ghost} ranks" if division.ranks_per_ghost > 1 else ""
    yield (
        f"global batch {batch.global_batch_size} = {shares(division, batch.microbatch_size)}, batch-norm span "
        f"{batch.bn_span}{spread}; {count(plan.num_steps, 'step')} in {count(config.run.epochs, 'epoch')}"
    )
    if division.used_share < 1:
        yield uneven(division)
    if batch.virtual_ranks is not None:
        yield replayed(batch.virtual_ranks, world_size=communicator.world_size)
    yield from str(parts.reducer.plan).splitlines()
    if communicator.world_size > 1:
        yield from rounding_notes(communicator, parts, is_sharded=optimizer.sharded)
    yield from optimizer_notes(optimizer)
    if optimizer.sharded:
        yield sharded_note(config, parts)
    yield from schedule_notes(config.schedule, epochs=config.run.epochs)
    yield from parts.notes
    if parts.reducer.grid:
        yield _grid_note(parts.reducer.grid, communicator)
    if every := config.run.audit_every_steps:
        who = "each rank computes a microbatch of another rank again"
        if communicator.world_size == 1:
            who = "this rank computes a microbatch twice, which shows single flips only"
        yield f"audits: every {count(every, 'step')} and before each checkpoint {who}"
    if parts.is_captured:
        yield "steps are replayed as CUDA graphs: the waits of ranks for each other are not measured"
    yield from placement
    if optimizer.precision != "fp32" and (
        notice := precision_notice(optimizer.precision, capability=compute_capability(communicator.device))
    ):
        yield notice
    if plan.first_step:
        yield f"resumed after step {plan.first_step}"
    elif config.model.weights:
        heads = load("bigbatch.trainer.models.exchange.heads_of")(parts.model) if config.model.new_head else ()
        with_new = f", with a new last layer, {' and '.join(heads)}" if heads else ""
        yield f"starts from the weights in {config.model.weights}{with_new}"
    if counts := [p.numel() for p in parts.model.parameters() if not p.requires_grad]:
        num_all = sum(p.numel() for p in parts.model.parameters())
        yield f"frozen: {sum(counts):,} of {num_all:,} weights, in {len(counts)} tensors"


def _grid_note(grid: "Grid", communicator: Communicator) -> str:
    is_gpu = communicator.device.type == "cuda"
    threads = "" if is_gpu else f"; {count(torch.get_num_threads(), 'CPU thread')} per rank"
    return (
        f"reproducible: sums of multiples of 2**-{grid.fraction_bits}, of at most {grid.largest:g} for each of "
        f"{grid.num_terms} microbatches{threads}"
    )


def describe_job(
    communicator: Communicator, parts: Parts, *, plan: Plan, num_train: int, num_val: int
) -> dict[str, Any]:
    """Return facts about the job that the config does not state."""
    return {
        "mode": describe_step(compiles=parts.is_compiled, has_graph=parts.is_captured),
        "world_size": communicator.world_size,
        "device": device_name(communicator.device),
        "backend": communicator.transport.backend.name,
        "algorithm": communicator.algorithm,
        "bigbatch": __version__,
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "accumulation_steps": plan.division.most,
        "steps_per_epoch": plan.steps_per_epoch,
        "train_samples": num_train,
        "eval_samples": num_val,
    }


def replayed(virtual_ranks: int, *, world_size: int) -> str:
    """Return the line about virtual ranks, of whose number the run replays the updates."""
    work, rest = divmod(virtual_ranks, world_size)
    each = "" if rest else f", each does the work of {work}"
    return f"replays the updates of {count(virtual_ranks, 'rank')}: {world_size} here{each}"


def rounding_notes(communicator: Communicator, parts: Parts, *, is_sharded: bool) -> list[str]:
    """Return the log lines about how gradients are rounded in sums over ranks."""
    note = rounding_note(
        ("native",) if is_sharded else summing_algorithms(communicator),  # the backend's own reduce-scatter
        communicator.wire,
        dtype=parts.reducer.buffers[0].dtype,
        backend=communicator.transport.backend,
        num_nodes=communicator.connection.topology.num_nodes,
    )
    return [note] if note else []


@dataclass(frozen=True)
class Ending:
    """What a run knows at its end, beside its totals."""

    ended_by: str
    measured: MeasuredInput | None
    skipped: Mapping[str, str]
    """Bad images of all starts, with the reason."""
    job: JobFigures
    """Figures of all runs of the job: interruptions end a run, and the job continues in the next one."""
    figures: Mapping[str, Any]
    """Those of observers, such as the noise scale."""
    is_healed: bool = False


def make_summary(
    totals: Totals,
    config: Config,
    ending: Ending,
    *,
    communicator: Communicator,
    plan: Plan,
    best: Checkpoint | None,
    spent: Spent,
) -> dict[str, Any]:
    """Return the contents of summary.json. Seconds, rates and shares are of the job; null if it made no step.

    totals: of the job's last run. spent: cost of all starts.
    """
    job = ending.job
    whole = job.total(totals)
    return {
        "top1": totals.last_evaluation["top1"],
        "top5": totals.last_evaluation["top5"],
        **({"metrics": own} if (own := totals.last_evaluation.get("metrics")) else {}),
        **({"worst_classes": worst} if (worst := totals.last_evaluation.get("worst_classes")) else {}),
        "best_top1": best.top1 if best else totals.last_evaluation["top1"],
        "ended_by": ending.ended_by,
        "epochs": (plan.first_step + totals.steps) // plan.steps_per_epoch,
        "steps": plan.first_step + totals.steps,
        "resumed_after_step": plan.first_step if job.first_step is None else job.first_step,
        "global_batch_size": config.batch.global_batch_size,
        "world_size": communicator.world_size,
        "num_nodes": len({communicator.connection.control.host_of(rank) for rank in range(communicator.world_size)}),
        **speed(whole, ending.measured, global_batch_size=config.batch.global_batch_size),
        **job.summary(),
        "energy_joules": spent.joules,
        "gpu_hours": spent.rank_hours if communicator.device.type == "cuda" else None,
        "seconds": job.seconds,
        "total_seconds": 3600 * spent.hours,
        "skipped_images": len(ending.skipped),
        "skipped": list(ending.skipped.values()),
        "backend": communicator.transport.backend.name,
        **_sums(config, communicator),
        **ending.figures,
        "loader": config.data.loader,
        "precision": config.optimizer.precision,
        "device": device_name(communicator.device),
        "torch": torch.__version__,
        **({"site": site} if (site := site_settings()) else {}),
        "commit": source_commit() or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }


def _sums(config: Config, communicator: Communicator) -> dict[str, str]:
    """Return the algorithm that summed the gradients, and why it was chosen."""
    if config.optimizer.sharded:
        return {"algorithm": "reduce-scatter", "algorithm_why": "optimizer.sharded"}
    stated = f"comm.algorithm={config.comm.algorithm}"
    return {
        "algorithm": communicator.algorithm,
        "algorithm_why": f"{stated}: {communicator.why}" if communicator.why else stated,
    }


def speed(totals: Totals, measured: MeasuredInput | None, *, global_batch_size: int) -> dict[str, Any]:
    """Return rates over all ranks, and shares of the step time; None if nothing was measured."""

    def per_second(amount: float, *, without: float = 0.0) -> float | None:
        return amount / (totals.step_seconds - without) if totals.steps else None

    images, later = totals.steps * global_batch_size, totals.step_seconds - totals.first_report_seconds
    # of the steps after the first report, as straggler_seconds; None or 0 if there were none
    straggled = totals.straggler_seconds / later if later else per_second(0.0)
    return {
        "images_per_second": per_second(images),
        "compute_images_per_second": per_second(images, without=totals.input_wait_seconds),
        "loader_images_per_second": measured.rates["loader"] if measured else None,
        "input_wait_fraction": per_second(totals.input_wait_seconds),
        "input_limit": limiting_stage(measured.rates) if measured else None,
        "exposed_communication_fraction": per_second(totals.exposed_seconds) if totals.measures_waits else None,
        "straggler_fraction": straggled if totals.measures_waits else None,
    }


def make_hints(
    totals: Totals,
    config: Config,
    *,
    measured: MeasuredInput | None,
    host_of: Callable[[int], str],
    used_share: float = 1.0,
    is_healed: bool = False,
) -> list[str]:
    """Return hints for a run that waits for images or slow ranks; none if it made no step. is_healed: as for hints.

    used_share: as Division.used_share; in the rest of the time ranks wait because of uneven shares, not slow ranks.
    """
    if not totals.steps:
        return []
    found = speed(totals, measured, global_batch_size=config.batch.global_batch_size)
    waited = InputWait(
        wait_fraction=found["input_wait_fraction"],
        compute_images_per_second=found["compute_images_per_second"],
        steps=totals.steps,
    )
    slow = totals.measures_waits and straggler_hint(
        found["straggler_fraction"] - (1 - used_share), totals.lag_seconds_P, host_of=host_of
    )
    was_probed = config.data.probe_seconds > 0
    return [*hints(waited, measured, was_probed=was_probed, is_healed=is_healed), *([slow] if slow else [])]


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with a rank's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({count(torch.get_num_threads(), 'thread')} per rank)"
