"""Gather short tensors over groups of neighbouring ranks during forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.transport import Transport
from bigbatch.words import count

GroupGather = Callable[[Tensor], Tensor]
"""Takes this rank's flat tensor (N); returns those of its group as (group size, N), in rank order. Collective."""


def make_group_gather(transport: Transport, *, group_size: int, exposed: ExposedTime, what: str) -> GroupGather:
    """Return a function that gathers over groups of group_size neighbouring ranks. Collective, over all ranks.

    Each gather is submitted like a sum of gradients and runs in turn with these, so all ranks keep one order. The wait
    counts as exposed. All groups must gather at the same places of forward and backward. what: its name in messages.
    Raises: ValueError if the groups do not divide the ranks.
    """
    world_size = transport.connection.world_size
    if world_size % group_size:
        raise ValueError(f"{count(world_size, 'rank')} cannot form groups of {group_size}")
    starts = range(0, world_size, group_size)
    group = transport.backend.new_group([range(start, start + group_size) for start in starts])
    label = f"gather of {what} over ranks {group.ranks[0]} to {group.ranks[-1]}"
    backend, staging = transport.backend, transport.staging

    def gather(own_N: Tensor) -> Tensor:
        own_N = own_N.contiguous()
        all_RN = own_N.new_empty(group_size, own_N.numel())
        send_N, receive_RN = own_N, all_RN
        if staging is not None:
            send_N, receive_RN = (torch.empty_like(each, device="cpu", pin_memory=True) for each in (own_N, all_RN))
            ready = staging.ready()

        def run() -> None:
            if staging is not None:
                staging.fetch(send_N, own_N, ready=ready)
            backend.all_gather(receive_RN.view(-1), send_N, group)
            if staging is not None:
                staging.copy_back(all_RN, receive_RN)

        operation: Callable[[], None] = run
        if transport.timeline is not None:
            span = transport.timeline.span
            operation = span(label, row="gather", on_host=transport.is_timed_by_host, bytes=all_RN.nbytes)(run)
        with exposed.measure([own_N]):
            work = transport.submit(operation, label=label, ranks=group.ranks)
            (work if staging is None else InFlight(work.wait, staging.join)).wait()
        return all_RN

    return gather
