"""What every rank of a test job runs: `ranks.py MODE [ARGUMENT ...]`, started by mpirun, torchrun or by hand.

A rank that finds something wrong prints a traceback and ends at once, so that the launcher ends the job.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from patient_count import PATIENCE_SECONDS, await_all_but
from ranks_contract import check_contract, connect_to_check
from ranks_divided import check_divided_update
from ranks_norm import lose_in_a_norm
from ranks_orders import check_orders
from ranks_sharded import check_behind_forward, check_sharded_update, lose_in_a_gather
from ranks_sums import LONGEST
from torch import nn

import bigbatch
from bigbatch.comm.backends import in_flight, links
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.connection import end_mpi
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.environ import ProcessEnv, read_process_env
from bigbatch.errors import CommError, PeerLostError

SURVIVED = 7
"""Exit code of a rank that noticed the loss of another one."""


def main(mode: str, *arguments: str) -> int:
    """Run one mode; the exit code."""
    torch.set_num_threads(1)
    return MODES[mode](*arguments)


def env_on(hosts: str) -> ProcessEnv:
    """Return the environment of a rank on these hosts, such as "a,a,b"; "-" leaves the real host."""
    env = read_process_env()
    return env if hosts == "-" else replace(env, host=hosts.split(",")[env.rank], plays_host=True)


def passed(communicator: Communicator) -> int:
    """Every check went well."""
    print(f"rank {communicator.rank}: all checks passed", flush=True)
    return 0


# --- checks in which all ranks live ---


def check_backends(hosts: str, group_size: str, *backends: str) -> int:
    """The contract on each backend, in one job: starting ranks costs more than the checks."""
    connected = []
    for backend in backends:
        communicator = connect_to_check(env_on(hosts), backend, group_size=int(group_size) or None)
        connected.append(communicator)
        check_contract(communicator, longest=LONGEST if communicator.world_size == 8 else 100_003)
        check_listeners(communicator)
    for communicator in connected:  # the first one may have made the default process group, on which others rest
        communicator.transport.backend.close()
    for communicator in connected:  # the first one may finalize MPI; closing twice does no harm
        communicator.close()
    return passed(connected[0])


def check_beside(own: str) -> int:
    """In a script that has a process group already: each backend gets connections of its own and leaves that alone."""
    env = read_process_env()
    store = dist.TCPStore(*env.master, is_master=env.rank == 0) if env.master else None
    dist.init_process_group(own, store=store, rank=env.rank, world_size=env.world_size)
    expected = sum(range(env.world_size))
    for backend in ("gloo", "tcp", "gloo"):
        communicator = connect(backend=backend, algorithm="ring")
        own_1 = torch.full((1,), float(env.rank))
        work = communicator.start(torch.ones(1000), label="ours")
        dist.all_reduce(own_1)
        work.wait()
        assert own_1.item() == expected
        assert communicator.sum_(torch.full((3,), float(env.rank)), label="ours").tolist() == [expected] * 3
        communicator.close()
    assert dist.is_initialized(), "close() must leave the script's own group alone"
    dist.all_reduce(own_1)
    assert own_1.item() == expected * env.world_size
    dist.barrier()
    dist.destroy_process_group()
    return passed(communicator)


def check_spawned(folder: str) -> int:
    """As torch.multiprocessing starts ranks: the process group alone states rank and size."""
    rank, num_ranks = int(os.environ["SPAWNED_AS"]), 2
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=num_ranks)
    for backend in ("auto", "gloo"):
        with connect(backend=backend) as communicator:
            env = communicator.env
            places = (
                env.rank,
                env.world_size,
                env.local_rank,
                env.local_size,
                communicator.connection.topology.num_nodes,
            )
            assert places == (rank, num_ranks, rank, num_ranks, 1)
            assert communicator.sum_(torch.ones(3), label="ours").tolist() == [num_ranks] * 3
            secrets = communicator.gather(communicator.connection.control.secret.hex())
            assert len(set(secrets)) == 1
            assert secrets[0]
    config = {"data.loader": "synthetic", "data.num_synthetic_samples": 64, "data.image_size": 16, "run.epochs": 1}
    sizes = {"batch.global_batch_size": 32, "batch.microbatch_size": 16, "batch.bn_span": 16}
    others = {"model.options.width": 2, "schedule.warmup_epochs": 0, "run.directory": f"{folder}/run"}
    summary = bigbatch.train("quickstart", {**config, **sizes, **others}, quiet=True)
    assert summary["world_size"] == num_ranks
    dist.destroy_process_group()
    return passed(communicator)


def check_reconnect(*backends: str) -> int:
    """One connection after another, in one process: the rendezvous is met once, and keys do not mix.

    A reducer is refused where ranks bring other weights, and the connection continues.
    """
    for backend in backends:
        communicator = connect(backend=backend, algorithm="sharded")
        n = communicator.world_size
        assert communicator.gather(backend) == [backend] * n
        assert communicator.sum_(torch.ones(5), label=backend).tolist() == [float(n)] * 5
        assert communicator.sum_(torch.ones(5, requires_grad=True), label="leaf").tolist() == [float(n)] * 5
        unequal = {"scale": torch.ones(3), "bias": torch.full((2,), float(communicator.rank))}
        with pytest.raises(CommError, match="rank 1 has other weights than rank 0, first bias: "):
            GradientReducer([(name, nn.Parameter(value)) for name, value in unequal.items()], communicator)
        check_listeners(communicator)
        communicator.close()
        with pytest.raises(CommError, match=r"buffer 7 .*closed"):
            communicator.start(torch.ones(5), label="buffer 7")
    return passed(communicator)


def check_mismatch(hosts: str, backend: str, algorithm: str, *sums: str) -> int:
    """Ranks that sum tensors of different names or lengths, such as metric:20, fail and say so."""
    in_flight.POLL_SECONDS = links.POLL_SECONDS = 0.3
    limits.ROLL_CALL_SECONDS = PATIENCE_SECONDS  # no count needs it: both ranks answer
    communicator = connect(env=env_on(hosts), backend=backend, algorithm=algorithm, timeout_seconds=60)
    each = [(label, int(length)) for label, _, length in (text.partition(":") for text in sums)]
    for known in {label: None for label, _ in each}:
        communicator.sum_(torch.ones(1), label=known)
    label, length = each[communicator.rank]
    tensor_N = communicator.allocate(100, torch.float32)[:length]
    with pytest.raises(PeerLostError) as caught:
        communicator.sum_(tensor_N, label=label)
    print(f"rank {communicator.rank} failed: {caught.value}", flush=True)
    return 0


def check_listeners(communicator: Communicator) -> None:
    """On one host nothing of ours listens beyond the loopback interface (Open MPI and NCCL have sockets of theirs)."""
    env, name = communicator.env, communicator.transport.backend.name
    if env.launcher == "torchrun" and name != "nccl" and env.is_one_host and Path("/proc/net/tcp").exists():
        loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        found = listening_addresses()
        assert found, f"{name} listens, so at least one socket was expected"
        assert found <= loopback, f"listens on {found}"


def listening_addresses() -> set[str]:
    """Return the addresses of this process's listening sockets, IPv4 and IPv6, in hexadecimal."""
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].split(":")[0])
    return found


