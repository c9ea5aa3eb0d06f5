"""The norms that a noise scale is made of, measured in real steps of a linear regression, where they are known.

x ~ N(0, I), y = x.w + e with e ~ N(0, NOISE^2). Where the weights are off by d, a sample's gradient is g = x (x.d - e),
with mean d, and E|g|^2 = (D + 2) |d|^2 + D NOISE^2 by the fourth moments of x: tr(Sigma) is that less |d|^2.
"""

import math
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from small_run import ACCUMULATION, PLAN, make_batches
from torch import Tensor, nn

from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.config.batch import Division
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.observe.gradient_noise import GradientNoise, SquaredNorms
from bigbatch.trainer.report.noise_scale import unbiased
from bigbatch.trainer.step.accumulation import WideAccumulation, half_parameters
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.loss_scale import Scaling
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, Precision
from bigbatch.trainer.step.statistics import StepStatistics

DIM, MICROBATCH, NOISE = 8, 4, 1.0
OFF = torch.full((DIM,), 1 / math.sqrt(DIM))
"""A vector of length 1."""
SIGNAL = 1.0
TRACE = (DIM + 1) * SIGNAL + DIM * NOISE**2


class Samples:
    """Draws microbatches of the regression, and keeps the mean gradient of each in float64."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(2)
        self.gradients: list[np.ndarray] = []

    def __call__(self, batch: object) -> Prepared:
        x_BD = torch.randn(MICROBATCH, DIM, generator=self._generator)
        e_B = NOISE * torch.randn(MICROBATCH, generator=self._generator)
        x, e = x_BD.double().numpy(), e_B.double().numpy()
        self.gradients.append((x * (x @ OFF.double().numpy() - e)[:, None]).mean(0))
        return Prepared(x_BD, torch.zeros(MICROBATCH, dtype=torch.int64), e_B)


def make_parts(samples: Samples, *, precision: str = "fp32", grid: Grid | None = None, **options: Any) -> Parts:
    """The weights are what they are off by, and stay, as the rate is 0."""
    communicator = connect(env=ALONE, backend="gloo", algorithm="ring")
    model = nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(OFF[None])
    weights = Precision(model, name=precision, device=torch.device("cpu"), **options)

    def prepare(batch: object) -> Prepared:
        prepared = samples(batch)
        return replace(prepared, images_BCHW=prepared.images_BCHW.to(COMPUTE_DTYPES[precision]))

    def loss(logits_B1: Tensor, targets_B: Tensor) -> Tensor:
        return 0.5 * (logits_B1[:, 0] - targets_B).square().sum()

    return Parts(
        model=model,
        statistics=StepStatistics(torch.zeros(0), microbatches=1),
        precision=weights,
        accumulation=WideAccumulation([] if grid else half_parameters(model)),
        optimizer=torch.optim.SGD(list(weights.masters.values()), lr=1.0, fused=True),
        schedule=lambda step: 0.0,
        reducer=GradientReducer(model.named_parameters(), communicator, grid=grid),
        communicator=communicator,
        prepare=prepare,  # type: ignore[arg-type]
        normalize=lambda images: images,
        loss=loss,
    )


def measure(parts: Parts, *, steps: int, every_steps: int = 1, accumulation: int = ACCUMULATION) -> list[SquaredNorms]:
    plan: Plan = replace(
        PLAN,
        num_steps=steps,
        division=Division(accumulation, world_size=1),
        microbatches=range(accumulation),
        global_batch_size=accumulation * MICROBATCH,
        log_every_steps=steps,
        eval_every_steps=steps,
    )
    noise, train_step = GradientNoise(plan, parts, every_steps=every_steps), TrainStep(plan, parts)
    stream = InputStream(repeat(make_batches(1)[0]))
    for step in range(steps):
        noise.before_step(step)
        train_step(step, stream)
        noise.after_step(step + 1)
    found = noise.take()
    assert noise.take() == []
    return found


@pytest.mark.parametrize(
    ("precision", "options", "tolerance"),
    [
        ("fp32", {}, 1e-5),
        ("fp32", {"clip_norm": 1e-3}, 1e-5),
        ("bf16", {}, 2**-6),
        ("fp16", {"scaling": Scaling(initial=1024.0, growth_steps=1)}, 2**-8),
    ],
)
def test_norms_are_those_of_the_gradients_in_float64(precision: str, options: dict[str, Any], tolerance: float) -> None:
    samples = Samples()
    found = measure(make_parts(samples, precision=precision, **options), steps=3)
    assert [norms.step for norms in found] == [1, 2, 3]
    for step, norms in enumerate(found):
        means = np.stack(samples.gradients[step * ACCUMULATION :][:ACCUMULATION])
        assert norms.microbatch == pytest.approx((means**2).sum(1).mean(), rel=tolerance)
        assert norms.global_batch == pytest.approx((means.mean(0) ** 2).sum(), rel=tolerance)


def test_sums_on_a_grid_are_measured_alike() -> None:
    found = [measure(make_parts(Samples(), grid=grid), steps=2) for grid in (None, Grid(ACCUMULATION))]
    for plain, on_grid in zip(*found, strict=True):
        assert on_grid.microbatch == plain.microbatch
        assert on_grid.global_batch == pytest.approx(plain.global_batch, rel=1e-5)


def test_both_parts_of_the_noise_scale_are_those_of_the_closed_form() -> None:
    """Within five standard errors of the mean, which are below a seventh of what is expected: a noise scale of 17."""
    steps, accumulation = 150, 4
    found = measure(make_parts(Samples()), steps=steps, accumulation=accumulation)
    pairs = np.array(
        [
            unbiased(
                norms.microbatch, norms.global_batch, small_batch=MICROBATCH, large_batch=accumulation * MICROBATCH
            )
            for norms in found
        ]
    )
    errors = pairs.std(0, ddof=1) / math.sqrt(steps)
    assert np.all(errors < 0.15 * np.array([TRACE, SIGNAL]))
    assert np.all(np.abs(pairs.mean(0) - [TRACE, SIGNAL]) < 5 * errors)
    assert TRACE / SIGNAL == 17


def test_only_every_so_many_steps_are_measured_and_no_hook_stays() -> None:
    parts = make_parts(Samples())
    assert [norms.step for norms in measure(parts, steps=7, every_steps=3)] == [3, 6]
    assert measure(parts, steps=1, every_steps=0) == []
    assert not parts.model.weight._backward_hooks
    assert not parts.model._forward_pre_hooks


def test_a_step_that_overflows_does_not_count() -> None:
    # fp16 ends at 65504: scaled gradients of about 1 overflow until the scale is some 2**15
    scaling = Scaling(initial=2.0**19, growth_steps=100)
    found = measure(make_parts(Samples(), precision="fp16", scaling=scaling), steps=9)
    assert 0 < len(found) < 9
    assert all(math.isfinite(norms.microbatch + norms.global_batch) for norms in found)


def test_a_layer_without_a_gradient_counts_as_zero() -> None:
    parts = make_parts(Samples())
    unused = nn.Linear(2, 2)
    parts.model.unused = unused  # after the reducer: nothing sums it, and backward does not reach it
    assert len(measure(parts, steps=1)) == 1
