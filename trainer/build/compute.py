"""How a model's forward and backward are computed, its loss and its score (user_score.py: those that a user names)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import expandable_segments
from bigbatch.comm.transport import Transport
from bigbatch.errors import ConfigError
from bigbatch.trainer.config.optimizer import CROSS_ENTROPY
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.step.score import Score

if TYPE_CHECKING:
    from bigbatch.trainer.build.input import Split
    from bigbatch.trainer.step.cuda_graph import CudaGraphExecution


def set_up_compute_(
    config: Config, model: nn.Module, communicator: Communicator, *, logits: Callable[[int, int], Tensor]
) -> list[str]:
    """Compile and recompute, in place, as the config asks for it; return why it is not compiled. Collective.

    Call it on the model as it trains: on its device, in its precision, with its MicrobatchStatistics.
    logits: logits_of_noise of the model. Raises: ComputeError, on all ranks alike, if one of them cannot compile.
    """
    notes: list[str] = []
    if config.compute.compile is not None:
        from bigbatch.trainer.build.compiled import compile_

        notes = compile_(config, model, communicator, logits=logits)
    if config.compute.recomputed_blocks:
        from bigbatch.trainer.models.regions import recompute_

        # after compiling, so that backward recomputes by the compiled forward
        recompute_(model, config.compute.recomputed_blocks)
    return notes


def require_capturable(transport: Transport) -> None:
    """Raise ConfigError if steps cannot be captured as CUDA graphs."""
    remedy = "set compute.cuda_graph to false"
    if transport.device.type != "cuda":
        raise ConfigError(f"compute.cuda_graph=True needs a GPU, and this rank has none: {remedy}")
    if (name := transport.backend.name) not in ("single", "nccl"):
        raise ConfigError(
            f"compute.cuda_graph=True cannot capture the sums of {name}, because the host takes part in "
            f"them: {remedy}, or comm.backend to nccl"
        )
    if name == "nccl" and (variable := expandable_segments()):
        raise ConfigError(f"compute.cuda_graph=True: NCCL may hang with {variable}: {remedy}, or unset the variable")


def make_graphs(transport: Transport, optimizer: torch.optim.Optimizer) -> "CudaGraphExecution":
    """Return what captures and replays steps."""
    from bigbatch.trainer.step.cuda_graph import CudaCapture, CudaGraphExecution

    # an empty operation: the backend's watch notices if the device does not reach the end of the replays
    watch = partial(transport.backend.submit, lambda: None, label="the sums of a replayed step")
    capture = CudaCapture(transport.device)
    return CudaGraphExecution(capture, optimizer=optimizer, gather=transport.connection.control.gather, watch=watch)


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


def make_loss(
    config: Config, device: torch.device, *, train: "Split | None" = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the training loss: a sum over a microbatch's images. Raises: ConfigError for an unfit loss.

    train: the split whose labels scale the weights of classes; None: a trial without data, which has none.
    """
    optimizer = config.optimizer
    if optimizer.loss == CROSS_ENTROPY:
        weight_K = None
        if train is not None and optimizer.loss_options:
            from bigbatch.trainer.build.user_score import class_weights

            weight_K = class_weights(config, train, device)
        return partial(F.cross_entropy, weight=weight_K, label_smoothing=optimizer.label_smoothing, reduction="sum")
    from bigbatch.trainer.build.user_score import make_user_loss

    own = make_user_loss(config, device)
    return lambda logits_BK, targets: own(logits_BK, targets).sum()


def make_score(config: Config, device: torch.device) -> Score:
    """Return loss and metrics of an evaluation. Raises: ConfigError for an unfit loss or metric."""
    if config.optimizer.loss == CROSS_ENTROPY and not config.run.metrics:
        return Score()
    from bigbatch.trainer.build.user_score import make_user_score

    return make_user_score(config, device)
