"""The flat ring: bandwidth-optimal, with latency linear in the number of ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.comm.backends.base import Backend


def ring_allreduce_(buffer_N: Tensor, backend: Backend, ranks: Sequence[int]) -> None:
    """Sum buffer_N over ranks (in ring order), in place, in two passes around the ring.

    Collective over ranks. Sends 2 * nbytes * (n - 1) / n per rank in 2 * (n - 1) hops. Each part is summed
    along one path and then copied, so all ranks end with identical bits.
    Raises: ValueError if buffer_N is not flat and contiguous.
    Source: Patarasuk and Yuan 2009.
    """
    if buffer_N.dim() != 1 or not buffer_N.is_contiguous():
        raise ValueError(f"a ring needs a flat, contiguous buffer, not shape {tuple(buffer_N.shape)}")
    n = len(ranks)
    if n == 1 or buffer_N.numel() == 0:
        return
    place = list(ranks).index(backend.rank)
    left, right = ranks[place - 1], ranks[(place + 1) % n]
    parts = torch.tensor_split(buffer_N, n)
    incoming = torch.empty_like(parts[0])
    for hop in range(n - 1):  # after these, this rank holds the full sum of part place + 1
        outgoing, target = parts[(place - hop) % n], parts[(place - hop - 1) % n]
        received = incoming[: target.numel()]
        _hop(backend, send=outgoing, to=right, receive=received, source=left)
        target.add_(received)
    for hop in range(n - 1):
        outgoing, target = parts[(place + 1 - hop) % n], parts[(place - hop) % n]
        _hop(backend, send=outgoing, to=right, receive=target, source=left)


def _hop(backend: Backend, *, send: Tensor, to: int, receive: Tensor, source: int) -> None:
    """An exchange in which an empty part (a buffer shorter than the ring) still takes its turn."""
    if send.numel() and receive.numel():
        backend.exchange(send=send, to=to, receive=receive, source=source)
        return
    spare_send, spare_receive = send.new_zeros(1), send.new_zeros(1)
    backend.exchange(
        send=send if send.numel() else spare_send,
        to=to,
        receive=receive if receive.numel() else spare_receive,
        source=source,
    )
