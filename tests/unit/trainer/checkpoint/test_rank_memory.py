"""What a rank keeps for its update: by hand, for buffers that do not divide by the ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, TensorSpec
from bigbatch.trainer.checkpoint.rank_memory import checkpoint_bytes, rank_bytes, sharded_note, update_memory
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config

SGD = ("--optimizer.name=sgd",)
LAMB = ("--optimizer.name=lamb",)
MUON = ("--optimizer.name=muon",)
SHAMPOO = ("--optimizer.name=shampoo", "--optimizer.options.block_size=4")


def make(*words: str, num_ranks: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Config, Any]:
    """A model of 10 weights in a buffer of 7 and one of 3."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(count, dtype=dtype)) for count in (7, 3)])
    buffers = tuple(
        BufferPlan((TensorSpec(str(number), parameter.numel(), parameter.element_size(), str(dtype)),))
        for number, parameter in enumerate(model)
    )
    reducer = SimpleNamespace(plan=FusionPlan(buffers), grid=None)
    parts = SimpleNamespace(communicator=SimpleNamespace(world_size=num_ranks), reducer=reducer, model=model)
    return load_config(["--config", "quickstart", *words]), parts


@pytest.mark.parametrize(
    ("words", "dtype", "per_weight"),
    [
        ((), torch.float32, 4),  # LARS: a momentum
        (SGD, torch.float32, 4),
        ((*SGD, "--optimizer.momentum=0"), torch.float32, 0),
        ((*SGD, "--optimizer.momentum=0"), torch.bfloat16, 8),  # a master and its gradient
        (LAMB, torch.float32, 8),  # two means
        ((), torch.bfloat16, 12),  # a momentum, a master and its gradient
        (LAMB, torch.float16, 16),
    ],
)
def test_memory_of_an_update_is_a_share_of_each_buffer(
    words: tuple[str, ...], dtype: torch.dtype, per_weight: int
) -> None:
    config, parts = make(*words, "--optimizer.sharded=true", dtype=dtype)
    memory = update_memory(config, parts)
    # of four ranks each has 2 of 7 weights and 1 of 3, rounded up
    assert (memory.whole_bytes, memory.kept_bytes) == (10 * per_weight, 3 * per_weight)
    assert (memory.gradient_bytes, memory.summed_bytes) == (10 * dtype.itemsize, 3 * dtype.itemsize)
    assert f"4 ranks: each keeps {3 * per_weight / 1e6:.3g} MB" in sharded_note(config, parts)
    whole = make(*words, dtype=dtype)
    assert update_memory(*whole).kept_bytes == memory.whole_bytes


def test_sums_on_a_grid_travel_as_integers_and_are_kept_as_weights_are() -> None:
    """The plan of a grid has 8 bytes an element, and tensors at multiples of align: of a weight there is no more."""
    config, parts = make("--optimizer.sharded=true", num_ranks=2, dtype=torch.bfloat16)
    plan = parts.reducer.plan
    parts.reducer.plan = FusionPlan(
        tuple(BufferPlan(tuple(replace(t, element_bytes=8) for t in each.tensors), align=4) for each in plan.buffers)
    )
    memory = update_memory(config, parts)
    # LARS: a momentum, a master and its gradient, 12 bytes; of two ranks each has 4 of the 7 in 8 places, 4 of the 3
    assert (memory.whole_bytes, memory.kept_bytes) == (10 * 12, 8 * 12)
    assert (memory.gradient_bytes, memory.summed_bytes) == (10 * 2, 8 * 2)


def test_memory_of_a_rank_and_of_a_checkpoint() -> None:
    averaged = ("--optimizer.ema_decay=0.9", "--optimizer.ema_every_steps=1")
    # fp32: weight, gradient, momentum; a checkpoint has weight and momentum
    assert (rank_bytes(*make()), checkpoint_bytes(*make())) == (120, 80)
    assert (rank_bytes(*make(*averaged)), checkpoint_bytes(*make(*averaged))) == (160, 120)
    assert checkpoint_bytes(*make(*SGD, "--optimizer.momentum=0")) == 40
    # bf16: 2 + 2 of the model, master, its gradient and momentum
    assert rank_bytes(*make(dtype=torch.bfloat16)) == 160
    assert rank_bytes(*make("--optimizer.sharded=true", dtype=torch.bfloat16)) == 40 + 3 * 12
    config, parts = make()
    parts.reducer.grid = object()  # integers of 64 bits, in which gradients are summed
    assert rank_bytes(config, parts) == 120 + 80


def test_memory_of_work_on_matrices_that_ranks_share_out() -> None:
    """Two matrices of 6 x 4, and a vector of 5: 53 weights with a gradient and a momentum each, in fp32."""

    def make_matrices(*words: str, num_ranks: int) -> tuple[Config, Any]:
        config, parts = make(*words, num_ranks=num_ranks)
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in ((6, 4), (6, 4), (5,))])
        names = [str(number) for number, _ in enumerate(model)]
        tensors = tuple(TensorSpec(name, p.numel(), 4, "f") for name, p in zip(names, model, strict=True))
        reducer = SimpleNamespace(plan=FusionPlan((BufferPlan(tensors),)), grid=None)
        return config, SimpleNamespace(communicator=parts.communicator, reducer=reducer, model=model)

    plain = 53 * 3 * 4
    assert rank_bytes(*make_matrices(*SGD, num_ranks=2)) == plain
    # a matrix each: 48 numbers are gathered, in half precision of half the bytes; alone there is no gather
    assert rank_bytes(*make_matrices(*MUON, num_ranks=2)) == plain + 48 * 4
    in_half = (*MUON, "--optimizer.options.newton_schulz_precision=bf16")
    assert rank_bytes(*make_matrices(*in_half, num_ranks=2)) == plain + 48 * 2
    assert rank_bytes(*make_matrices(*MUON, num_ranks=1)) == plain
    # sharded, a rank has 27 of 54 places of the state, and a buffer of all 54 for whole matrices
    sharded = make_matrices(*MUON, "--optimizer.sharded=true", num_ranks=2)
    assert rank_bytes(*sharded) == 53 * 2 * 4 + 27 * 4 + 48 * 4 + 54 * 4
    assert "and muon keeps 0.000408 MB on each for whole matrices" in sharded_note(*sharded)
    # on five ranks three had padding: all do all
    assert rank_bytes(*make_matrices(*MUON, num_ranks=5)) == plain
    # blocks of 3 x 4, two a matrix: factors and roots of 9 + 16 numbers each
    state = 2 * 4 * (9 + 16) * 4
    assert rank_bytes(*make_matrices(*SHAMPOO, num_ranks=1)) == plain + state
    assert checkpoint_bytes(*make_matrices(*SHAMPOO, num_ranks=1)) == 53 * 2 * 4 + state
    # 4 roots of 16 and 4 of 9 in two equal parts
    assert rank_bytes(*make_matrices(*SHAMPOO, num_ranks=2)) == plain + state + 100 * 4
