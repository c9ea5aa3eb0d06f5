"""Compile a model, on all ranks or on none."""

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from psutil import virtual_memory
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.cores import usable_cores
from bigbatch.errors import ComputeError
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.machine.limits import memory_left
from bigbatch.trainer.models.regions import compile_failure, compile_regions_, restore_regions_
from bigbatch.user_settings import set_compile_workers

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""compute.compile -> torch.compile's mode. Its own CUDA graphs would end at each region, and own gradients' memory."""
MAX_SECONDS = 3600.0
"""Most time that ranks wait for others to compile."""
MAX_WORKERS = 32
"""Most processes of torch's compiler for one rank; torch's own bound."""
WORKER_BYTES = 2**30
"""Memory that a process of torch's compiler may need."""


def compile_(
    config: Config, model: nn.Module, communicator: Communicator, *, logits: Callable[[int, int], Tensor]
) -> list[str]:
    """Compile the model as compute.compile asks, in place; return lines for the log. Collective.

    logits: logits_of_noise of the model. Raises: ComputeError, on all ranks alike, if one of them cannot compile.
    """
    mode = config.compute.compile
    assert mode is not None
    if communicator.rank == 0:
        print("compiling the model: minutes at first, less with what is kept of it", file=sys.stderr, flush=True)
    is_alone = communicator.world_size == 1
    # the first rank of each host compiles; then the others load its code from the cache that they share. Its keys hold
    # the GPU's index: 0 in `bigbatch train` over NCCL; other ranks that see all GPUs compile, all at once
    is_first = is_alone or communicator.env.local_rank == 0
    run_once = partial(_run_once, config, model, communicator.device, logits)
    set_compile_workers(most_workers(1 if is_first else communicator.env.local_size - 1))
    compile_regions_(model, mode=MODES[mode])

    def attempt(*, is_own_turn: bool) -> str:
        own = compile_failure(run_once) if is_own_turn else ""
        # if one rank fails, all do: all ranks must train by the same code
        texts = communicator.connection.control.gather(own, what="compiling", timeout_seconds=MAX_SECONDS)
        return own if is_alone else next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")

    failure = attempt(is_own_turn=is_first)
    if not (failure or is_alone):
        failure = attempt(is_own_turn=not is_first)
    if not failure:
        return []
    if not config.compute.compile_fallback:
        raise ComputeError(
            f"compute.compile={mode}: {failure}; set compute.compile=null, or "
            "compute.compile_fallback=true to continue without it"
        )
    restore_regions_(model)
    return [f"not compiled: {failure}"]


def most_workers(num_ranks: int) -> int:
    """Return how many processes may compile for this rank if num_ranks of its host do so, by cores and memory."""
    free = min(memory_left(), virtual_memory().available)
    most = min(len(usable_cores()), free / WORKER_BYTES)
    return max(1, min(MAX_WORKERS, int(most / num_ranks)))


def _run_once(config: Config, model: nn.Module, device: torch.device, logits: Callable[[int, int], Tensor]) -> None:
    """Run what training will run, on noise: forward and backward of a microbatch of each size, and an evaluation.

    model.forward(...) and autograd.grad call no hooks, so statistics and gradients stay as they are.
    """
    data, count = config.data, config.batch.microbatch_size
    weights = [p for p in model.parameters() if p.requires_grad]
    # draws in training, such as dropout's, must not depend on this trial
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.train()
        for size in sorted({size for _, size in data.train_sizes or ((0, data.image_size),)}):
            logits_BK = logits(count, size)
            labels_B = torch.zeros(len(logits_BK), dtype=torch.int64, device=logits_BK.device)
            torch.autograd.grad(F.cross_entropy(logits_BK, labels_B), weights)
        model.eval()
        with torch.no_grad():
            logits(count, data.image_size)
        model.train()
