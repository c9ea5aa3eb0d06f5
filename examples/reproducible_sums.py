"""Train with sums of integers: the digest of the weights is the same on 1, 2 or 4 ranks.

bigbatch launch local --ranks 2 --python -- examples/reproducible_sums.py
"""

import hashlib

import torch

from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.reducer import GradientReducer

torch.set_num_threads(1)
torch.manual_seed(1)
inputs, labels = torch.randn(8, 4, 16), torch.randint(10, (8, 4))  # 8 microbatches of 4
with connect() as communicator:
    model = torch.nn.Linear(16, 10).to(communicator.device)
    reducer = GradientReducer(model.named_parameters(), communicator, grid=Grid(num_terms=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = range(communicator.rank, 8, communicator.world_size)
    for _ in range(3):
        reducer.zero_grad()
        for k in mine:
            reducer.is_active = k == mine[-1]
            logits = model(inputs[k].to(communicator.device))
            (torch.nn.functional.cross_entropy(logits, labels[k].to(communicator.device)) / 8).backward()
            if not reducer.is_active:
                reducer.fold()
        reducer.wait()
        optimizer.step()
    if communicator.rank == 0:
        print(hashlib.sha256(model.weight.detach().cpu().numpy().tobytes()).hexdigest())
