"""What the ranks of a job on real GPUs do, each a process of its own that has used none before."""

import torch

from bigbatch.comm.backends.host_staging import HostStaging
from bigbatch.comm.backends.in_flight import ThreadQueue
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator, make_communicator
from bigbatch.comm.connect import choose_device, connect
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.transport import make_transport
from bigbatch.errors import CommError
from bigbatch.trainer.machine.host import list_own_gpu_first


def over_nccl(alone: Communicator) -> Communicator:
    """One rank over a real NCCL group of its own, which connect() does without: everything but the wire."""
    control = JobControl(alone.env, timeout_seconds=alone.connection.control.timeout_seconds)
    backend = TorchDistributedBackend(alone.env, control, library="nccl", device=alone.device)
    connection = Connection(alone.env, control, backend, alone.connection.topology)
    return make_communicator(make_transport(connection, device=alone.device), "native")


def sum_over_tcp(algorithm: str, group_size: str) -> int:
    """Sum tensors of the first GPU, which all ranks share here."""
    gpu = torch.device("cuda", 0)
    communicator = connect(backend="tcp", algorithm=algorithm, group_size=int(group_size), device=gpu)
    for num_elements in (1, 1000, 1 << 20):
        tensor_N = torch.arange(num_elements, dtype=torch.float32, device=gpu) + communicator.rank
        communicator.sum_(tensor_N, label="test")
        assert torch.equal(tensor_N, 2 * torch.arange(num_elements, dtype=torch.float32, device=gpu) + 1)
    communicator.close()
    return 0


REFUSED = 3


def meet_on_the_gpu_in_sight() -> int:
    """Sum over NCCL, where each rank sees one GPU."""
    try:
        communicator = connect(timeout_seconds=60)
    except CommError as error:
        print(error)
        return REFUSED
    assert communicator.transport.backend.name == "nccl"
    assert communicator.sum_(torch.ones(3, device="cuda"), label="test").tolist() == [2.0] * 3
    communicator.close()
    return 0


def meet_on_the_gpu_listed_first() -> int:
    """Sum over NCCL, where each rank sees all GPUs, its own as device 0."""
    env = read_process_env()
    list_own_gpu_first(env, backend="nccl")
    device = choose_device(env)
    assert device == torch.device("cuda", 0)
    communicator = connect(timeout_seconds=60, device=device)  # refuses ranks that share a GPU
    assert communicator.sum_(torch.ones(3, device=device), label="test").tolist() == [2.0] * 3
    communicator.close()
    return 0


def copy_on_a_thread() -> int:
    """Copy on a thread, as a rank of the last GPU does; return how many other GPUs got a CUDA context."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(last)
    staging = HostStaging(last)
    host_N, device_N = torch.zeros(1000), torch.ones(1000, device=last)
    staging.pin(host_N)
    ready = staging.ready()

    def there_and_back() -> None:
        staging.fetch(host_N, device_N, ready=ready)
        staging.copy_back(device_N, host_N.mul_(2))

    def explain(label: str, seconds: float, error: Exception) -> CommError:
        return CommError(f"{label}: {error}")

    queue = ThreadQueue(explain, while_waiting=lambda label, seconds: None)
    queue.submit(there_and_back, label="copies").wait()
    staging.join()
    queue.close()
    assert device_N.tolist() == [2.0] * 1000
    return sum(torch._C._cuda_hasPrimaryContext(index) for index in range(last.index))
