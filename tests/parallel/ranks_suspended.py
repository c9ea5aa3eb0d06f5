"""Two ranks, the second of which comes late to a sum or to the meeting, when a file is there."""

import time
from pathlib import Path

import torch

import bigbatch
from bigbatch.comm.rendezvous.environ import read_process_env


def main(what: str, folder: str) -> int:
    """Say by a file in folder when the wait begins, and print the sum. what: sum or connect."""
    rank = read_process_env().rank

    def come_late() -> None:
        if rank == 0:
            Path(folder, "waits").touch()
        else:
            while not Path(folder, "come").exists():
                time.sleep(0.01)

    if what == "connect":
        come_late()
    with bigbatch.connect(backend="tcp", timeout_seconds=12, warn_seconds=12) as communicator:
        if what == "sum":
            come_late()
        print(communicator.sum_(torch.full((1,), rank + 1.0), label="ones").item())
    return 0
