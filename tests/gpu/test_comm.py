"""The reducer on a GPU: NCCL beside backward and inside a CUDA graph, host transports by way of pinned memory."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from bigbatch.comm.backends.base import Capabilities
from bigbatch.comm.backends.host_staging import HostStaging
from bigbatch.comm.backends.node_memory import NodeMemory
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE

pytestmark = pytest.mark.gpu

SMALL = {"threshold_bytes": 20_000, "buffer_bytes": 40_000}


@pytest.fixture
def nccl() -> Iterator[Communicator]:
    """A real NCCL group of one rank: everything but the wire."""
    device = torch.device("cuda", 0)
    alone = connect(env=ALONE, device=device)
    backend = TorchDistributedBackend(ALONE, alone.control, library="nccl", device=device)
    yield replace(alone, backend=backend, memory=None).with_algorithm("native")
    backend.close()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)).cuda()


def expected_gradients(inputs_BC: torch.Tensor) -> list[torch.Tensor]:
    twin = make_model()
    twin(inputs_BC).square().sum().backward()
    return [p.grad for p in twin.parameters()]


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
    torch.cuda.synchronize()
    until = time.monotonic() + 10
    while nccl.backend.oldest() is not None:  # it does not ask about what is younger than a moment
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_step_with_nccl_is_captured_as_a_cuda_graph(nccl: Communicator) -> None:
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
    with torch.cuda.graph(graph):
        step()
    for seed in (1, 2):
        inputs_BC.copy_(torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for parameter, expected in zip(model.parameters(), expected_gradients(inputs_BC), strict=True):
            torch.testing.assert_close(parameter.grad, expected)


def test_spans_on_the_gpu_follow_each_other(nccl: Communicator) -> None:
    model, inputs_BC = make_model(), torch.randn(16, 64, device="cuda")
    reducer = GradientReducer(model.named_parameters(), nccl, **SMALL)
    nccl.timeline.is_active = True
    with nccl.timeline.span("backward", row="step"):
        model(inputs_BC).square().sum().backward()
    reducer.wait()
    spans = [event for event in json.loads(nccl.gather_trace())["traceEvents"] if event["ph"] == "X"]
    sums = [span for span in spans if "all-reduce" in span["name"]]
    assert len(sums) == len(reducer.plan.buffers)
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(sums))
    assert next(span for span in spans if span["name"] == "backward")["dur"] > 0


class HostOnly(SingleBackend):
    """A transport that cannot read a GPU's memory; its sum doubles, so that it can be told from a copy."""

    capabilities = Capabilities(("cpu",))


def test_gpu_tensors_pass_through_pinned_host_memory() -> None:
    device = torch.device("cuda", 0)
    alone = connect(env=ALONE, device=device)
    memory = NodeMemory(alone.topology, alone.control)
    seen: list[bool] = []

    def double_(tensor_N: torch.Tensor) -> None:
        seen.append(tensor_N.is_pinned())
        tensor_N.mul_(2)

    staged = replace(alone, backend=HostOnly(), memory=memory, staging=HostStaging(device), all_reduce_=double_)
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
