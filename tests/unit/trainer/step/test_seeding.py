"""Draws of the forward pass."""

import random

import numpy as np
import torch

from bigbatch.trainer.step.loop import seed_forward


def test_seeding_draws_by_the_position_alone() -> None:
    def draw(**position: int) -> tuple[float, float, float]:
        seed_forward(3, **position)
        return torch.rand(1).item(), random.random(), np.random.rand()

    first = draw(step=5, ghost=1)
    assert draw(step=5, ghost=2) != first
    assert draw(step=6, ghost=1) != first
    assert draw(step=5, ghost=1) == first
    seed_forward(2**63 - 1, step=10**6, ghost=10**6)  # the largest seed of a config