# --- jobs in which a rank is lost ---


def check_many_orders(hosts: str, backend: str, num_programs: str) -> int:
    """Random programs, by hand: the contract makes three."""
    communicator = connect_to_check(env_on(hosts), backend, group_size=None)
    check_orders(communicator, seeds=range(int(num_programs)))
    communicator.close()
    return passed(communicator)


def lose_a_rank(backend: str, algorithm: str, victim: str, how: str, timeout_seconds: str) -> int:
    """Sum until one rank is killed or stopped between two sums; the others must notice, and name it."""
    in_flight.POLL_SECONDS = links.POLL_SECONDS = 0.3
    await_all_but(int(victim))
    communicator = connect(backend=backend, algorithm=algorithm, group_size=2, timeout_seconds=float(timeout_seconds))
    start = 0.0
    try:
        for step in range(4):
            start = time.monotonic()
            if step == 2 and communicator.rank == int(victim):
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            works = [communicator.start(torch.ones(1000), label=f"buffer {i} of step {step}") for i in range(3)]
            for work in works:
                work.wait()
    except PeerLostError as error:
        print(f"noticed after {time.monotonic() - start:.1f} s: {error}", flush=True)
        return SURVIVED
    return 0


def lose_rank_1(lose: Callable[..., int], *arguments: str) -> int:
    """Rank 1 dies in a job that says where."""
    in_flight.POLL_SECONDS = links.POLL_SECONDS = 0.3
    await_all_but(1)
    return lose(*arguments)


def stall_under_mpi() -> int:
    """Rank 1 never comes; rank 0 gives up, and its plain end of Python ends the job although MPI still hangs."""
    await_all_but(1)
    communicator = connect(backend="mpi", timeout_seconds=4)
    tensor_N = communicator.allocate(10, torch.float32)
    if communicator.rank == 1:
        time.sleep(600)
    communicator.sum_(tensor_N, label="buffer 0")
    return 0


def check_over(check: Callable[[Communicator], None], backend: str) -> int:
    """One check on a backend."""
    communicator = connect(backend=backend)
    check(communicator)
    communicator.close()
    return passed(communicator)


MODES: dict[str, Callable[..., int]] = {
    "check": check_backends,
    "sharded": partial(check_over, check_sharded_update),
    "behind-forward": partial(check_over, check_behind_forward),
    "divided": partial(check_over, check_divided_update),
    "beside": check_beside,
    "spawned": check_spawned,
    "reconnect": check_reconnect,
    "mismatch": check_mismatch,
    "orders": check_many_orders,
    "lose": lose_a_rank,
    "stall": stall_under_mpi,
    "norm": partial(lose_rank_1, lose_in_a_norm),
    "gather": partial(lose_rank_1, lose_in_a_gather),
}


def end_at_once(job: Callable[..., int], *arguments: str) -> NoReturn:
    """Do a job and leave at once, as bigbatch's own command ends a rank: the launcher then ends the others."""
    try:
        code = job(*arguments)
        if not code:
            end_mpi()
    except BaseException:
        print(f"a rank on {socket.gethostname()}, process {os.getpid()}, failed:", file=sys.stderr)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "stall":
        sys.exit(main(*sys.argv[1:]))
    end_at_once(main, *sys.argv[1:])
