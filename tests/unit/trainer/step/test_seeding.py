"""Draws of the forward pass."""

import random

import numpy as np
import pytest
import torch

from bigbatch.trainer.step.seeding import seed_forward


def test_seeding_draws_by_the_position_alone() -> None:
    def draw(**position: int) -> tuple[float, float, float]:
        seed_forward(3, **position)
        return torch.rand(1).item(), random.random(), np.random.rand()

    first = draw(step=5, ghost=1)
    assert draw(step=5, ghost=2) != first
    assert draw(step=6, ghost=1) != first
    assert draw(step=5, ghost=1) == first
    seed_forward(2**63 - 1, step=10**6, ghost=10**6)  # the largest seed of a config


@pytest.mark.parametrize("has_device", [False, True])
def test_seeding_seeds_the_generators_of_devices_only_if_there_are_any(
    has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_device)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_forward(0, step=0, ghost=6)
    assert seeds == [7] * has_device
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
