"""When gradients are ready, by a clock that backward moves and on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.fusion import TensorSpec
from bigbatch.comm.measure import whole_steps
from bigbatch.comm.measure.cost_model import Backward
from bigbatch.comm.measure.whole_steps import in_ready_order, measure_backward
from bigbatch.comm.rendezvous.environ import ALONE

CPU = torch.device("cpu")


class Slow(torch.autograd.Function):
    """The identity; its backward moves a clock on by one second."""

    clock = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Slow.clock += 1.0
        return gradient


def test_ready_times_by_a_clock_that_backward_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, a second of backward behind each: 0, 1 and 2 s from the last one on; unused ones at the end."""
    monkeypatch.setattr(whole_steps.time, "perf_counter", lambda: Slow.clock)
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward() -> Tensor:
        hidden_BC = torch.ones(1, 2)
        for layer in list(layers)[:3]:
            hidden_BC = layer(Slow.apply(hidden_BC.requires_grad_()))
        return hidden_BC.sum()

    parameters = dict(layers.named_parameters())
    backward = measure_backward(parameters, forward, connect(env=ALONE, device=CPU), seconds=10)
    assert backward.seconds == 3.0
    assert backward.ready_seconds == {"2.weight": 0.0, "1.weight": 1.0, "0.weight": 2.0, "3.weight": 3.0}
    assert [spec.name for spec in in_ready_order(parameters, backward)] == [f"{i}.weight" for i in (2, 1, 0, 3)]
    assert all(not p._post_accumulate_grad_hooks for p in parameters.values())  # no hook stays behind


def test_ready_times_at_once_go_last_parameter_first() -> None:
    layer = nn.Linear(3, 2)
    specs = in_ready_order(dict(layer.named_parameters()), Backward({"weight": 1.0, "bias": 1.0}, 1.0))
    assert specs == [TensorSpec("bias", 2, 4, "float32"), TensorSpec("weight", 6, 4, "float32")]


@pytest.mark.gpu
def test_ready_times_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6))).to(device)
    input_BC = torch.randn(4096, 4096, device=device)
    parameters = dict(model.named_parameters())
    alone = connect(env=ALONE, device=device)
    backward = measure_backward(parameters, lambda: model(input_BC).square().mean(), alone, seconds=5)
    ready = [backward.ready_seconds[f"{i}.weight"] for i in reversed(range(6))]
    assert ready == sorted(ready)
    assert 0 < ready[0] < 0.5 * ready[-1]
    assert ready[-1] <= backward.seconds < 5
