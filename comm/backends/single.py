"""One process: every sum is there already."""

from collections.abc import Callable, Sequence

from torch import Tensor

from bigbatch.comm.backends.base import Group


class _Done:
    def wait(self) -> None:
        pass


class SingleBackend:
    """The backend of a world of one, so that nobody needs to ask whether a job is distributed."""

    name = "single"
    rank = 0
    world_size = 1
    world = Group((0,))

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """The only family there can be."""
        return Group(tuple(families[0]))

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """The sum over one rank."""

    def reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """The sum over one rank."""

    def broadcast_(self, tensor_N: Tensor, group: Group) -> None:
        """Already where it must be."""

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        """The whole is the shard."""
        shard_M.copy_(tensor_N)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        """The shard is the whole."""
        tensor_N.copy_(shard_M)

    def exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        """A hop from this rank to itself."""
        receive.copy_(send)

    def all_gather_text(self, text: str) -> list[str]:
        """This rank's text."""
        return [text]

    def submit(self, operation: Callable[[], None], *, label: str) -> _Done:
        """Run the operation at once."""
        operation()
        return _Done()

    def close(self) -> None:
        """Nothing to release."""
