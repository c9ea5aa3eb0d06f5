"""Make all ranks start with equal weights, and name the ranks whose values differ."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from bigbatch.errors import CommError
from bigbatch.parts import load
from bigbatch.words import name_ranks

if TYPE_CHECKING:
    from bigbatch.comm.communicator import Communicator

Start = Literal["equal", "broadcast", "unchecked"]
STARTS = get_args(Start)


def require_same_start_(tensors: Mapping[str, Tensor], communicator: "Communicator", *, weights: Start) -> None:
    """Make all ranks start alike. equal: check for the same bits; broadcast: copy rank 0's, in place. Collective.

    unchecked: do nothing. The check reads each dense tensor once, and exchanges one digest of all of them.
    Raises: CommError naming the ranks that differ, and the first tensor.
    """
    if weights == "unchecked":
        return
    tensors = {name: each for name, each in tensors.items() if each.layout is torch.strided and not each.is_meta}
    if weights == "broadcast":
        load("bigbatch.comm.gradients.broadcast.broadcast_parameters")(tensors, communicator)
        return
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    found = communicator.gather(hashlib.sha256("".join(mine.values()).encode()).hexdigest())
    reference, odd, names = find_odd_ranks(found, mine, communicator)
    if odd:
        raise CommError(
            f"{name_ranks(odd)} {'have' if odd[1:] else 'has'} other weights than rank {reference}, first {names[0]}: "
            'set the same seed on all ranks before the model is made, or weights="broadcast" to give them rank 0\'s'
        )


def find_odd_ranks(
    hashes: Sequence[object], digests: Mapping[str, object], communicator: "Communicator"
) -> tuple[int, list[int], list[str]]:
    """Return a rank with the most frequent hash, the ranks with others, and the names that differ on the first of them.

    hashes: of all ranks; of equally frequent ones that of the lowest rank counts. digests: this rank's, by name.
    Collective if hashes differ.
    """
    common = Counter(hashes).most_common(1)[0][0]
    reference, odd = hashes.index(common), [rank for rank, each in enumerate(hashes) if each != common]
    if not odd:
        return reference, [], []
    is_asked = communicator.rank in (reference, odd[0])
    of_ranks = communicator.gather([*digests.values()] if is_asked else None)
    pairs = zip(digests, of_ranks[reference], of_ranks[odd[0]], strict=True)
    return reference, odd, [name for name, one, other in pairs if one != other]


def _digest(tensor: Tensor) -> str:
    values_N = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(values_N.view(torch.uint8).numpy()).hexdigest()[:16]  # type: ignore[arg-type]
