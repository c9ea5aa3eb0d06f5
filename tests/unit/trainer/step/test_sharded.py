"""Which rank has what of a sharded update, and what is too small for one; tests/parallel has the update itself."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, TensorSpec
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ConfigError, PeerLostError
from bigbatch.trainer.models import build_model
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.step import shard_layout
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.shard_layout import Piece, cut
from bigbatch.trainer.step.sharded import ShardedWeights, shard_optimizer_, shard_update


def sharded_linear(name: str = "fp32", **options: bool) -> tuple[nn.Module, GradientReducer, ShardedWeights]:
    """Six weights and two biases on one rank."""
    communicator = connect(env=ALONE, backend="gloo")
    model = nn.Linear(3, 2)
    precision = Precision(model, name=name, device=communicator.device)
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True)
    return model, reducer, ShardedWeights(model, precision.masters, reducer, communicator, **options)


def plan_of(*buffers: list[int]) -> FusionPlan:
    return FusionPlan(
        tuple(
            BufferPlan(tuple(TensorSpec(f"{i}.{j}", size, 4, "float32") for j, size in enumerate(sizes)))
            for i, sizes in enumerate(buffers)
        )
    )


def test_sharded_shares_by_hand() -> None:
    """Seven elements and two ranks: parts of four, the last one with an element of filling."""
    plan = plan_of([3, 4], [2])
    assert cut(plan, rank=0, world_size=2) == {
        "0.0": Piece(buffer=0, first=0, start=0, stop=3, offset=0),
        "0.1": Piece(buffer=0, first=3, start=3, stop=4, offset=0),
        "1.0": Piece(buffer=1, first=0, start=0, stop=1, offset=0),
    }
    assert cut(plan, rank=1, world_size=2) == {
        "0.0": Piece(buffer=0, first=0, start=0, stop=0, offset=0),
        "0.1": Piece(buffer=0, first=3, start=0, stop=3, offset=1),
        "1.0": Piece(buffer=1, first=0, start=0, stop=1, offset=1),
    }


@given(
    buffers=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    world_size=st.integers(1, 7),
)
def test_sharded_elements_are_of_one_rank_each_and_shares_are_even(buffers: list[list[int]], world_size: int) -> None:
    plan = plan_of(*buffers)
    shares = [cut(plan, rank=rank, world_size=world_size) for rank in range(world_size)]
    for buffer in plan.buffers:
        for tensor in buffer.tensors:
            pieces = [share[tensor.name] for share in shares]
            owned = [e for p in pieces for e in range(p.offset, p.offset + p.stop - p.start)]
            assert owned == list(range(tensor.num_elements))
    part = sum(-(-buffer.num_elements // world_size) for buffer in plan.buffers)
    assert all(sum(piece.stop - piece.start for piece in share.values()) <= part for share in shares)


def test_sharded_weights_refuse_a_rank_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_layout, "cut", lambda plan, **place: {"weight": Piece(0, 0, 0, 0, 0)})
    with pytest.raises(ConfigError, match=naming("optimizer.sharded=True ", " 1 rank ", "false")):
        sharded_linear()


def test_sharded_weights_measure_what_an_update_waits_for() -> None:
    _, reducer, weights = sharded_linear("bf16")
    reducer.exposed.take_seconds()
    for wait in (weights.publish_, lambda: weights.norms(list(weights.masters.values()))):
        wait()
        assert reducer.exposed.take_seconds() > 0


@dataclass
class Late:
    """A gather that brings its weights when it, or one that was started after it, is waited for."""

    under_way: list["Late"]
    number: int
    buffer_N: Tensor
    content_N: Tensor

    def wait(self) -> None:
        while self.under_way and self.under_way[0].number <= self.number:
            first = self.under_way.pop(0)
            first.buffer_N.copy_(first.content_N)


@pytest.fixture
def late_gathers(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Those under way; until then there is nothing but nan where their weights will be."""
    under_way: list[Late] = []

    def start(self: ScatterGather, buffer_N: Tensor, *, label: str) -> Late:
        under_way.append(Late(under_way, len(under_way), buffer_N, buffer_N.clone()))
        buffer_N.fill_(torch.nan)
        return under_way[-1]

    monkeypatch.setattr(ScatterGather, "start_all_gather", start)
    return under_way


@pytest.mark.slow
def test_sharded_weights_come_while_a_forward_runs(late_gathers: list[Late]) -> None:
    """No module computes with what is not there yet, and none waits for more than its own weights."""
    communicator = connect(env=ALONE, backend="gloo")
    model = build_model("resnet18", num_classes=3, norm=nn.BatchNorm2d).eval()
    images_BCHW = torch.ones(1, 3, 32, 32)
    expected_BK = model(images_BCHW)
    precision = Precision(model, name="fp32", device=communicator.device)
    sizes = {"threshold_bytes": 400_000, "buffer_bytes": 1_000_000}
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True, **sizes)
    weights = ShardedWeights(model, precision.masters, reducer, communicator, behind_forward=True)
    assert not late_gathers, "the first weights are there"
    weights.publish_()
    num_gathers = len(late_gathers)
    left: list[int] = []
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda *_: left.append(len(late_gathers)))
    assert torch.equal(model(images_BCHW), expected_BK)
    assert (left[0], left[-1]) == (num_gathers - 1, 0)
    assert len(set(left)) > num_gathers / 2, "a buffer or two more where a shortcut comes before what it passes by"


def test_sharded_update_waits_for_weights_that_no_forward_has_read(late_gathers: list["Late"]) -> None:
    communicator = connect(env=ALONE, backend="gloo")
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    precision = Precision(model, name="fp32", device=communicator.device)
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True)
    make = partial(torch.optim.SGD, lr=0.1, fused=True)
    optimizer = shard_update(
        model,
        precision,
        reducer,
        communicator,
        make_optimizer=lambda masters: make(list(masters.values())),
        behind_forward=True,
    )
    for _ in range(2):
        precision.update_(optimizer)
        assert late_gathers
    precision.wait_for_weights()
    assert not late_gathers
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_sharded_forward_names_the_gather_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, weights = sharded_linear(behind_forward=True)

    def start(self: ScatterGather, buffer_N: Tensor, *, label: str) -> SimpleNamespace:
        return SimpleNamespace(wait=Mock(side_effect=PeerLostError(f"{label} failed")))

    monkeypatch.setattr(ScatterGather, "start_all_gather", start)
    weights.publish_()
    for _ in range(2):  # nor does it continue with what came before the failure
        with pytest.raises(PeerLostError, match="all-gather of weights 0 failed"):
            model(torch.ones(1, 3))


def test_sharded_weights_refuse_an_optimizer_that_would_adapt_by_norms_of_shares() -> None:
    _, _, weights = sharded_linear()
    masters = list(weights.masters.values())
    for adapting in (LARS(masters, lr=1.0), LAMB(masters, lr=1.0)):
        shard_optimizer_(adapting, weights)
        assert adapting.norms == weights.norms
        del adapting.norms  # as one that calls them otherwise
        with pytest.raises(TypeError, match=naming(type(adapting).__name__, "norms")):
            shard_optimizer_(adapting, weights)
    shard_optimizer_(torch.optim.SGD([{"params": masters, "adapt": True}], lr=1.0), weights)  # it carries the key along
