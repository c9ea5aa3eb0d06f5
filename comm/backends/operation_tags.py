"""Tags of operations: by comparing them, a rank notices that another rank runs a different operation."""

import struct
from zlib import crc32

import torch

from bigbatch.comm.backends.base import ALL_DTYPES, REMEDY, Backend, dtype_name
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.errors import CommError

MAX_LABELS = 1000
"""Labels to remember: those that contain a step number never repeat."""
TAG = struct.Struct("!LLQB")
"""An operation's number, a hash of its label, the number of elements of its tensor, and the dtype by number, from 1."""

Tag = tuple[int, ...]
"""The four numbers of TAG, the last two 0 if there is no single tensor."""


class OperationTags:
    """The tag of the operation that this rank runs, and the labels of those that it has run lately."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._labels: dict[int, str] = {}
        self.tag: Tag = (0, 0, 0, 0)

    def begin(self, pending: Pending) -> Tag:
        """Note that this operation runs from now on; return its tag, which is equal on all ranks that run it."""
        key = crc32(pending.label.encode())
        self._labels.pop(key, None)
        self._labels[key] = pending.label
        if len(self._labels) > MAX_LABELS:
            del self._labels[next(iter(self._labels))]
        num_elements, dtype = (pending.size[0], ALL_DTYPES.index(pending.size[1]) + 1) if pending.size else (0, 0)
        self.tag = pending.number & 0xFFFFFFFF, key, num_elements, dtype
        return self.tag

    def error(self, peer: int, tag: Tag) -> CommError:
        """Return the error for a rank that runs the operation of another tag."""
        return CommError(
            f"rank {peer} runs {self._describe(tag)}, while rank {self._rank} runs {self._describe(self.tag)}: {REMEDY}"
        )

    def _describe(self, tag: Tag) -> str:
        number, key, num_elements, dtype = tag
        size = f", {num_elements} of {dtype_name(ALL_DTYPES[dtype - 1])}" if dtype else ""
        return f"operation {number} ({self._labels.get(key, 'with a label unknown to this rank')}{size})"


def require_same_operation(backend: Backend, pending: Pending, *, tags: OperationTags) -> None:
    """Compare the tags of all ranks by an all-gather, on the thread that runs operations. Collective over the world.

    For transports that match messages by their order alone, such as gloo's: two sums of one size would be mixed.
    Raises: CommError naming the first rank that differs.
    """
    tag = tags.begin(pending)
    if pending.ranks is not None:  # not all ranks take part in it
        return
    tags_P4 = torch.empty(backend.world_size, len(tag), dtype=torch.int64)
    backend.all_gather(tags_P4.view(-1), torch.tensor(tag), backend.world)
    everyone = [tuple(row) for row in tags_P4.tolist()]
    # a rank in the majority names the odd one, and the odd one names a rank of the majority
    other = max((each for each in everyone if each != tag), key=everyone.count, default=tag)
    if other != tag:
        raise tags.error(everyone.index(other), other)
