"""The place of a process in torch's process group, for scripts that no launcher started."""

from dataclasses import replace

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bigbatch.comm.rendezvous.bounded_store import wait_until
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.errors import CommError
from bigbatch.words import name_ranks


def find_place(env: ProcessEnv, *, timeout_seconds: float) -> ProcessEnv:
    """Return env with the rank of the process group. Collective: hosts and the job's secret go through its store.

    Raises: CommError if a launcher's variables contradict the group, or after timeout_seconds without the other ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if env.launcher != "none":
        raise CommError(
            f"this process is rank {rank} of {size} in torch's process group, but rank {env.rank} of "
            f"{env.world_size} for {env.launcher}: make the process group of all ranks before connect(), or none"
        )
    store = PrefixStore("bigbatch/spawned", dist.distributed_c10d._get_default_store())
    if rank == 0 and not store.check(["secret"]):  # another connection may have begun with it
        store.set("secret", env.secret.decode() or new_secret())
    store.set(str(rank), env.host)
    if not wait_until(lambda: store.check(["secret", *map(str, range(size))]), timeout_seconds):
        late = name_ranks([each for each in range(size) if not store.check([str(each)])])
        raise CommError(f"{late} of torch's process group did not call connect() within {timeout_seconds:g} s")
    local = [each for each in range(size) if store.get(str(each)).decode() == env.host]
    return replace(
        env,
        launcher="torch's process group",
        names_launcher=False,
        rank=rank,
        world_size=size,
        local_rank=local.index(rank),
        local_size=len(local),
        secret=store.get("secret"),
    )
