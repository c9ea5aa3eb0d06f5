"""How a model's forward and backward are computed, and whether this machine can compile them."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.errors import ComputeError, ConfigError
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import ComputeConfig
from bigbatch.trainer.models.regions import compile_regions_, recompute_, restore_regions_
from bigbatch.trainer.step.execution import CudaCapture, CudaGraphExecution, EagerExecution, Execution, compile_failure

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""compute.compile -> torch.compile's mode. Its own CUDA graphs would end at each region, and own gradients' memory."""


def memory_format(compute: ComputeConfig) -> torch.memory_format:
    return torch.channels_last if compute.channels_last else torch.contiguous_format


def set_up_compute_(
    config: Config, model: nn.Module, communicator: Communicator, *, logits: Callable[[int, int], Tensor]
) -> list[str]:
    """Compile and recompute, in place, as the config asks for it; return lines for the log. Collective.

    Call it on the model as it trains: on its device, in its precision, with its MicrobatchStatistics.
    logits: logits_of_noise of the model.
    Raises: ComputeError, on all ranks alike, if one of them cannot compile.
    """
    notes = []
    if config.compute.compile is not None:
        if communicator.rank == 0:
            print("compiling the model: minutes at first, less with what is kept of it", file=sys.stderr, flush=True)
        compile_regions_(model, mode=MODES[config.compute.compile])
        own = compile_failure(lambda: _run_once(config, model, communicator.device, logits))
        # if one rank fails, all do: all ranks must train by the same code
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(communicator.gather_text(own)) if text]
        failure = own if communicator.world_size == 1 else next(iter(failures), "")
        if failure and not config.compute.compile_fallback:
            raise ComputeError(
                f"compute.compile={config.compute.compile}: {failure}; set compute.compile=null, or "
                "compute.compile_fallback=true to continue without it"
            )
        if failure:
            restore_regions_(model)
            notes.append(f"not compiled: {failure}")
    # after compiling, so that backward recomputes by the compiled forward
    recompute_(model, config.compute.recomputed_blocks)
    return notes


def require_capturable(communicator: Communicator) -> None:
    """Raise ConfigError if steps cannot be captured as CUDA graphs."""
    remedy = "set compute.cuda_graph to false"
    if communicator.device.type != "cuda":
        raise ConfigError(f"compute.cuda_graph=True needs a GPU, and this rank has none: {remedy}")
    if communicator.backend.name not in ("single", "nccl"):
        raise ConfigError(
            f"compute.cuda_graph=True cannot capture the sums of {communicator.backend.name}, because the host takes "
            f"part in them: {remedy}, or comm.backend to nccl"
        )


def make_execution(config: Config, communicator: Communicator, optimizer: torch.optim.Optimizer) -> Execution:
    if not config.compute.cuda_graph:
        return EagerExecution()
    # an empty operation: the backend's watch notices if the device does not reach the end of the replays
    watch = partial(communicator.backend.submit, lambda: None, label="the sums of a replayed step")
    capture = CudaCapture(communicator.device)
    return CudaGraphExecution(capture, optimizer=optimizer, watch=watch)


def logits_of_noise(
    model: nn.Module,
    count: int,
    size: int,
    *,
    normalize: Callable[[Tensor], Tensor],
    forward: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Return logits (count, K) in fp32 of noise images of size x size, from a separate generator; calls no hooks.

    forward: returns the context of the model's forward, as Precision.forward does.
    """
    pixels_BCHW = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator())
    images_BCHW = normalize(pixels_BCHW.contiguous(memory_format=torch.channels_last))
    with forward():
        logits_BK: Tensor = model.forward(images_BCHW)
    return logits_BK.float()


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
