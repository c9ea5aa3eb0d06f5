"""compute.mode=auto: microbatch, compilation and CUDA graph of a run on GPUs, by a rule. No trials."""

from typing import Any, NamedTuple

import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import expandable_segments
from bigbatch.trainer.config.batch import accumulation_steps, ranks_per_ghost
from bigbatch.trainer.config.optimizer import CROSS_ENTROPY
from bigbatch.trainer.config.schema import Config, describe_step, try_values
from bigbatch.trainer.config.sections import RESNETS
from bigbatch.words import count

MODELS = (*RESNETS, "resnet9")
"""Models that the rule compiles and captures: they draw no random numbers, so that no microbatch changes the update."""
MAX_IMAGES = 256
"""Most images of a microbatch that the rule makes."""
MAX_CAPTURED_IMAGES = 128
"""Most images per GPU and step for which the rule captures the step: then launches take longer than kernels."""
KEPT_BYTES = {"resnet18": 22e6, "resnet34": 32e6, "resnet50": 86e6, "resnet101": 127e6, "resnet152": 177e6}
"""Model -> bytes that an eager forward in fp32 keeps for backward, per image of 224 x 224 pixels."""
MEMORY_SHARE = 0.5
"""Most of a GPU's memory for these bytes: weights, gradients, workspace and input need memory, too."""
NEEDS_WHOLE = ("fp32", "tf32")
"""Precisions that keep 4 bytes per number; the others keep 2."""


class ComputeMode(NamedTuple):
    """A config whose mode is decided, and a line for the log; "" if there was nothing to decide."""

    config: Config
    note: str = ""


def choose_in_job(config: Config, communicator: Communicator) -> ComputeMode:
    """Return the config with the mode of this job on GPUs, equal on all ranks. Collective."""
    name = communicator.transport.backend.name
    if name not in ("nccl", "single"):
        return ComputeMode(config)
    own = [_memory_bytes(communicator.device), expandable_segments()]
    # gathered, as they may differ: all ranks choose the same
    memory_bytes, segments = zip(*communicator.gather(own), strict=True)
    found = next(filter(None, segments), "") if name == "nccl" else ""
    return choose_mode(
        config,
        world_size=communicator.world_size,
        memory_bytes=min(memory_bytes),
        uncapturable=f"NCCL may hang with {found}" if found else "",
    )


def choose_as_launched(config: Config, device: torch.device, *, world_size: int) -> ComputeMode:
    """Return the config with the mode of a running job of such GPUs, for a rank that joins it. Not collective.

    world_size: of the job as it was launched. It chose by that number, and keeps its mode if ranks are lost.
    """
    if config.compute.mode == "eager" or device.type != "cuda" or config.comm.backend not in ("auto", "nccl"):
        return ComputeMode(config)
    return choose_mode(config, world_size=world_size, memory_bytes=_memory_bytes(device))


def choose_mode(
    config: Config, *, world_size: int, memory_bytes: int | None = None, uncapturable: str = ""
) -> ComputeMode:
    """Return the config with the mode of world_size GPUs, and the reasons in one line. Keys that the user states stay.

    memory_bytes: of the smallest GPU; None if it is unknown, which is no limit. uncapturable: why these GPUs must not
    capture; "" if they may. The result states compute.mode=eager, so that a run that starts from it keeps its mode.
    Raises: ConfigError if the ranks cannot share the batch.
    """
    if config.compute.mode == "eager":
        return ComputeMode(config)
    if config.run.reproducible:
        why = "as stated, since other modes change the bits that run.reproducible keeps"
        return ComputeMode(config, f"compute.mode auto: {why}")
    if config.model.name not in MODELS:
        why = f"as stated, since auto changes only steps of {', '.join(MODELS)}"
        return ComputeMode(config, f"compute.mode auto: {describe_mode(config)}, {why}")
    images = config.batch.microbatch_size * accumulation_steps(config.batch, world_size=world_size)
    share, most = f"{images:,} images per GPU and step", MAX_IMAGES
    if isinstance(config.compute.mode, int) and config.compute.mode < images:
        images = config.compute.mode
        share, most = f"as with {images:,} images per GPU and step", min(most, images)
    size, why = _microbatch_size(config, most=most, world_size=world_size, memory_bytes=memory_bytes)
    whys = [why]
    values = {"batch.microbatch_size": size, "compute.mode": "eager"}
    if config.compute.compile is None:
        compiled = {"compute.compile": "default", "compute.compile_fallback": True}
        if why_not := _why_kept(config, "compute.compile") or _refusal(
            config, values | compiled, world_size=world_size
        ):
            whys.append(f"not compiled: {why_not}")
        else:
            values |= compiled
    if not config.compute.cuda_graph:
        captured = {"compute.cuda_graph": True}
        if images > MAX_CAPTURED_IMAGES:
            whys.append(f"no CUDA graph: {share}, more than {MAX_CAPTURED_IMAGES}")
        elif why_not := uncapturable or _why_not_captured(config, values | captured, world_size=world_size):
            whys.append(f"no CUDA graph: {why_not}")
        else:
            whys.append(f"{share}, at most {MAX_CAPTURED_IMAGES}")
            values |= captured
    chosen = try_values(config, values, world_size=world_size)
    assert isinstance(chosen, Config), chosen
    return ComputeMode(chosen, f"compute.mode auto: {'; '.join((describe_mode(chosen), *whys))}")


