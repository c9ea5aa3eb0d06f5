"""Errors for ranks that share GPUs."""

from collections.abc import Sequence

from bigbatch.errors import CommError
from bigbatch.words import count

ON_CPU = "train on the CPU by bigbatch launch ... --device cpu (with another launcher: --comm.backend gloo)"


def require_own_gpus(seen: Sequence[tuple[str, str]]) -> None:
    """Check that no two ranks share a GPU. seen: host of each rank, and UUID of its GPU; "" if it has none of its own.

    Raises: CommError naming the host and the ranks.
    """
    firsts: dict[tuple[str, str], int] = {}
    for rank, (host, gpu) in enumerate(seen):
        if gpu and firsts.setdefault((host, gpu), rank) != rank:
            gpus = [other for place, other in seen if place == host]
            raise too_few_gpus(
                len(gpus),
                len(set(gpus)),
                host=host,
                is_one_host=len(gpus) == len(seen),
                shared=f"rank {firsts[host, gpu]} and rank {rank} both have {gpu}",
            )


def too_few_gpus(num_ranks: int, num_gpus: int, *, host: str, is_one_host: bool, shared: str = "") -> CommError:
    """Return the error for a host with fewer GPUs than ranks, or whose ranks use fewer, as shared says."""
    ranks, gpus = count(num_ranks, "rank"), count(num_gpus, "GPU")
    problem = f"{ranks} on {host} use {gpus} ({shared})" if shared else f"{ranks} on {host} but {gpus}"
    fewer = f" (--ranks {num_gpus})" if num_gpus and is_one_host else ""
    in_script = ", in a script leave out the device" if shared else ""
    return CommError(
        f"{problem}: start one rank per GPU{fewer}, let each see all GPUs of its host or only its own (in Slurm "
        f"--gpus-per-node, or --gpus-per-task){in_script}, or {ON_CPU}"
    )
