"""Which rank has what of a sharded update, and what is too small for one; tests/parallel has the update itself."""

import pytest
import torch
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, TensorSpec
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.gradients.scatter_gather import own_part
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ConfigError
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.step import sharded
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.sharded import Piece, ShardedWeights, cut


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


def test_own_part_is_one_of_equal_parts() -> None:
    assert own_part(torch.arange(6), rank=1, world_size=3).tolist() == [2, 3]
    with pytest.raises(ValueError, match=naming("7 elements", "3 equal parts")):
        own_part(torch.arange(7), rank=0, world_size=3)


def test_sharded_weights_refuse_a_rank_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = connect(env=ALONE, backend="gloo")
    model = nn.Linear(1, 1, bias=False)
    precision = Precision(model, name="fp32", device=communicator.device)
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True)
    monkeypatch.setattr(sharded, "cut", lambda plan, **place: {"weight": Piece(0, 0, 0, 0, 0)})
    with pytest.raises(ConfigError, match=naming("optimizer.sharded=True ", " 1 ranks", "false")):
        ShardedWeights(model, precision.masters, reducer, communicator)


def test_sharded_weights_measure_what_an_update_waits_for() -> None:
    communicator = connect(env=ALONE, backend="gloo")
    model = nn.Linear(3, 2)
    precision = Precision(model, name="bf16", device=communicator.device)
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True)
    weights = ShardedWeights(model, precision.masters, reducer, communicator)
    reducer.exposed.take_seconds()
    for wait in (weights.publish_, lambda: weights.norms(list(weights.masters.values()))):
        wait()
        assert reducer.exposed.take_seconds() > 0


def test_sharded_weights_refuse_an_optimizer_that_would_adapt_by_norms_of_shares() -> None:
    communicator = connect(env=ALONE, backend="gloo")
    model = nn.Linear(3, 2)
    precision = Precision(model, name="fp32", device=communicator.device)
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True)
    weights = ShardedWeights(model, precision.masters, reducer, communicator)
    masters = list(weights.masters.values())
    for adapting in (LARS(masters, lr=1.0), LAMB(masters, lr=1.0)):
        weights.attach(adapting)
        assert adapting.norms == weights.norms
        del adapting.norms  # as one that calls them otherwise
        with pytest.raises(TypeError, match=naming(type(adapting).__name__, "norms")):
            weights.attach(adapting)
    weights.attach(torch.optim.SGD([{"params": masters, "adapt": True}], lr=1.0))  # it carries the key along
