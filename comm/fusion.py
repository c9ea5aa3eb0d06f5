"""Tensor fusion: which gradients travel together. The plan is pure; the buffers hold the gradients themselves."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One gradient: its parameter's name, number of elements, bytes per element and dtype name."""

    name: str
    num_elements: int
    element_bytes: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the gradient."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class BufferPlan:
    """One fusion buffer: the gradients in it, in the order in which backward finishes them."""

    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_elements(self) -> int:
        """Elements in the buffer."""
        return sum(tensor.num_elements for tensor in self.tensors)

    def __str__(self) -> str:
        first, count = self.tensors[0].name, len(self.tensors)
        more = f" and {count - 1} more" if count > 1 else ""
        return f"{first}{more}, {self.num_bytes / 1e6:.3g} MB {self.tensors[0].dtype}"


@dataclass(frozen=True)
class FusionPlan:
    """All buffers, in the order in which they are sent."""

    buffers: tuple[BufferPlan, ...]

    def __str__(self) -> str:
        return "\n".join(f"buffer {i}: {buffer}" for i, buffer in enumerate(self.buffers))


def plan_fusion(tensors: Sequence[TensorSpec], *, threshold_bytes: int, buffer_bytes: int) -> FusionPlan:
    """Group gradients, given in the order in which they become ready, into buffers.

    A gradient larger than threshold_bytes or buffer_bytes goes alone; the others share buffers of one dtype
    and at most buffer_bytes. Buffers are ordered by the moment their last gradient is ready.
    Raises: ValueError for a size that is not positive.
    Source: Jia et al. 2018, tensor fusion with a size threshold.
    """
    for name, value in (("threshold_bytes", threshold_bytes), ("buffer_bytes", buffer_bytes)):
        if value < 1:
            raise ValueError(f"{name}={value} must be a positive number of bytes")
    done: list[tuple[int, list[TensorSpec]]] = []
    filling: dict[str, tuple[int, list[TensorSpec]]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.num_bytes > threshold_bytes:
            done.append((position, [tensor]))
            continue
        _, members = filling.get(tensor.dtype, (0, []))
        if members and sum(t.num_bytes for t in members) + tensor.num_bytes > buffer_bytes:
            done.append(filling[tensor.dtype])
            members = []
        filling[tensor.dtype] = (position, [*members, tensor])
    done += filling.values()
    return FusionPlan(tuple(BufferPlan(tuple(members)) for _, members in sorted(done, key=lambda d: d[0])))
