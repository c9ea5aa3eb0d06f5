"""Broadcast and send objects, and sum one tensor, for any training loop."""

import io
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.backends.base import HALF, InFlight, require_type
from bigbatch.comm.communicator import Communicator


def broadcast_parameters(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], communicator: Communicator, *, root_rank: int = 0
) -> None:
    """Overwrite tensors, such as model.state_dict() or model.named_parameters(), with those of root_rank. Collective.

    Raises: CommError naming the rank whose names, shapes, dtypes or root_rank differ; ValueError for no rank's number.
    """
    named = dict(tensors)
    described = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()]
    _agree_on_root(root_rank, communicator, "\n".join(described))
    values = [tensor.detach() for tensor in named.values()]
    _broadcast_(values, communicator, root_rank, label=f"broadcast of {len(named)} tensors from rank {root_rank}")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, communicator: Communicator, *, root_rank: int = 0
) -> None:
    """Copy root_rank's optimizer state and settings to all ranks, even if their state is still empty. Collective.

    Raises: as broadcast_object; ValueError from load_state_dict if the optimizers have different parameter groups.
    """
    payload = _broadcast_bytes(optimizer.state_dict(), communicator, root_rank)
    state = _load(payload, map_location="cpu")  # on the root, too: an error on all ranks
    if communicator.rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(value: Any, communicator: Communicator, *, root_rank: int = 0) -> Any:
    """Return root_rank's value on all ranks: numbers, texts, tensors on their device, and containers of these.

    Collective. Received data is read without running code.
    Raises: ValueError on all ranks if the value holds anything else, or for no rank's number; CommError if ranks name
    different root_ranks.
    """
    return _load(_broadcast_bytes(value, communicator, root_rank))


def send_object(value: Any, communicator: Communicator, *, source: int, to: Collection[int]) -> Any:
    """Return source's value on the ranks in `to`; every other rank gets its own value back. Collective.

    For large states: host tensors are sent from their own memory, and only to these ranks. Everything else as in
    broadcast_object. Raises: as broadcast_object, but only on source.
    """
    backend, rank = communicator.transport.backend, communicator.rank
    label = f"message of an object from rank {source}"

    def exchange_(tensors: Sequence[Tensor]) -> None:
        def operation() -> None:
            for tensor in tensors if rank == source or rank in to else ():
                flat_N = tensor.view(-1).view(torch.uint8)
                if flat_N.numel() and rank == source:
                    InFlight(*(backend.start_send(flat_N, to=each).wait for each in sorted(to))).wait()
                elif flat_N.numel():
                    backend.start_receive(flat_N, source=source).wait()

        communicator.transport.submit(operation, label=label, ranks=tuple(sorted({source, *to}))).wait()

    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    payload = b""
    if rank == source:
        stream = io.BytesIO()
        torch.save(_with_tensors(value, lambda tensor: note(tensor).to("meta")), stream)
        _load(payload := stream.getvalue())  # an error before others wait
    payload = _exchange_bytes(payload, exchange_)
    if rank != source and payload:
        skeleton = _load(payload)
        # not empty_like, which takes a Python path for tensors without data, and imports half of torch for it
        value = _with_tensors(skeleton, lambda it: note(torch.empty_strided(it.size(), it.stride(), dtype=it.dtype)))
    dense = [tensor.contiguous() for tensor in tensors]
    exchange_(dense)
    for tensor, each in zip(tensors, dense, strict=True):
        if rank != source and each.data_ptr() != tensor.data_ptr():
            tensor.copy_(each)
    return value


