"""Errors if Horovod is missing, built differently, or cannot do what is asked; and the device on which it sums.

No Horovod needed.
"""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from error_texts import naming
from played_gpus import PlayedEvent, PlayedGpus, PlayedStream

from bigbatch.comm.backends import horovod
from bigbatch.comm.backends.horovod import PAGE, HorovodBackend, import_horovod
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CommError


def install(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    package, module = ModuleType("horovod"), ModuleType("horovod.torch")
    vars(module).update(names)
    package.torch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", module)


def test_horovod_missing_names_the_page_on_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(CommError, match=naming("do not compile with a recent torch", PAGE)) as caught:
        import_horovod()
    assert "\n" not in str(caught.value)


def test_horovod_built_without_torch_or_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(CommError, match=naming("Horovod", "PyTorch", PAGE)):
        import_horovod()
    install(monkeypatch, mpi_built=lambda: False)
    with pytest.raises(CommError, match=naming("without MPI", "HOROVOD_WITH_MPI=1")):
        import_horovod()
    install(monkeypatch, mpi_built=lambda: True)
    assert import_horovod().mpi_built()


CPU = torch.device("cpu")
ENV = ProcessEnv("openmpi", 0, 2, 0, 2, "here", None)
CONTROL = cast(JobControl, SimpleNamespace())


def test_horovod_without_nccl_refuses_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi_built=lambda: True, nccl_built=lambda: False)
    with pytest.raises(CommError, match=naming("cuda:0", "comm.backend", "nccl", "CUDA_VISIBLE_DEVICES=")):
        HorovodBackend(ENV, CONTROL, device=torch.device("cuda", 0))


def test_horovod_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi_built=lambda: True, nccl_built=lambda: False, is_initialized=lambda: True)
    with pytest.raises(CommError, match=naming("connect()", "hvd.init()")):
        HorovodBackend(ENV, CONTROL, device=CPU)


def test_horovod_refuses_messages() -> None:
    backend = HorovodBackend.__new__(HorovodBackend)
    tensor_N = torch.zeros(1)
    for operation in (
        lambda: backend.start_send(tensor_N, to=1),
        lambda: backend.start_receive(tensor_N, source=1),
        lambda: backend.start_exchange(send=tensor_N, to=1, receive=tensor_N, source=1),
    ):
        with pytest.raises(CommError, match=naming("Horovod", "comm.algorithm", "native")):
            operation()


class FakeHorovod:
    """Horovod with two ranks; the other one holds the same values. Records each call, and the GPU in use then."""

    Sum = "sum"
    global_process_set = SimpleNamespace(process_set_id=0)

    def __init__(self, *, has_nccl: bool) -> None:
        self.asked: list[tuple[str, int]] = []
        self.mpi_built, self.nccl_built = lambda: True, lambda: 22800 if has_nccl else 0  # as it answers
        self.is_initialized, self.init = lambda: False, lambda process_sets: None
        self.rank, self.size = lambda: 0, lambda: 2
        self.barrier = self.shutdown = lambda: None

    def allreduce_(self, tensor_N: torch.Tensor, *, op: str, name: str, process_set: Any) -> None:
        self.asked.append((threading.current_thread().name, torch.cuda.current_device()))
        tensor_N.mul_(2)

    def allgather(self, tensor_N: torch.Tensor, *, name: str, process_set: Any) -> torch.Tensor:
        return tensor_N.repeat(2)


def backend_over(hvd: FakeHorovod, monkeypatch: pytest.MonkeyPatch, *, device: torch.device) -> HorovodBackend:
    monkeypatch.setattr(horovod, "import_horovod", lambda: hvd)
    monkeypatch.setattr(horovod, "mpi_world", lambda env: None)
    detector = SimpleNamespace(make_error_and_stop_requests=None, raise_if_failed=lambda label, seconds: None)
    control = cast(JobControl, SimpleNamespace(detector=detector))
    return HorovodBackend(ENV, control, device=device)


@pytest.mark.parametrize("has_nccl", [False, True])
def test_horovod_states_what_it_can_do(has_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_over(FakeHorovod(has_nccl=has_nccl), monkeypatch, device=CPU)
    assert backend.capabilities.device_types == (("cpu", "cuda") if has_nccl else ("cpu",))
    assert torch.bfloat16 not in backend.capabilities.dtypes
    assert not backend.capabilities.has_messages
    backend.close()


def test_horovod_with_nccl_sums_on_the_ranks_own_gpu_behind_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod looks at the stream of the thread that calls it, which has seen none of the kernels."""
    gpus = PlayedGpus(2, monkeypatch=monkeypatch)
    gpu, hvd, tensor_N = torch.device("cuda", 1), FakeHorovod(has_nccl=True), torch.ones(3)
    backend = backend_over(hvd, monkeypatch, device=gpu)
    order: list[str] = []
    monkeypatch.setattr(PlayedEvent, "synchronize", lambda event: order.append(f"kernels of {event.stream.device}"))
    monkeypatch.setattr(PlayedStream, "synchronize", lambda stream: order.append(f"all of {stream.device}"))

    def sum_() -> None:
        backend.all_reduce_(tensor_N, backend.world)
        order.append("sum")

    backend.submit(sum_, label="sum").wait()
    assert order == ["kernels of cuda:1", "sum", "all of cuda:1"]
    assert (hvd.asked, gpus.recorded) == ([("bigbatch-comm", 1)], [gpus.current_stream(gpu)])
    assert tensor_N.tolist() == [2.0] * 3
    backend.close()


@pytest.mark.parametrize(("num_gpus", "has_nccl", "is_said"), [(2, False, True), (2, True, False), (0, False, False)])
def test_horovod_that_keeps_to_the_cpu_beside_gpus_says_so(
    num_gpus: int, has_nccl: bool, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PlayedGpus(num_gpus, monkeypatch=monkeypatch)
    backend_over(FakeHorovod(has_nccl=has_nccl), monkeypatch, device=CPU).close()
    said = capsys.readouterr().err
    assert said.count("\n") == is_said
    assert all((word in said) == is_said for word in ("Horovod", "NCCL", "CPU", PAGE, "comm.backend"))


def test_horovod_is_not_needed_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert connect(backend="horovod", env=ALONE, device=CPU).transport.backend.name == "single"
