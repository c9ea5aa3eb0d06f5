"""What is said where Horovod is missing, built otherwise, or asked for what it cannot do. No Horovod needed."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from error_texts import naming

from bigbatch.comm.backends.horovod import HorovodBackend, import_horovod
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.errors import CommError


def install(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Put a Horovod with these names in place of any real one."""
    package, module = ModuleType("horovod"), ModuleType("horovod.torch")
    vars(module).update(names)
    package.torch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", module)


def test_horovod_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(CommError, match=naming("pip install 'bigbatch[horovod]'", "docs/from-horovod.md")) as caught:
        import_horovod()
    assert "\n" not in str(caught.value)


def test_horovod_built_without_torch_or_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(CommError, match=naming("Horovod", "PyTorch", "docs/from-horovod.md")):
        import_horovod()
    install(monkeypatch, mpi_built=lambda: False)
    with pytest.raises(CommError, match=naming("without MPI", "HOROVOD_WITH_MPI=1")):
        import_horovod()
    install(monkeypatch, mpi_built=lambda: True)
    assert import_horovod().mpi_built()


ENV = ProcessEnv("openmpi", 0, 2, 0, 2, "here", None)
CONTROL = cast(Control, SimpleNamespace())


def test_horovod_refuses_gpus() -> None:
    with pytest.raises(CommError, match=naming("cuda:0", "comm.backend", "nccl", "CUDA_VISIBLE_DEVICES=")):
        HorovodBackend(ENV, CONTROL, device=torch.device("cuda", 0))


def test_horovod_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi_built=lambda: True, is_initialized=lambda: True)
    with pytest.raises(CommError, match=naming("connect()", "hvd.init()")):
        HorovodBackend(ENV, CONTROL, device=torch.device("cpu"))


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


def test_horovod_states_what_it_can_do() -> None:
    capabilities = HorovodBackend.capabilities
    assert capabilities.device_types == ("cpu",)
    assert torch.bfloat16 not in capabilities.dtypes
    assert not capabilities.has_messages


def test_horovod_is_not_needed_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert connect(backend="horovod", env=ALONE, device=torch.device("cpu")).backend.name == "single"
