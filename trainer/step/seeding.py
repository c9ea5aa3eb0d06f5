"""Seed random numbers from the run's seed and a position, so that they do not depend on earlier draws."""

import random

import numpy as np
import torch

_PRIME = 1_000_003
_NUM_SEEDS = 2**63
"""Seeds must be below this on every device of torch."""


def seed_forward(seed: int, *, step: int, ghost: int) -> None:
    """Seed the draws of a forward pass (such as dropout's), by torch, numpy or Python.

    ghost: number of the microbatch's first ghost batch; of its part if ranks share ghost batches. So a resumed run
    draws what the uninterrupted one drew, and with one ghost batch per microbatch any world size draws the same.
    """
    # + 1: with seed 0, step 0 must differ from torch.manual_seed(seed), with which models draw their weights
    position = ((seed * _PRIME + step) * _PRIME + ghost + 1) % _NUM_SEEDS
    # on a host without one, torch.manual_seed keeps a traceback for each kind of device: 1 ms
    seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_torch(position)
    random.seed(position)
    np.random.seed(position % 2**32)
