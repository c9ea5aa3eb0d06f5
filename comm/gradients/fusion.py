"""Tensor fusion: plan which gradients travel together. The plan is pure; the buffers hold the gradients themselves."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any


def round_up(count: int, multiple: int) -> int:
    """Return count, rounded up to a multiple."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """One gradient: its parameter's name, number of elements, bytes per element on the wire, dtype name."""

    name: str
    num_elements: int
    element_bytes: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class BufferPlan:
    """The gradients of one fusion buffer, in the order in which backward finishes them."""

    tensors: tuple[TensorSpec, ...]
    align: int = 1
    """Each tensor begins at a multiple of this many elements."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_elements(self) -> int:
        return sum(round_up(tensor.num_elements, self.align) for tensor in self.tensors)

    def places(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yield each gradient, and the element of the buffer at which it begins."""
        first = 0
        for tensor in self.tensors:
            yield tensor, first
            first += round_up(tensor.num_elements, self.align)

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


@dataclass(frozen=True)
class PlanSizes:
    """The three sizes that determine a fusion plan, in bytes. Raises: ValueError for one that is not positive."""

    threshold_bytes: int
    buffer_bytes: int
    first_buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number: Any = value
            is_size = isinstance(value, Real) and not isinstance(value, bool) and number > 0 and number % 1 == 0
            if not is_size and not (name == "first_buffer_bytes" and value is None):
                raise ValueError(f"{name}={value!r} must be a positive whole number of bytes")

    def plan(self, tensors: Sequence[TensorSpec], *, align: int = 1) -> FusionPlan:
        """Group gradients, given in the order in which they become ready, into buffers.

        A gradient larger than threshold_bytes or buffer_bytes has its own buffer. The others share buffers of one
        dtype and at most buffer_bytes. The first shared buffer has at most first_buffer_bytes (None: buffer_bytes),
        because a small first buffer lets communication start early. Buffers are in the order in which their last
        gradients become ready. align: see BufferPlan.
        Source: Jia et al. 2018, tensor fusion with a size threshold; a small first bucket: PyTorch's
        DistributedDataParallel.
        """
        done: list[list[int]] = []  # for each buffer, the positions of its gradients
        filling: dict[str, list[int]] = {}
        filled_bytes: Counter[str] = Counter()
        limit_bytes = min(self.first_buffer_bytes or self.buffer_bytes, self.buffer_bytes)
        for position, tensor in enumerate(tensors):
            if tensor.num_bytes > self.threshold_bytes:
                done.append([position])
                continue
            buffer = filling.setdefault(tensor.dtype, [])
            if buffer and filled_bytes[tensor.dtype] + tensor.num_bytes > limit_bytes:
                done.append(buffer)
                # only the first shared buffer is small
                limit_bytes, filled_bytes[tensor.dtype] = self.buffer_bytes, 0
                buffer = filling[tensor.dtype] = []
            buffer.append(position)
            filled_bytes[tensor.dtype] += tensor.num_bytes
        # by the last gradient, because a buffer is sent when all of it is ready
        by_moment = sorted([*done, *filling.values()], key=lambda positions: positions[-1])
        return FusionPlan(tuple(BufferPlan(tuple(tensors[i] for i in each), align) for each in by_moment))


DEFAULT_SIZES = PlanSizes(threshold_bytes=26_214_400, buffer_bytes=26_214_400)
"""Fusion plan without tuning, of configs as well: buffers as large as DistributedDataParallel's."""
