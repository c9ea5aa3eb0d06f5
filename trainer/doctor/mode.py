"""compute.mode=auto: at a job's first start, time the ways to compute its update, and use the fastest. Collective."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from bigbatch import __version__
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.conditions import device_name
from bigbatch.comm.tuning.own_record import as_text, difference_of, find_record, from_first, store_record
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.doctor.budget import (
    MAX_SECONDS,
    MIN_IMAGES,
    SHARE_OF_RUN,
    TrialTime,
    seconds_needed,
    trial_limit,
)
from bigbatch.trainer.doctor.mode_trials import ModeTrials
from bigbatch.trainer.doctor.modes import (
    Mode,
    Modes,
    Trial,
    best_and_next,
    describe,
    describe_refusals,
    find_modes,
    merge_ranks,
    read_mode,
    with_mode,
    write_mode,
)
from bigbatch.trainer.input.report import AUGMENTATIONS
from bigbatch.trainer.machine.gpu_driver import driver_version

FORMAT = "bigbatch compute mode 2"
FEW_IMAGES = 32
"""Images per rank and step at which a CUDA graph made ResNet-50 several times as fast (docs/gpu.md)."""
KEYS = (
    *("model.name", "model.options", "model.frozen", "data.image_size", "data.train_sizes", "data.num_classes"),
    *(f"augment.{name}" for name in AUGMENTATIONS),
    *("batch.bn_span", "batch.virtual_ranks", "compute.channels_last"),
    *("compute.cudnn_benchmark", "compute.recomputed_blocks", "optimizer.name", "optimizer.options"),
    *("optimizer.precision", "optimizer.sharded", "optimizer.clip_norm", "optimizer.loss", "optimizer.loss_options"),
    *("optimizer.ema_decay", "comm.buffers"),
)
"""Keys on which the speed of a mode depends, besides those that the mode sets."""


@dataclass(frozen=True)
class ChosenMode:
    config: Config
    note: str = ""
    """Line for the log: the mode, and why it was chosen."""
    text: str = ""
    """Record of the choice, which the run stores in its folder; empty if there is none."""


def is_on_gpus(communicator: Communicator) -> bool:
    """Return whether all ranks are on GPUs, where a step can be captured; the same answer on all."""
    name = communicator.backend.name
    return name == "nccl" or (name == "single" and communicator.device.type == "cuda")


def choose_mode(
    config: Config,
    communicator: Communicator,
    *,
    num_samples: int,
    kept: Path | None,
    folder: Path | None,
    is_dry_run: bool = False,
    measures: Callable[[Communicator], bool] = is_on_gpus,
    start_trials: Callable[..., ModeTrials] = ModeTrials,
    clock: Callable[[], float] = time.monotonic,
) -> ChosenMode:
    """Return the config with the fastest mode that computes the same update, or unchanged. Collective.

    num_samples: images of an epoch, over all ranks. Rank 0 reads a stored record and sends it to the others: kept, the
    record of a run that may be resumed, or else one in folder (None: there is none). Without a valid record all
    ranks try the same modes at the same time, and rank 0 stores the result. A failed trial does not end the run. Dry
    runs and short runs try nothing. Raises: PeerLostError.
    """
    if config.compute.mode != "auto" or not measures(communicator):
        return ChosenMode(config)
    prefix = "compute.mode auto: "
    if config.run.reproducible:
        return ChosenMode(config, f"{prefix}as stated, since other modes change the bits that run.reproducible keeps")
    ranks = communicator.world_size
    modes = find_modes(config, world_size=ranks)
    if not modes.has_others:
        return ChosenMode(config, f"{prefix}{modes.stated}, as stated: no other mode fits these settings")
    facts = _collect_facts(config, communicator, modes)
    digest = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{digest}.json" if folder else None
    trial_time = _trial_time(config, num_samples=num_samples, world_size=ranks)
    record, note, earlier = _find(
        communicator,
        kept=kept,
        path=path,
        check=partial(_require_valid, facts=facts, modes=modes),
        trial_time=trial_time,
    )
    if record is None and trial_time.is_too_short:
        few = f"{trial_time.num_images:,} images of each GPU, fewer than {MIN_IMAGES:,}, are too few for trials"
        return ChosenMode(config, f"{prefix}{note}{modes.stated}, as stated: {few}")
    if record is None and is_dry_run:
        limits = f"{SHARE_OF_RUN:.0%} of the run's time, {MAX_SECONDS:g} s at most"
        return ChosenMode(config, f"{prefix}{note}the first start would time {modes}, for {limits}")
    if record is None:
        trials = start_trials(config, modes=modes, device=communicator.device)
        try:
            best, tried, took = _try_all(modes, trials, communicator, trial_time=trial_time, clock=clock)
        finally:
            trials.close()
        record, stored = _record(
            communicator, path, facts=facts, found=write_mode(modes, tried, best=best), earlier=earlier
        )
        note += f"measured in {took:.0f} s and {stored}{describe_refusals(tried)}"
    mode = read_mode(record, modes=modes)
    if modes.leaves_graph_out:
        note += graph_hint(mode, images_per_rank=facts["images_per_rank"])
    chosen = with_mode(config, mode, world_size=ranks)
    return ChosenMode(chosen, f"{prefix}{describe(record, mode=mode, modes=modes)}; {note}", as_text(record))


def graph_hint(mode: Mode, *, images_per_rank: int) -> str:
    """Return a hint that a CUDA graph, not tried with several ranks, may be faster; "" if it would gain little."""
    if mode.cuda_graph or images_per_rank > FEW_IMAGES:
        return ""
    return (
        f"; no CUDA graph is tried with several ranks: with {images_per_rank} images of each GPU in a step, "
        "compute.cuda_graph=true may be several times as fast"
    )


def _trial_time(config: Config, *, num_samples: int, world_size: int) -> TrialTime:
    num_steps = config.run.epochs * (num_samples // config.batch.global_batch_size)
    return TrialTime(
        num_steps * _images_per_rank(config, world_size=world_size),
        config.comm.timeout_seconds / 2 if world_size > 1 else math.inf,
    )


def _images_per_rank(config: Config, *, world_size: int) -> int:
    """Return the images per step of the rank that has the most."""
    return config.batch.microbatch_size * accumulation_steps(config.batch, world_size=world_size)


def _collect_facts(config: Config, communicator: Communicator, modes: Modes) -> dict[str, Any]:
    """Collect the facts of config and ranks on which the choice of a mode depends, as JSON values. Collective."""
    device = communicator.device
    gpus = communicator.gather_text(f"{device_name(device)}, driver {driver_version(device)}")
    facts = {
        "gpus": sorted(set(gpus)),
        "backend": communicator.backend.name,
        "versions": {"bigbatch": __version__, "torch": torch.__version__},
        "images_per_rank": _images_per_rank(config, world_size=communicator.world_size),
        "keys": {key: lookup(config, key) for key in KEYS},
        "stated": asdict(modes.stated),
        "keeps": sorted(config.compute.mode_keeps),
        "can": [modes.sizes, modes.can_capture, modes.can_compile],
    }
    return dict(json.loads(json.dumps(facts)))  # tuples become lists, as in the file


def _find(
    communicator: Communicator,
    *,
    kept: Path | None,
    path: Path | None,
    check: Callable[[dict[str, Any]], object],
    trial_time: TrialTime,
) -> tuple[dict[str, Any] | None, str, dict[str, Any] | None]:
    """Return rank 0's record, its origin or the faults of the files, and an earlier record to measure again."""
    record, note, earlier = None, "", None
    if communicator.rank == 0:
        record, note = find_record([kept] if kept else [], form=FORMAT, check=check)
        if record is None:
            record, more = find_record([path] if path else [], form=FORMAT, check=check)
            note += more
            if record is not None and _has_time_for_more(record, trial_time):
                record, earlier = None, record
                note += "; tried once more, since a trial was cut short or left out; "
    record, note, earlier = from_first(communicator, [record, note, earlier])
    return record, note, earlier