def _with_tensors(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with make(tensor) for each dense host tensor, or tensor without data, in its containers."""
    if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type in ("cpu", "meta"):
        return make(value.detach().contiguous() if 0 in value.stride() else value.detach())
    if type(value) is dict:
        return {key: _with_tensors(each, make) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, make) for each in value)
    return value


def all_reduce(tensor: Tensor, communicator: Communicator, *, op: str = "average", label: str = "all-reduce") -> Tensor:
    """Return a new tensor: the average or sum of tensor over all ranks; wire_dtype does not round it. Collective.

    For a loss or a count; gradients need DistributedOptimizer or GradientReducer. A dtype that the backend cannot sum,
    and half precision, travel as float64, which is exact for integers up to 2**53.
    Raises: TypeError if it is not a tensor; ValueError for an unknown op, the average of integers, or a complex or
    sparse tensor.
    """
    require_type(tensor, Tensor, what="tensor", legal="a torch.Tensor, such as torch.tensor(1.0)")
    require_type(communicator, Communicator, what="communicator", legal="what connect() returns")
    if op not in ("average", "sum"):
        raise ValueError(f"op={op!r} is unknown; choose one of average, sum")
    if tensor.is_complex():
        raise ValueError(f"{tensor.dtype} values are not summed: pass torch.view_as_real(tensor)")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not summed: pass tensor.to_dense()")
    if op == "average" and not tensor.is_floating_point():
        raise ValueError(f'{tensor.dtype} has no fractions, so it is not averaged: pass tensor.float(), or op="sum"')
    backend = communicator.transport.backend
    carrier = tensor.dtype if tensor.dtype in {*backend.capabilities.dtypes} - {*HALF} else torch.float64
    total = tensor.detach().to(communicator.transport.backend_device, carrier, copy=True).contiguous()
    sum_: Callable[[], None] = lambda: backend.all_reduce_(total.view(-1), backend.world)  # noqa: E731
    communicator.transport.submit(sum_, label=label, size=(total.numel(), total.dtype)).wait()
    if op == "average":
        total.div_(communicator.world_size)
    return total.to(tensor.device, tensor.dtype)


allreduce = all_reduce
"""The name in scripts written for Horovod."""


_REFUSED = b"refused: "
"""Instead of a value that cannot be sent, before the reason."""


def _load(payload: bytes, *, map_location: str | None = None) -> Any:
    try:
        return torch.load(io.BytesIO(payload), map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"a broadcast object holds {found[1] if found else 'an object of a class'}: send numbers, texts, tensors, "
            "and lists, tuples and dicts of these; reading anything else could run code"
        ) from None


def _agree_on_root(root_rank: int, communicator: Communicator, described: str = "") -> None:
    """Raises: CommError; ValueError."""
    communicator.agree("what to broadcast", f"root_rank={root_rank}\n{described}")
    if not 0 <= root_rank < communicator.world_size:
        raise ValueError(f"root_rank={root_rank} is no rank: there are {communicator.world_size}, from 0 on")


def _broadcast_bytes(value: Any, communicator: Communicator, root_rank: int) -> bytes:
    """Return root_rank's value on all ranks, as torch.save() writes it; values of other ranks are ignored."""
    _agree_on_root(root_rank, communicator)
    stream, label = io.BytesIO(), f"broadcast of an object from rank {root_rank}"
    if communicator.rank == root_rank:
        try:
            torch.save(value, stream)
        except Exception as error:  # such as for a lambda
            stream = io.BytesIO(_REFUSED + str(error).encode())
    payload = _exchange_bytes(stream.getvalue(), lambda each: _broadcast_(each, communicator, root_rank, label=label))
    if payload.startswith(_REFUSED):  # on all ranks alike
        raise ValueError(f"the object to broadcast cannot be sent: {payload.removeprefix(_REFUSED).decode()}")
    return payload


def _exchange_bytes(payload: bytes, exchange_: Callable[[Sequence[Tensor]], None]) -> bytes:
    """Return the bytes of the rank that has any. exchange_: overwrites the tensors of other ranks with that rank's."""
    size_1 = torch.tensor([len(payload)])
    exchange_([size_1])
    data_N = torch.empty(int(size_1), dtype=torch.uint8)
    if payload:
        data_N.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    exchange_([data_N])
    return data_N.numpy().tobytes()


def _broadcast_(tensors: Sequence[Tensor], communicator: Communicator, root_rank: int, *, label: str) -> None:
    """Broadcast tensors in place, as bytes on the backend's device, so that every backend can carry every dtype.

    Copies to that device and back are made on the calling thread, in the order of its stream.
    """
    backend = communicator.transport.backend
    dense = [tensor.to(communicator.transport.backend_device).contiguous() for tensor in tensors]

    def operation() -> None:
        for each in dense:
            if each.numel():
                backend.broadcast_(each.view(-1).view(torch.uint8), backend.world, root=root_rank)

    communicator.transport.submit(operation, label=label).wait()
    for tensor, each in zip(tensors, dense, strict=True):
        if each.data_ptr() != tensor.data_ptr():
            tensor.copy_(each)
