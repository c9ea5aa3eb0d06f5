"""Explain a run's out-of-memory error: the largest microbatch that fits, and options for the same global batch."""

import re
from dataclasses import replace
from functools import partial

import torch

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.checks import RESIDUAL_BLOCKS
from bigbatch.trainer.config.optimizer import WHOLE_MATRIX
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.config.sections import MODE_KEYS
from bigbatch.trainer.machine.host import free_memory
from bigbatch.trainer.memory.largest_batch import SizeSearch, fits_memory, largest_fitting, sizes_within

SEARCH_SECONDS = 60.0
WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
"""Patterns in torch's messages: WANTED in those of all allocators, FREE in those of CUDA's."""


def explain(config: Config, reason: str, *, stated: Config, world_size: int, device: torch.device) -> str:
    """Return the error line, after a search on this rank only; free the run's tensors before.

    config: of the run, whose mode may be chosen. stated: the user's. reason: torch's message.
    The other ranks wait meanwhile, so no try begins after half of comm.timeout_seconds.
    """
    free_memory(device)
    batch = config.batch
    # eager: compilation at each size would exceed the time of the search, and compiled code takes less memory
    tried = replace(config, compute=replace(config.compute, compile=None, compile_fallback=False))
    found = largest_fitting(
        sizes_within(batch, most=batch.microbatch_size - 1),
        lambda size: fits_memory(tried, size, device=device, num_microbatches=2),
        is_last_near=True,
        seconds=min(SEARCH_SECONDS, config.comm.timeout_seconds / 2),
    )
    wanted, free = WANTED.search(reason), FREE.search(reason)
    amounts = ""
    if wanted:
        amounts = f" ({wanted[1]} more were wanted" + (f", {free[2]} of {free[1]} were free)" if free else ")")
    start = f"out of memory: batch.microbatch_size={batch.microbatch_size} does not fit on {device}{amounts}: "
    # freed memory of a CPU's run is fragmented, so a fresh start may fit more
    at_least = "at least " if device.type == "cpu" else ""
    return start + _remedy(config, found, world_size=world_size, at_least=at_least) + _mode_remedy(config, stated)


def _mode_remedy(config: Config, stated: Config) -> str:
    """Return how to undo the choice of compute.mode=auto; "" if it changed nothing."""
    words = "; compute.mode=auto chose this mode: --compute.mode eager takes that of the config"
    return words if any(lookup(config, key) != lookup(stated, key) for key in MODE_KEYS) else ""


def _remedy(config: Config, found: SizeSearch, *, world_size: int, at_least: str) -> str:
    if found.size is None and not found.is_complete:
        return "there was no time to try smaller ones; halve it and batch.bn_span"
    if found.size is None:
        ways = ["a smaller model.name or data.image_size", "optimizer.precision bf16"]
        if config.optimizer.name not in WHOLE_MATRIX:  # their fp32 matrices take what sharded state saves
            ways.append("optimizer.sharded on more ranks")
        return f"no smaller one fits; choose {', '.join(ways[:-1])}, or {ways[-1]}"
    words = "fits" if found.is_complete else "fits, and there was no time to try all larger ones"
    line = f"{at_least}{found.size} {words}; {propose(config, found.size, world_size=world_size)}"
    num_blocks = RESIDUAL_BLOCKS.get(config.model.name, 0)
    if config.compute.recomputed_blocks < num_blocks:
        line += f"; --compute.recomputed_blocks, up to {num_blocks}, also takes less memory"
    return line


def propose(config: Config, fitting: int, *, world_size: int) -> str:
    """Return options that keep the global batch with a microbatch of at most fitting, and what they change."""
    batch = config.batch
    steps_of = partial(_accumulation_steps, config, world_size=world_size)
    # the largest of those with the most equal shares of the ranks
    legal = {size: steps_of(size, bn_span=batch.bn_span) for size in reversed(sizes_within(batch, most=fitting))}
    if options := {size: steps for size, steps in legal.items() if steps}:
        size = min(options, key=lambda each: each * options[each])
        shares = batch.bn_span // size
        spread = f", and each ghost batch lies on {shares} ranks" if shares > 1 else ""
        return _option(f"--batch.microbatch_size {size}", options[size], config) + spread
    # none keeps the ghost batches: then the largest that changes them, if possible with equal shares
    divisors = [size for size in range(fitting, 0, -1) if batch.global_batch_size % size == 0]
    legal = {size: steps_of(size, bn_span=size) for size in divisors}
    if options := {size: steps for size, steps in legal.items() if steps}:
        size = min(options, key=lambda each: each * options[each] * world_size > batch.global_batch_size)
        return (
            _option(f"--batch.microbatch_size {size} --batch.bn_span {size}", options[size], config)
            + f", but batch norm takes its statistics over {size} images instead of {batch.bn_span}"
        )
    return "this config allows no microbatch that small: choose a smaller model.name or data.image_size"


def _option(words: str, steps: int, config: Config) -> str:
    plural = "s" if steps > 1 else ""
    return f"with {words} ({steps} accumulation step{plural}) the global batch stays {config.batch.global_batch_size}"


def _accumulation_steps(config: Config, size: int, *, bn_span: int, world_size: int) -> int | None:
    """Return the accumulation steps; None if that microbatch is not legal."""
    try:
        batch = replace(config.batch, microbatch_size=size, bn_span=bn_span)
        replace(config, batch=batch)  # checks it
        return accumulation_steps(batch, world_size=world_size)
    except ConfigError:
        return None
