"""Every random number of a run from its seed and a position, never from what happened before."""

import random

import numpy as np
import torch

_PRIME = 1_000_003
_NUM_SEEDS = 2**63
"""Seeds must be below this on every device of torch."""


def seed_forward(seed: int, *, step: int, ghost: int) -> None:
    """Seed what a forward pass draws (dropout), by torch, numpy or Python, from the microbatch's first ghost batch.

    So a resumed run draws what the uninterrupted one drew, and with one ghost batch per microbatch any
    world size draws the same. Where ranks share ghost batches, ghost counts their parts.
    """
    # + 1 keeps step 0 apart from torch.manual_seed(seed), with which models draw their weights, where the seed is 0
    position = ((seed * _PRIME + step) * _PRIME + ghost + 1) % _NUM_SEEDS
    # on a host without one, torch.manual_seed keeps a traceback for each kind of device: 1 ms
    seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_torch(position)
    random.seed(position)
    np.random.seed(position % 2**32)
