"""Gather short tensors of neighbouring ranks during forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor

from bigbatch.comm.backends.base import Group
from bigbatch.comm.backends.host_staging import Staged
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import ExposedTime

GroupGather = Callable[[Tensor], Tensor]
"""Takes a flat tensor (N) of this rank; returns its group's (ranks of the group, N), in rank order. Collective."""


def make_group_gather(communicator: Communicator, *, group_size: int, exposed: ExposedTime, what: str) -> GroupGather:
    """Make a function that gathers over groups of group_size neighbouring ranks. Collective, over all ranks.

    Each gather is submitted like a sum of gradients and waits its turn among them, so all ranks keep one order; the
    wait counts as exposed. All groups gather at the same places of forward and backward. what names it in messages.
    Raises: ValueError if the groups do not divide the ranks.
    """
    world_size = communicator.world_size
    if world_size % group_size:
        raise ValueError(f"{world_size} ranks do not form groups of {group_size}")
    starts = range(0, world_size, group_size)
    group = communicator.backend.new_group([range(start, start + group_size) for start in starts])
    label = f"gather of {what} over ranks {group.ranks[0]} to {group.ranks[-1]}"

    def gather(own_N: Tensor) -> Tensor:
        all_RN = own_N.new_empty(group_size, own_N.numel())
        operation = _operation(communicator, group, own_N=own_N.contiguous(), all_RN=all_RN, label=label)
        with exposed.measure([own_N]):
            work = communicator.backend.submit(operation, label=label, ranks=group.ranks)
            (work if communicator.staging is None else Staged(work, communicator.staging)).wait()
        return all_RN

    return gather


def _operation(
    communicator: Communicator, group: Group, *, own_N: Tensor, all_RN: Tensor, label: str
) -> Callable[[], None]:
    backend, staging, timeline = communicator.backend, communicator.staging, communicator.timeline
    on_host = staging is not None or backend.name == "mpi"  # the thread knows the time of both
    if staging is None:

        def run() -> None:
            with timeline.span(label, row="gather", on_host=on_host, bytes=all_RN.nbytes):
                backend.all_gather(all_RN.view(-1), own_N, group)

        return run
    host_N, host_RN = (torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in (own_N, all_RN))
    ready = staging.ready()

    def run_by_way_of_host() -> None:
        with timeline.span(label, row="gather", on_host=on_host, bytes=all_RN.nbytes):
            staging.fetch(host_N, own_N, ready=ready)
            backend.all_gather(host_RN.view(-1), host_N, group)
            staging.bring_back(all_RN, host_RN)

    return run_by_way_of_host
