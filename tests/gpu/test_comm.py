"""The reducer on a GPU: NCCL beside backward and inside a CUDA graph, host transports by way of pinned memory."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_ranks import exit_codes, places, start_rank
from gpu_ranks import REFUSED, over_nccl
from torch import nn

from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Capabilities
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.connection import Connection
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.alone import AloneControl
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.timeline import recording
from bigbatch.comm.transport import make_transport
from bigbatch.errors import CommError
from bigbatch.user_settings import visible_gpus

pytestmark = pytest.mark.gpu

SMALL = {"threshold_bytes": 20_000, "buffer_bytes": 40_000}


@pytest.fixture
def nccl() -> Iterator[Communicator]:
    """A real NCCL group of one rank: everything but the wire."""
    communicator = over_nccl(connect(env=ALONE, device=torch.device("cuda", 0)))
    yield communicator
    communicator.close()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)).cuda()


def expected_gradients(inputs_BC: torch.Tensor) -> list[torch.Tensor]:
    twin = make_model()
    twin(inputs_BC).square().sum().backward()
    return [p.grad for p in twin.parameters()]


@pytest.mark.parametrize(
    ("num_ranks", "group_size"), [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (4, 3), (8, 8), (8, 4), (8, 3), (8, 1)]
)
def test_contract_over_nccl(num_ranks: int, group_size: int, tmp_path: Path) -> None:
    """The contract of tests/parallel over real NCCL: as many ranks as there are GPUs, in node groups."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    log = tmp_path / "log"
    ranks = [
        start_rank("ranks:main", ["check", "-", str(group_size), "nccl"], environ=place, stdout=log, stderr=log)
        for place in places(num_ranks)
    ]
    assert exit_codes(ranks, timeout_seconds=280) == [0] * num_ranks, log.read_text()


def test_nccl_sums_beside_backward(nccl: Communicator) -> None:
    model, inputs_BC = make_model(), torch.randn(16, 64, device="cuda")
    reducer = GradientReducer(model.named_parameters(), nccl, **SMALL)
    for _ in range(3):
        model(inputs_BC).square().sum().backward()
        reducer.wait()
        for parameter, expected in zip(model.parameters(), expected_gradients(inputs_BC), strict=True):
            torch.testing.assert_close(parameter.grad, expected)
        reducer.zero_grad()
    assert reducer.exposed.take_seconds() >= 0


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_buffers_registered_with_nccl_sum_as_others_do(is_symmetric: bool, nccl: Communicator) -> None:
    model, inputs_BC = make_model(), torch.randn(16, 64, device="cuda")
    assert isinstance(nccl.transport.backend, TorchDistributedBackend)
    try:
        registered = nccl.transport.backend.register(nccl.device, is_symmetric=is_symmetric)
    except CommError as error:
        pytest.skip(f"torch gives out no such memory on this GPU: {error}")
    reducer = GradientReducer(
        model.named_parameters(), replace(nccl, transport=replace(nccl.transport, registered=registered)), **SMALL
    )
    for _ in range(3):  # the buffers are laid out again after the first
        model(inputs_BC).square().sum().backward()
        reducer.wait()
        for parameter, expected in zip(model.parameters(), expected_gradients(inputs_BC), strict=True):
            torch.testing.assert_close(parameter.grad, expected)
        reducer.zero_grad()
    reducer.close()
    registered.close()


def test_closed_connection_leaves_the_default_group_to_others() -> None:
    device = torch.device("cuda", 0)
    control = JobControl(ALONE, timeout_seconds=60)
    first, second = (TorchDistributedBackend(ALONE, control, library="nccl", device=device) for _ in range(2))
    second.close()
    tensor_N = torch.arange(3.0, device=device)
    first.all_reduce_(tensor_N, first.world)
    assert torch.equal(tensor_N, torch.arange(3.0, device=device))
    first.close()


def test_step_with_nccl_is_captured_as_a_cuda_graph(nccl: Communicator) -> None:
    model, inputs_BC = make_model(), torch.randn(16, 64, device="cuda")
    reducer = GradientReducer(model.named_parameters(), nccl, **SMALL)

    def step() -> None:
        reducer.zero_grad()
        model(inputs_BC).square().sum().backward()
        reducer.wait()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first step also settles the order of the buffers
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ThreadPoolExecutor(1) as watcher:
        step()
        watcher.submit(
            nccl.transport.backend.oldest
        ).result()  # while torch's default mode forbids queries to all threads
    for seed in (1, 2):
        inputs_BC.copy_(torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for parameter, expected in zip(model.parameters(), expected_gradients(inputs_BC), strict=True):
            torch.testing.assert_close(parameter.grad, expected)


def test_spans_on_the_gpu_follow_each_other(nccl: Communicator) -> None:
    model, inputs_BC = make_model(), torch.randn(16, 64, device="cuda")
    reducer = GradientReducer(model.named_parameters(), nccl, **SMALL)
    with recording(nccl.transport) as timeline:
        with timeline.span("backward", row="step"):
            model(inputs_BC).square().sum().backward()
        reducer.wait()
    spans = [
        event for event in json.loads(timeline.gather(nccl.connection.control))["traceEvents"] if event["ph"] == "X"
    ]
    sums = [span for span in spans if "all-reduce" in span["name"]]
    assert len(sums) == len(reducer.plan.buffers)
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(sums))
    assert next(span for span in spans if span["name"] == "backward")["dur"] > 0


