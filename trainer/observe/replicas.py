"""Check that all ranks hold the same weights, by comparing digests of their bits between steps."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.same_start import find_odd_ranks
from bigbatch.errors import ReplicasDiffer
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.optim.matrices import MatrixOptimizer
from bigbatch.trainer.step.plan import Parts

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integer type in which its bits are read."""
PIECE = 1 << 20
"""Elements that are multiplied at once: 16 MiB of products and factors besides the weights."""
CACHED = 1 << 16
"""The same on a CPU: 512 KiB of int64, and as many of factors."""


def replicas(parts: Parts, *, done: int) -> dict[str, Tensor]:
    """Return the replicated state after that many steps, by names for messages, in the same order on all ranks.

    Weights, optimizer state, running statistics of batch norm, and the average of the weights. With optimizer.sharded:
    only what every rank holds whole, so weights as the model has them, and state of whole matrices. Buffers of
    foreign modules may differ between ranks, and are left out.
    """
    weights, whole = dict(parts.model.named_parameters()), parts.precision.weights.replicated
    of_matrices = parts.optimizer.replicated_state if isinstance(parts.optimizer, MatrixOptimizer) else ()
    state = {
        f"{key} of {name}": value
        for name, master in parts.precision.masters.items()
        for key, value in parts.optimizer.state.get(master, {}).items()
        if isinstance(value, Tensor) and (name in whole or key in of_matrices)
    }
    average = {f"the average of {name}": value for name, value in parts.average_state(done).items()}
    statistics = {"the running statistics of batch norm": parts.statistics.running_N}
    found = {**weights, **whole, **state, **statistics, **average}
    # without tensors on the host, such as an optimizer's step count: a copy of it would be a host sync
    return {name: tensor for name, tensor in found.items() if tensor.device == parts.communicator.device}


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return a digest (int64) of the bits of each tensor (N), on their device; no host sync.

    Element i, read as an integer x[i] of up to 64 bits, adds x[i] * (2 i + 1) modulo 2**64. A change of one element
    changes the digest: its difference times an odd number is not a multiple of 2**64. So does the exchange of two
    different elements of up to 32 bits among up to 2**31: (x[i] - x[j]) * 2 (i - j) is below 2**64 and not 0.
    """
    bits = map(_bits, tensors)
    return torch.stack([_by_dots(bits_N) if bits_N.device.type == "cpu" else _by_products(bits_N) for bits_N in bits])


def _bits(tensor: Tensor) -> Tensor:
    """View the bits of a tensor's elements as integers (N), in the order of its memory where that has no gaps."""
    tensor = tensor.detach()
    dense = torch.empty_like(tensor, device="meta").stride()
    if tensor.stride() != dense:
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(BITS[tensor.element_size()])


def _by_products(bits_N: Tensor) -> Tensor:
    sums = []
    for index, piece in enumerate(bits_N.split(PIECE)):
        first = 2 * index * PIECE + 1
        sums.append((piece * torch.arange(first, first + 2 * len(piece), 2, device=bits_N.device)).sum())
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _by_dots(bits_N: Tensor) -> Tensor:
    """Return the digest of _by_products in half the time, by dot products of int64, which GPUs do not have."""
    factors = torch.arange(1, 1 + 2 * min(CACHED, len(bits_N)), 2)
    total = torch.zeros((), dtype=torch.int64)
    for index, piece in enumerate(bits_N.split(CACHED)):
        numbers = piece.to(torch.int64)
        total += torch.dot(numbers, factors[: len(numbers)])
        if index:
            total += 2 * index * CACHED * numbers.sum()
    return total


def require_same(communicator: Communicator, names: Iterable[str], digest_N: Tensor, *, done: int) -> None:
    """Check that all ranks have the same digests of the named tensors, after that many steps. Waits for the device.

    Collective: 8 bytes per rank. Raises: ReplicasDiffer, on all ranks alike.
    """
    mine = digest_N.tolist()
    hash_P = torch.zeros(communicator.world_size, dtype=torch.float64)
    # 48 bits, which fp64 holds exactly; the other ranks add 0
    hash_P[communicator.rank] = int.from_bytes(hashlib.sha256(json.dumps(mine).encode()).digest()[:6], "big")
    hash_P = communicator.sum_(hash_P.to(communicator.device), label=f"comparison of weights after step {done}")
    digests = dict(zip(names, mine, strict=True))
    reference, odd, differing = find_odd_ranks(hash_P.tolist(), digests, communicator)
    if not odd:
        return
    what = differing[0] + (f" and {len(differing) - 1} more of {len(digests)} tensors" if differing[1:] else "")
    places = [f"{rank} on {communicator.connection.control.host_of(rank)}" for rank in odd]
    num_alike = communicator.world_size - len(odd)
    if num_alike > len(odd):
        who = f"rank{'s' if odd[1:] else ''} {', '.join(places)} and the {num_alike} others"
    else:
        who = f"rank {reference} on {communicator.connection.control.host_of(reference)} and rank {', '.join(places)}"
        what += ", and no majority tells which of them is wrong"
    raise ReplicasDiffer(
        f"after step {done} {who} do not hold the same bits of {what}: a bit has flipped, or a processor or its "
        "memory is faulty (processors of different kinds round differently: run.compare_every_steps=0 allows that)"
    )


class Comparison(Observer):
    """Compares the replicas of all ranks every run.compare_every_steps, at the next report."""

    def __init__(self, observed: Observed) -> None:
        self._plan, self._parts, self._communicator = observed.plan, observed.parts, observed.communicator
        self._last = observed.plan.first_step

    def before_report(self, done: int) -> None:
        """Raises: ReplicasDiffer, on all ranks alike."""
        since, self._last, every = self._last, done, self._plan.compare_every_steps
        if done // every > since // every:
            compare(self._parts, self._communicator, done=done)


def compare(parts: Parts, communicator: Communicator, *, done: int) -> None:
    """Compare all ranks' replicas now. Collective. Raises: ReplicasDiffer."""
    found = replicas(parts, done=done)
    require_same(communicator, found, digest(found.values()), done=done)
