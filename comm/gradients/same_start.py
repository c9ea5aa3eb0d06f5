"""Check that ranks start from the same weights: compares digests, names the odd ranks and the first tensor."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import broadcast_parameters
from bigbatch.comm.rendezvous.late_ranks import name_ranks
from bigbatch.errors import CommError

Start = Literal["equal", "broadcast", "unchecked"]
STARTS = get_args(Start)


def begin_alike_(tensors: Mapping[str, Tensor], communicator: Communicator, *, weights: Start) -> None:
    """Check that all ranks hold the same bits, or copy rank 0's, in place; unchecked does neither. Collective.

    Reads each tensor once, and exchanges one digest of all of them.
    Raises: ValueError for an unknown choice; CommError naming the ranks that differ, and the first tensor.
    """
    if weights not in STARTS:
        raise ValueError(f"weights={weights!r} is unknown; choose one of {', '.join(STARTS)}")
    if weights == "unchecked" or communicator.world_size == 1:
        return
    if weights == "broadcast":
        broadcast_parameters(tensors, communicator)
        return
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    found = communicator.gather_text(hashlib.sha256("".join(mine.values()).encode()).hexdigest())
    # the most frequent one, rank 0's among equals
    common = Counter(found).most_common(1)[0][0]
    odd = [rank for rank, digest in enumerate(found) if digest != common]
    if not odd:
        return
    speakers = (found.index(common), odd[0])
    texts = communicator.gather_text(" ".join(mine.values()) if communicator.rank in speakers else "")
    one, other = (texts[rank].split() for rank in speakers)
    first = next(name for name, a, b in zip(mine, one, other, strict=True) if a != b)
    raise CommError(
        f"{name_ranks(odd)} {'have' if odd[1:] else 'has'} other weights than rank {speakers[0]}, first {first}: set "
        'the same seed on all ranks before the model is made, or pass weights="broadcast" to give all of them rank 0\'s'
    )


def _digest(tensor: Tensor) -> str:
    values_N = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(values_N.view(torch.uint8).numpy()).hexdigest()[:16]  # type: ignore[arg-type]