def describe_mode(config: Config) -> str:
    """Return the microbatch, and how its step is computed."""
    how = describe_step(compiles=config.compute.compile is not None, has_graph=config.compute.cuda_graph)
    return f"microbatch {config.batch.microbatch_size}, {how}"


def _microbatch_size(config: Config, *, most: int, world_size: int, memory_bytes: int | None) -> tuple[int, str]:
    """Return the microbatch and why: the stated one, or more whole ghost batches in an equal part of a rank's share."""
    batch, run = config.batch, config.run
    own = batch.microbatch_size
    if why := (
        _why_kept(config, "batch.microbatch_size")
        or ("several ranks share a ghost batch" if ranks_per_ghost(batch) > 1 else "")
        or ("run.digest_every_steps records each microbatch" if run.digest_every_steps else "")
        or ("run.noise_scale_every_steps compares microbatches" if run.noise_scale_every_steps else "")
    ):
        return own, f"microbatch as in the config: {why}"
    limit = f"at most {most} images"
    if memory_bytes is not None and (fitting := int(MEMORY_SHARE * memory_bytes / _kept_bytes(config))) < most:
        most, limit = fitting, f"at most {fitting} images in {memory_bytes / 1e9:.0f} GB of memory"
    steps = accumulation_steps(batch, world_size=world_size)
    for num in range(max(1, most // own), 1, -1):
        if steps % num:  # the largest share would grow
            continue
        if not _refusal(config, {"batch.microbatch_size": num * own}, world_size=world_size):
            return num * own, f"{count(num * own // batch.bn_span, 'ghost batch')} per microbatch, {limit}"
    why = (
        "it is a GPU's share of a step" if steps == 1 else f"no larger one, of {limit}, divides a GPU's share of a step"
    )
    return own, f"microbatch as in the config: {why}"


def _kept_bytes(config: Config) -> float:
    """Return the bytes that a forward keeps for backward, per image of the largest size; 1 if they are not known."""
    side = max([config.data.image_size, *(size for _, size in config.data.train_sizes or ())])
    whole = KEPT_BYTES.get(config.model.name, 0) * (side / 224) ** 2
    return max(1.0, whole if config.optimizer.precision in NEEDS_WHOLE else whole / 2)


def _why_kept(config: Config, key: str) -> str:
    return f"{key} is stated" if key in config.compute.mode_keeps else ""


def _why_not_captured(config: Config, values: dict[str, Any], *, world_size: int) -> str:
    """Return why a step with these values cannot be captured, or might fail."""
    return (
        _why_kept(config, "compute.cuda_graph")
        or ("run.digest_every_steps reads each step" if config.run.digest_every_steps else "")
        or ("data.train_sizes has several sizes" if len(config.data.train_sizes or ()) > 1 else "")
        or ("" if config.optimizer.loss == CROSS_ENTROPY else f"optimizer.loss={config.optimizer.loss} is not ours")
        or ("run.heal=in_place cannot interrupt it" if config.run.heal == "in_place" and world_size > 1 else "")
        or _refusal(config, values, world_size=world_size)
    )


def _refusal(config: Config, values: dict[str, Any], *, world_size: int) -> str:
    """Return why these values are not legal, without the remedy; "" if they are."""
    changed = try_values(config, values, world_size=world_size)
    return changed.partition(": ")[0] if isinstance(changed, str) else ""


def _memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
