"""Tensor fusion: plan which gradients travel together. The plan is pure; the buffers hold the gradients themselves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple that is at least count."""
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
        """Return the size of the gradient."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class BufferPlan:
    """The gradients of one fusion buffer, in the order in which backward finishes them."""

    tensors: tuple[TensorSpec, ...]
    align: int = 1
    """Each tensor begins at a multiple of this many elements."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the gradients."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_elements(self) -> int:
        """Count the elements of the buffer."""
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


def plan_fusion(
    tensors: Sequence[TensorSpec],
    *,
    threshold_bytes: int,
    buffer_bytes: int,
    first_buffer_bytes: int | None = None,
    align: int = 1,
) -> FusionPlan:
    """Group gradients, given in the order in which they become ready, into buffers.

    A gradient larger than threshold_bytes or buffer_bytes goes alone; the others share buffers of one dtype
    and at most buffer_bytes, the first shared one at most first_buffer_bytes (None: as large as the others): a
    small first buffer lets communication start early. Buffers are ordered by the moment their last gradient is
    ready.
    Raises: ValueError for a size that is not positive.
    Source: Jia et al. 2018, tensor fusion with a size threshold; a small first bucket: PyTorch's
    DistributedDataParallel.
    """
    first_bytes = buffer_bytes if first_buffer_bytes is None else first_buffer_bytes
    for name, value in (
        ("threshold_bytes", threshold_bytes),
        ("buffer_bytes", buffer_bytes),
        ("first_buffer_bytes", first_bytes),
    ):
        if value < 1:
            raise ValueError(f"{name}={value} must be a positive number of bytes")
    done: list[_Filling] = []
    filling: dict[str, _Filling] = {}
    limit_bytes = min(first_bytes, buffer_bytes)
    for position, tensor in enumerate(tensors):
        if tensor.num_bytes > threshold_bytes:
            done.append(_Filling(position, [tensor], tensor.num_bytes))
            continue
        buffer = filling.get(tensor.dtype)
        if buffer and buffer.num_bytes + tensor.num_bytes > limit_bytes:
            done.append(buffer)
            # only the first shared buffer is small
            buffer, limit_bytes = None, buffer_bytes
        if buffer is None:
            buffer = filling[tensor.dtype] = _Filling(position, [], 0)
        buffer.add(position, tensor)
    done += filling.values()
    # by the last gradient: a buffer can be sent only when all of it is ready
    by_moment = sorted(done, key=lambda each: each.position)
    return FusionPlan(tuple(BufferPlan(tuple(each.members), align) for each in by_moment))


@dataclass
class _Filling:
    """A buffer that is not complete yet; position is that of its last gradient."""

    position: int
    members: list[TensorSpec]
    num_bytes: int

    def add(self, position: int, tensor: TensorSpec) -> None:
        self.position = position
        self.members.append(tensor)
        self.num_bytes += tensor.num_bytes


@dataclass(frozen=True)
class PlanSizes:
    """The three sizes that determine a fusion plan, in bytes."""

    threshold_bytes: int
    buffer_bytes: int
    first_buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not is_size and not (name == "first_buffer_bytes" and value is None):
                raise ValueError(f"{name}={value!r} must be a positive number of bytes")

    def plan(self, tensors: Sequence[TensorSpec]) -> FusionPlan:
        """Make the plan for gradients in the order in which they become ready."""
        return plan_fusion(
            tensors,
            threshold_bytes=self.threshold_bytes,
            buffer_bytes=self.buffer_bytes,
            first_buffer_bytes=self.first_buffer_bytes,
        )


DEFAULT_SIZES = PlanSizes(threshold_bytes=4_000_000, buffer_bytes=25_000_000)
"""Fusion plan without tuning: buffers about as large as DistributedDataParallel's."""
