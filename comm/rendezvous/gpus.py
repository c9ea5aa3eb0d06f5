"""Errors for ranks that share GPUs."""

import os
from collections.abc import Sequence

from bigbatch.errors import CommError
from bigbatch.words import count

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Lets NCCL 2.30 connect ranks that share a GPU, also slices of it by MIG."""
OWN = "let each see all GPUs of its host or only its own (in Slurm --gpus-per-node, or --gpus-per-task)"
ON_CPU = "train on the CPU by bigbatch launch ... --device cpu (with another launcher: --comm.backend gloo)"


def require_own_gpus(seen: Sequence[tuple[str, str]]) -> None:
    """Check that no two ranks share a GPU, unless NCCL may let them.

    seen: host of each rank, and UUID of its GPU; "" if it has none of its own.

    Raises: CommError naming the host and the ranks.
    """
    if may_share():
        return
    firsts: dict[tuple[str, str], int] = {}
    for rank, (host, gpu) in enumerate(seen):
        if gpu and firsts.setdefault((host, gpu), rank) != rank:
            raise CommError(
                f"rank {firsts[host, gpu]} and rank {rank} on {host} both use {gpu}: start one rank per GPU (on a host "
                f"with one --ranks 1), {OWN}, in a script leave out the device or name cuda:LOCAL_RANK, or {ON_CPU}"
            )


def may_share() -> bool:
    """Return whether the user lets NCCL connect ranks that share a GPU."""
    return os.environ.get(SHARING_VARIABLE) == "1"


def too_few_gpus(num_ranks: int, num_gpus: int, *, host: str, is_one_host: bool) -> CommError:
    """Return the error for a host with fewer GPUs than ranks."""
    fewer = f" (--ranks {num_gpus})" if num_gpus and is_one_host else ""
    return CommError(
        f"{count(num_ranks, 'rank')} on {host} but {count(num_gpus, 'GPU')}: start one rank per GPU{fewer}, {OWN}, or "
        f"{ON_CPU}"
    )
