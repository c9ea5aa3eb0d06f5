"""Horovod as a transport: for clusters that are set up for it, and to compare with it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.comm.backends.base import Capabilities, Group, InFlight
from bigbatch.comm.backends.in_flight import ThreadQueue, behind_kernels
from bigbatch.comm.backends.mpi import on_queue
from bigbatch.comm.backends.operation_tags import OperationTags, require_same_operation
from bigbatch.comm.rendezvous.by_mpi import mpi_world
from bigbatch.comm.rendezvous.control import OperationFacts
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CommError, first_line, tell

PAGE = "docs/compare.md#horovod-as-a-backend"
HOW_TO_BUILD = f"examples/build_horovod.sh builds it ({PAGE}), and comm.backend tcp or mpi needs none"


def import_horovod() -> Any:
    """Import Horovod's PyTorch module, built with MPI. Raises: CommError naming the page on its build."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise CommError(
            f"the Horovod backend needs Horovod ({first_line(error)}), whose sources do not compile with a recent "
            f"torch: {HOW_TO_BUILD}"
        ) from error
    if not hasattr(hvd, "mpi_built"):  # it installs even if its build failed
        raise CommError(f"Horovod was built without PyTorch support: build it in this environment; {HOW_TO_BUILD}")
    if not hvd.mpi_built():
        raise CommError(f"Horovod was built without MPI: build it with HOROVOD_WITH_MPI=1; {HOW_TO_BUILD}")
    return hvd


def sums_on_gpus() -> bool:
    """Return whether Horovod was built to sum GPU tensors by NCCL. Raises: CommError as import_horovod()."""
    return bool(import_horovod().nccl_built())


class HorovodBackend:
    """Sums by Horovod 0.28's collectives: on host memory over MPI, on GPUs by NCCL; groups are its process sets.

    Horovod's background threads agree on the next operations once per HOROVOD_CYCLE_TIME (1 ms), so no operation takes
    less. Horovod has no messages between two ranks, no bf16, and no time limit: wait() gives up after the control's.
    If it uses the CPU although there are GPUs, rank 0 prints that on standard error.
    Raises: CommError for a GPU if Horovod was built without NCCL; if Horovod is missing, was built without PyTorch or
    MPI, or is initialized already; if MPI reports another rank or world size than the launcher.
    """

    name = "horovod"

    def __init__(self, env: ProcessEnv, control: JobControl, *, device: torch.device, **_: object) -> None:
        self._hvd = import_horovod()
        device_types = ("cpu", "cuda") if sums_on_gpus() else ("cpu",)
        dtypes = (torch.float64, torch.float32, torch.float16, torch.int64)
        self.capabilities = Capabilities(device_types, dtypes, has_messages=False, sums_half_in_fp32=False)
        self._gpu = device if device.type == "cuda" else None
        if device.type not in device_types:
            raise CommError(
                f"Horovod was built without NCCL and sums tensors of the host, not of {device}: build it with "
                f"HOROVOD_GPU_OPERATIONS=NCCL ({HOW_TO_BUILD}), set comm.backend to nccl, or hide the GPUs by "
                "CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        if "cuda" not in device_types and torch.cuda.is_available() and env.rank == 0 and not env.keeps_to_cpu:
            tell(
                "Horovod was built without NCCL, so training keeps to the CPU: "
                f"{PAGE} says what a build needs, and comm.backend nccl takes the GPUs"
            )
        if self._hvd.is_initialized():  # by the script or another communicator: one would end it for both
            raise CommError("Horovod is initialized already: call connect() once, instead of hvd.init()")
        mpi_world(env)  # starts MPI: if Horovod started it, Horovod would also end it, before bigbatch does
        detector = control.detector
        self._queue = ThreadQueue(detector.make_error_and_stop_requests, while_waiting=detector.raise_if_failed)
        self.oldest = self._queue.oldest
        on_queue(self._queue, lambda: self._hvd.init(process_sets="dynamic"), label="start of Horovod")
        self.rank: int = self._hvd.rank()
        self.world_size: int = self._hvd.size()
        self.world = Group(tuple(range(self.world_size)), self._hvd.global_process_set)
        self._process_sets = {self.world.ranks: self.world.handle}
        # _name() does not tell two sums of one size apart
        self._queue.begin = partial(require_same_operation, self, tags=OperationTags(self.rank))

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Make a process set for each family that has none yet; Horovod needs every rank to make all of them."""
        for ranks in map(tuple, families):
            assert ranks == tuple(sorted(ranks)), "a process set has no order but that of the ranks"
            if ranks not in self._process_sets:
                add = partial(self._hvd.add_process_set, ranks)
                self._process_sets[ranks] = on_queue(self._queue, add, label=f"Horovod's process set of {len(ranks)}")
        mine = next(tuple(ranks) for ranks in families if self.rank in ranks)
        return Group(mine, self._process_sets[mine])

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        name = _name("sum", tensor_N, group)
        self._hvd.allreduce_(tensor_N, op=self._hvd.Sum, name=name, process_set=group.handle)

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Sum by an all-reduce: Horovod has no reduce."""
        self.all_reduce_(tensor_N, group)

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        name = _name("broadcast", tensor_N, group)
        self._hvd.broadcast_(tensor_N.view(torch.uint8), root, name=name, process_set=group.handle)

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        name = _name("reduce-scatter", tensor_N, group)
        shard_M.copy_(self._hvd.reducescatter(tensor_N, op=self._hvd.Sum, name=name, process_set=group.handle))

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        name = _name("all-gather", tensor_N, group)
        tensor_N.view(torch.uint8).copy_(
            self._hvd.allgather(shard_M.view(torch.uint8), name=name, process_set=group.handle)
        )

    def _refuse(self, *_: Tensor, **__: Any) -> InFlight:
        raise CommError("Horovod sends no messages between two ranks: set comm.algorithm to native")

    start_send = start_receive = start_exchange = _refuse

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        """Start the operation on a thread, while backward continues, after the GPU's work so far."""
        if self._gpu is not None:  # Horovod itself waits only for the stream of that thread
            operation = behind_kernels(operation, self._gpu)
        return self._queue.submit(operation, **facts)

    def close(self) -> None:
        if self._queue.is_closed:
            return
        self.submit(self._hvd.barrier, label="the last barrier").wait()
        self.abandon()

    def abandon(self) -> None:
        """Shut Horovod down, so that another connection can start it."""
        self._queue.close()
        self._hvd.shutdown()


def _name(operation: str, tensor_N: Tensor, group: Group) -> str:
    """Return the name by which ranks match an operation; one for each kind and size, because Horovod caches by name.

    No two operations of one name are under way at once, because submitted operations run one after another.
    """
    return f"bigbatch.{operation}.{tensor_N.dtype}.{tensor_N.numel()}.{group.handle.process_set_id}"
