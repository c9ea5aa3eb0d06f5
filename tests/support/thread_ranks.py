"""Ranks that are threads of this process: what they send lies in letterboxes, and is counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch import Tensor

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import AllOf, Done, InFlight
from bigbatch.comm.backends.single import SingleBackend


@dataclass
class Post:
    """Letterboxes between ranks, and a record of what went through: (from, to) -> (messages, bytes)."""

    boxes: dict[tuple[int, int], "SimpleQueue[Tensor]"] = field(default_factory=dict)
    messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def box(self, source: int, to: int) -> "SimpleQueue[Tensor]":
        """Made on first use; dict.setdefault is atomic."""
        return self.boxes.setdefault((source, to), SimpleQueue())


class PostBackend(SingleBackend):
    """Messages of one rank by Post."""

    def __init__(self, rank: int, post: Post) -> None:
        self.rank = rank  # type: ignore[misc]
        self._post = post

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        """A copy into the box."""
        self._post.messages[self.rank, to] += 1
        self._post.num_bytes[self.rank, to] += tensor_N.nbytes
        self._post.box(self.rank, to).put(tensor_N.clone())
        return Done()

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        """Taken out when waited for."""
        return _Letter(tensor_N, self._post.box(source, self.rank))

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Both."""
        return AllOf((self.start_send(send, to=to), self.start_receive(receive, source=source)))


@dataclass(frozen=True)
class _Letter:
    tensor_N: Tensor
    box: "SimpleQueue[Tensor]"

    def wait(self) -> None:
        letter_N = self.box.get(timeout=10)
        assert letter_N.dtype == self.tensor_N.dtype
        self.tensor_N.copy_(letter_N)


def sum_by_threads(algorithm: Callable[..., None], tensors: Sequence[Tensor], *, wire: Wire, **options: object) -> Post:
    """Sum the tensors, one per rank, in place."""
    post, ranks = Post(), tuple(range(len(tensors)))

    def one(rank: int) -> None:
        algorithm(tensors[rank], PostBackend(rank, post), ranks, wire=wire, staging=Staging(), **options)

    with ThreadPoolExecutor(len(tensors)) as pool:
        list(pool.map(one, ranks))
    return post
