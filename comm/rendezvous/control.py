"""Control channel: exchange of short texts and failure detection, separate from the data transport. Its interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from bigbatch.awake import awake_seconds

if TYPE_CHECKING:
    import torch

    from bigbatch.comm.rendezvous.failures import Verdict

TensorSize = tuple[int, "torch.dtype"]
"""Number of elements, and dtype."""


class _Label(TypedDict):
    label: str


class OperationFacts(_Label, total=False):
    """Options of submit(): fields of the same names of Pending."""

    ranks: tuple[int, ...] | None
    size: TensorSize | None


@dataclass(frozen=True)
class Pending:
    """An operation under way. number: in order of submission. since: awake_seconds()."""

    number: int
    label: str
    since: float
    ranks: tuple[int, ...] | None = None
    """Ranks that take part; None for all."""
    size: TensorSize | None = None
    """Size of the tensor, equal on all ranks; None if the operation has no single tensor."""

    @property
    def seconds(self) -> float:
        return awake_seconds() - self.since


class Store(Protocol):
    """Keys and values that all ranks of a job read and write."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def add(self, key: str, count: int) -> int:
        """Add count to a key's number, 0 if missing; return the sum."""

    def append(self, key: str, value: str) -> None: ...


class Detector(Protocol):
    """What a connection asks the failure detector, and tells it; see FailureDetector."""

    has_failed: bool
    heals: bool

    @property
    def verdict(self) -> "Verdict | None": ...

    def begin(self) -> None: ...

    def publish_departure(self) -> None: ...

    def publish_success(self, *, within_seconds: float) -> None: ...

    def publish_crash(self, exit_code: int) -> None: ...


class Control(Protocol):
    """Exchanges short texts between the ranks; see JobControl, and AloneControl for a job of one process."""

    rank: int
    world_size: int
    host: str
    timeout_seconds: float
    warn_seconds: float
    master: tuple[str, int] | None

    @property
    def store(self) -> Store: ...

    @property
    def detector(self) -> Detector: ...

    def gather_text(self, text: str, *, what: str = ..., timeout_seconds: float | None = None) -> list[str]: ...

    def gather(self, value: Any, **how: Any) -> list[Any]: ...

    def agree(self, what: str, text: str, *, remedy: str = ...) -> None: ...

    def collect_text(self, text: str, *, what: str) -> list[str]: ...

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str: ...

    def next_key(self) -> str: ...

    def read(self, key: str, *, what: str, source: int | None = None) -> str: ...

    def host_of(self, rank: int) -> str: ...
