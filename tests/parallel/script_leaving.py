"""A user's script that ends without close(), by an exception inside `with`, or with other weights on rank 1.

Or one of whose ranks exits before the other. `script_leaving.py forgets|exits|raises|differs BACKEND`
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
    if how == "exits":
        communicator = bigbatch.connect(backend=backend, timeout_seconds=60)
        communicator.sum_(torch.ones(1), label="first")
        if communicator.rank == 1:
            sys.exit(3)
        communicator.sum_(torch.ones(1), label="second")
        return
    with bigbatch.connect(backend=backend, timeout_seconds=60) as communicator:
        if how == "raises" and communicator.rank == 1:
            raise ArithmeticError("rank 1 has a defect")
        torch.manual_seed(communicator.rank)
        if how == "differs":
            model = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(model.weight)
            bigbatch.GradientReducer(model.named_parameters(), communicator)
        communicator.sum_(torch.ones(1), label="ones")


main(*sys.argv[1:])
