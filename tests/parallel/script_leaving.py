"""A user's script that ends without close() or by an exception inside `with`, or one of whose ranks exits first
(exits_first: before any sum).

`script_leaving.py forgets|exits|exits_first|raises BACKEND`
"""

import sys

import torch

import bigbatch


def main(how: str, backend: str) -> None:
    """Sum once, and leave."""
    if how == "forgets":
        communicator = bigbatch.connect(backend=backend, timeout_seconds=60)
        total = communicator.sum_(torch.ones(1), label="ones")
        print(f"rank {communicator.rank}: {total.item():g}")
        return
    if how in ("exits", "exits_first"):
        communicator = bigbatch.connect(backend=backend, timeout_seconds=60)
        if how == "exits":
            communicator.sum_(torch.ones(1), label="first")
        if communicator.rank == 1:
            sys.exit(3)
        communicator.sum_(torch.ones(1), label="second")
        return
    with bigbatch.connect(backend=backend, timeout_seconds=60) as communicator:
        if communicator.rank == 1:
            raise ArithmeticError("rank 1 has a defect")
        communicator.sum_(torch.ones(1), label="ones")


main(*sys.argv[1:])