def _has_time_for_more(record: Mapping[str, Any], trial_time: TrialTime) -> bool:
    """Return whether this start has time for the trials that the start of a record could not finish."""
    needed = record["needs_seconds"]
    return (
        needed is not None
        and not trial_time.is_too_short
        and trial_time.allowed(record["images_per_second"]["stated"])[0] >= needed
    )


def _record(
    communicator: Communicator,
    path: Path | None,
    *,
    facts: Mapping[str, Any],
    found: dict[str, Any],
    earlier: dict[str, Any] | None,
) -> tuple[dict[str, Any], str]:
    """Return rank 0's new record, or the earlier one if its mode was faster; and whether it was stored."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {"format": FORMAT, "date": date, **facts, **found}
    if earlier:
        was_cut = earlier["is_cut"]
        record = max(record, earlier, key=lambda each: float(each["images_per_second"]["mode"]))
        record |= {key: found[key] for key in ("is_cut", "needs_seconds")}
        if was_cut and found["is_cut"]:  # code that the earlier start compiled did not help
            record["needs_seconds"] = None
    record, stored = from_first(communicator, [record, store_record(path, record) if communicator.rank == 0 else ""])
    return record, stored


def _require_valid(record: dict[str, Any], *, facts: Mapping[str, Any], modes: Modes) -> None:
    """Raise ValueError, KeyError or TypeError for a record that does not hold here."""
    if difference := difference_of(record, dict(facts)):
        raise ValueError(f"it is of another GPU, job or config: {difference}")
    needed = record["needs_seconds"]
    if type(record["is_cut"]) is not bool or not (needed is None or (type(needed) is float and needed >= 0)):
        raise ValueError("it is damaged")
    read_mode(record, modes=modes)


def _try_all(
    modes: Modes, trials: ModeTrials, communicator: Communicator, *, trial_time: TrialTime, clock: Callable[[], float]
) -> tuple[Mode, dict[Mode, Trial], float]:
    """Try modes until none is left or the next does not fit; return the best, all trials, and the seconds. Collective.

    All ranks time the same mode at the same time.
    """
    start, used = clock(), 0.0
    tried: dict[Mode, Trial] = {}
    while True:
        best, mode = best_and_next(modes, tried)
        if mode is None:
            return best, tried, used
        allowed, why = trial_time.allowed(tried[modes.stated].images_per_second if tried else 0.0)
        left, needed = max(0.0, allowed - used), seconds_needed(mode)
        if tried and left < needed:
            reason = f"it needs {needed:g} s, and {left:.0f} s are left of {allowed:.0f} s, {why}"
            return best, {**tried, mode: Trial(refusal=reason, needs_seconds=used + needed)}, used
        limit = trial_limit(mode, left=left) if tried else trial_time.first_limit(mode)
        mine = trials(mode, limit_seconds=limit, meet=partial(communicator.gather_text, ""))
        answers = communicator.gather([clock() - start, asdict(mine)])
        used = max(answer[0] for answer in answers)
        trial = merge_ranks([Trial(**answer[1]) for answer in answers])
        tried[mode] = replace(trial, needs_seconds=allowed) if trial.is_cut else trial