class HostOnly(SingleBackend):
    """A transport that cannot read a GPU's memory; its sum doubles, to distinguish it from a copy."""

    capabilities = Capabilities(("cpu",))


def test_gpu_tensors_pass_through_pinned_host_memory() -> None:
    device = torch.device("cuda", 0)
    seen: list[bool] = []

    def double_(tensor_N: torch.Tensor) -> None:
        assert tensor_N.device.type == "cpu"
        seen.append(tensor_N.is_pinned())
        tensor_N.mul_(2)

    control = AloneControl(ALONE, timeout_seconds=60.0, warn_seconds=10.0)
    connection = Connection(ALONE, control, HostOnly(), make_topology(["here"], rank=0))
    staged = Communicator(make_transport(connection, device=device), "native", double_, Wire())
    assert staged.allocate(10, torch.float32).is_cuda
    model, inputs_BC = make_model(), torch.randn(16, 64, device="cuda")
    reducer = GradientReducer(model.named_parameters(), staged, **SMALL)
    for _ in range(2):
        model(inputs_BC).square().sum().backward()
        reducer.wait()
        for parameter, expected in zip(model.parameters(), expected_gradients(inputs_BC), strict=True):
            torch.testing.assert_close(parameter.grad, 2 * expected)
        reducer.zero_grad()
    assert seen
    assert all(seen)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("algorithm", ["native", "ring", "hierarchical", "sharded", "doubling"])
def test_ranks_sum_tensors_of_a_gpu_over_tcp(algorithm: str, group_size: int, tmp_path: Path) -> None:
    """Alone in their node groups and together in one: both have to bring them to the host. They share the first GPU."""
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = [
        start_rank("gpu_ranks:sum_over_tcp", [algorithm, str(group_size)], environ=place, stdout=log, stderr=log)
        for place, log in zip(places(2), logs, strict=True)
    ]
    assert exit_codes(ranks, timeout_seconds=200) == [0, 0], "\n".join(log.read_text() for log in logs)


def test_rank_takes_up_no_memory_of_another_ranks_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    log = tmp_path / "log"
    rank = start_rank("gpu_ranks:copy_on_a_thread", [], environ={}, stdout=log, stderr=log)
    assert exit_codes([rank], timeout_seconds=100) == [0], log.read_text()


def test_whether_cuda_has_started_is_known() -> None:
    """After its start it ignores another list of GPUs."""
    script = (
        "import torch; from bigbatch.trainer.machine import host\n"
        "before = torch.cuda.device_count(), host._has_cuda_started()\n"
        "torch.cuda.is_available(); print(before[0] > 0, before[1], host._has_cuda_started())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


def test_ranks_that_list_their_own_gpu_first_sum_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    log = tmp_path / "log"
    listed = [
        start_rank("gpu_ranks:meet_on_the_gpu_listed_first", [], environ=place, stdout=log, stderr=log)
        for place in places(2)
    ]
    assert exit_codes(listed, timeout_seconds=200) == [0, 0], log.read_text()


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_that_see_one_gpu_each_take_it_if_it_is_not_the_same(is_shared: bool, tmp_path: Path) -> None:
    names = visible_gpus(torch.cuda.device_count())
    if not is_shared and len(names) < 2:
        pytest.skip("needs two GPUs")
    log = tmp_path / "log"
    ranks = [
        start_rank(
            "gpu_ranks:meet_on_the_gpu_in_sight",
            [],
            environ={**place, "CUDA_VISIBLE_DEVICES": names[0 if is_shared else rank]},
            stdout=log,
            stderr=log,
        )
        for rank, place in enumerate(places(2))
    ]
    assert exit_codes(ranks, timeout_seconds=200) == [REFUSED if is_shared else 0] * 2, log.read_text()
    if is_shared:
        for words in ("2 ranks", "1 GPU ", "GPU-"):
            assert words in log.read_text()
