"""A communication hook for DistributedDataParallel: bigbatch's algorithms sum its buckets."""

from collections.abc import Callable
from threading import Thread

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator

FutureTensor = torch.futures.Future[Tensor]
Hook = Callable[[object, GradBucket], FutureTensor]


def ddp_comm_hook(communicator: Communicator) -> Hook:
    """Return a communication hook by which DDP averages its gradients over the communicator's ranks.

    Algorithm, wire precision and predivide factor are the communicator's. Use:

        dist.init_process_group("gloo"); communicator = connect()
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ddp_comm_hook(communicator))

    Keep this order: the communicator connects through the default process group's store, and makes its own group.
    If a rank is lost, backward raises an error that names it, unless one of DDP's own collectives fails first.
    """

    def hook(state: object, bucket: GradBucket) -> FutureTensor:
        bucket_N = bucket.buffer()
        label = f"all-reduce of DDP bucket {bucket.index()} ({bucket_N.nbytes} bytes)"
        is_before = bucket_N.dtype == torch.float16  # its sum could overflow
        work = communicator.start(bucket_N.div_(communicator.world_size) if is_before else bucket_N, label=label)
        # others after the sum, like all callers of the communicator: its predivide factor applies before
        return _future(work, bucket_N).then(lambda s: s.value().div_(1 if is_before else communicator.world_size))

    return hook


def _future(work: InFlight, bucket_N: Tensor) -> FutureTensor:
    """Return a future of the operation's tensor, completed by a thread (CPU) or a stream (GPU) that waits for it."""
    if bucket_N.is_cuda:
        future = FutureTensor(devices=[bucket_N.device])
        with torch.cuda.stream(torch.cuda.Stream(bucket_N.device)):  # backward's own stream must not wait yet
            work.wait()
            future.set_result(bucket_N)
        return future
    future = FutureTensor()

    def complete() -> None:
        try:
            work.wait()
        except Exception as error:  # raised again by value()
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(bucket_N)

    Thread(target=complete, name="bigbatch-ddp-bucket", daemon=True).start()
    return future
