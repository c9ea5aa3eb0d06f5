"""Three ranks, of which one comes late to a sum: `BACKEND PATH TIMEOUT_SECONDS`; it waits for a file there."""

import time
from pathlib import Path

import torch
from patient_count import await_all_but
from torch import nn

from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import PeerLostError

LATE = 1
SURVIVED = 7


def main(backend: str, until: str, timeout_seconds: str) -> int:
    """Train two steps; the late rank waits before the second one's backward."""
    torch.set_num_threads(1)
    await_all_but(LATE)
    communicator = connect(backend=backend, warn_seconds=1.0, timeout_seconds=float(timeout_seconds))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    reducer = GradientReducer(model.named_parameters(), communicator)
    try:
        for step in range(2):
            while step == 1 and communicator.rank == LATE and not Path(until).exists():
                time.sleep(0.05)
            model(torch.ones(1, 4)).sum().backward()
            reducer.wait()
    except PeerLostError as error:
        print(f"ended: {error}", flush=True)
        return SURVIVED
    communicator.close()
    return 0
