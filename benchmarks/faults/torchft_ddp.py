"""Meta's torchft, which goes on with those that are left: each rank is a replica group of its own.

A rank of `benchmarks.faults.effective`: not to be started by hand. It starts itself again when it was lost, as a
scheduler would, and takes the state from another one; the first one holds the lighthouse, at which all meet. While one
is away, the others' steps have fewer images: what is noted are steps of the whole batch.
"""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.faults.ddp import make_training, note, parse

WORKER = "BENCHMARK_WORKER"
PORT = 29510


def main() -> None:
    """Train until the process is killed; outside of a worker, start one again and again."""
    if WORKER in os.environ:
        train()
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    if rank == 0:
        options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--bind", f"[::]:{PORT}"]
        subprocess.Popen(["torchft_lighthouse", *options], env=without_rank())
    variables = os.environ | {WORKER: "1", "TORCHFT_LIGHTHOUSE": f"http://{address}:{PORT}"}
    while True:
        worker = [sys.executable, "-m", "benchmarks.faults.torchft_ddp", *sys.argv[1:]]
        subprocess.run(worker, env=variables, check=False)


def without_rank() -> dict[str, str]:
    """Return the environment of a process that is not a rank, and is not struck."""
    return {name: value for name, value in os.environ.items() if name != "RANK"}


def train() -> None:
    """Train as one replica group of one rank."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # not installed in most places

    options = parse()
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model, sgd, images_BCHW, labels_B = make_training(options)

    def load(kept: dict[str, Any]) -> None:
        model.load_state_dict(kept["model"])
        sgd.load_state_dict(kept["optimizer"])

    host = socket.gethostname()  # as the other groups reach it
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=15)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=15),
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        replica_id=f"rank_{rank}",
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    while True:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images_BCHW), labels_B).backward()
        optimizer.step()
        note(options.folder, manager.batches_committed() / world_size)


if __name__ == "__main__":
    main()
