"""Compute a rank's memory for its update, and the savings of a sharded update."""

from dataclasses import dataclass
from importlib import import_module

import torch

from bigbatch.comm.gradients.fusion import round_up
from bigbatch.trainer.config.optimizer import WHOLE_MATRIX, is_foreign
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.step.plan import Parts

FP32_BYTES = 4


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of a rank's update state (optimizer state, fp32 masters and their gradients) and of its gradients."""

    whole_bytes: int
    """Update state of all weights, in bytes: that of each rank if the update is not sharded."""
    kept_bytes: int
    """Update state, in bytes, of the weights that the rank updates: its parts of the fusion buffers, or all weights."""
    gradient_bytes: int
    """Bytes of the gradients in the fusion buffers, which every rank has whole."""
    summed_bytes: int
    """Bytes of the gradient sums that the rank receives."""


def num_moments(config: Config) -> int:
    """Return the fp32 numbers per weight in an optimizer's state; for foreign optimizers two are assumed."""
    optimizer = config.optimizer
    if "betas" in (optimizer.options or {}) or is_foreign(optimizer.name):
        return 2
    return 1 if optimizer.momentum else 0


def update_memory(config: Config, parts: Parts) -> UpdateMemory:
    """Return a rank's bytes by the plan of fusion buffers; a sharded update divides each equally, rounded up."""
    num_parts = parts.communicator.world_size if config.optimizer.sharded else 1
    parameters = dict(parts.model.named_parameters())
    whole = kept = gradients = summed = 0
    for buffer in parts.reducer.plan.buffers:
        # of a weight, not of the plan, whose elements are 8-byte integers if sums are on a grid
        element_bytes = parameters[buffer.tensors[0].name].element_size()
        masters_bytes = 2 * FP32_BYTES if element_bytes < FP32_BYTES else 0
        update_bytes = FP32_BYTES * num_moments(config) + masters_bytes
        num_elements = sum(tensor.num_elements for tensor in buffer.tensors)
        own = round_up(buffer.num_elements, num_parts * buffer.align) // num_parts
        whole += num_elements * update_bytes
        kept += own * update_bytes
        gradients += num_elements * element_bytes
        summed += own * element_bytes
    return UpdateMemory(whole, kept, gradients, summed)


def sharded_note(config: Config, parts: Parts) -> str:
    """Return the log line of a sharded update: what is divided, and a rank's share."""
    memory = update_memory(config, parts)
    matrices = matrix_bytes(config, parts) + gather_bytes(config, parts)
    more = f", and {config.optimizer.name} keeps {_mb(matrices)} on each for whole matrices" if matrices else ""
    return (
        f"sharded over {parts.communicator.world_size} ranks: each keeps {_mb(memory.kept_bytes)} of optimizer state, "
        f"fp32 masters and their gradients instead of {_mb(memory.whole_bytes)}, and gets the sums of "
        f"{_mb(memory.summed_bytes)} of {_mb(memory.gradient_bytes)} of gradients; weights and gradient buffers are "
        f"whole on each{more}"
    )


def matrix_bytes(config: Config, parts: Parts) -> int:
    """Return the bytes of matrix state besides the momentum: Shampoo's factors and roots."""
    if config.optimizer.name != "shampoo":
        return 0
    return 2 * FP32_BYTES * sum(elements for _, elements in _shared_work(config, parts))


def gather_bytes(config: Config, parts: Parts) -> int:
    """Return the bytes of the buffers in which ranks gather parts of matrices and results of divided work."""
    if config.optimizer.name not in WHOLE_MATRIX or not (work := _shared_work(config, parts)):
        return 0
    world_size, parameters = parts.communicator.world_size, dict(parts.model.named_parameters())
    wholes = FP32_BYTES * sum(
        round_up(buffer.num_elements, world_size * buffer.align)
        for buffer in parts.reducer.plan.buffers
        if config.optimizer.sharded and any(parameters[tensor.name].dim() > 1 for tensor in buffer.tensors)
    )
    from bigbatch.trainer.optim.divided_work import gathered_elements, share_out

    costs, num_elements = zip(*work, strict=True)
    shares = share_out(costs, num_elements, world_size=world_size)
    element_bytes = (
        FP32_BYTES // 2 if lookup(config, "optimizer.options.newton_schulz_precision") == "bf16" else FP32_BYTES
    )
    return wholes + element_bytes * gathered_elements(shares, num_elements, world_size=world_size)


def _shared_work(config: Config, parts: Parts) -> list[tuple[float, int]]:
    shapes = [p.shape for p in parts.model.parameters() if p.requires_grad and p.dim() > 1]
    work_of = import_module(f"bigbatch.trainer.optim.{config.optimizer.name}").shared_work
    return list(work_of(config.optimizer, shapes))


def rank_bytes(config: Config, parts: Parts) -> int:
    """Return the bytes of a rank's weights, gradients, update state and moving average, without activations."""
    parameters = list(parts.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    if parts.reducer.grid:
        gradients += sum(p.numel() * torch.int64.itemsize for p in parameters if p.requires_grad)
    average = FP32_BYTES * sum(p.numel() for p in parameters) if config.optimizer.ema_decay is not None else 0
    update = update_memory(config, parts).kept_bytes + matrix_bytes(config, parts) + gather_bytes(config, parts)
    return weights + gradients + update + average


def checkpoint_bytes(config: Config, parts: Parts) -> int:
    """Return the bytes of a checkpoint: masters, optimizer state and moving average, in fp32 and not sharded."""
    num_copies = 1 + num_moments(config) + (config.optimizer.ema_decay is not None)
    weights = sum(p.numel() for p in parts.model.parameters())
    return FP32_BYTES * num_copies * weights + matrix_bytes(config, parts)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
