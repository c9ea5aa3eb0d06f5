"""Rendezvous through MPI, for ranks that mpirun started."""

import sys
from dataclasses import replace
from functools import cache
from typing import Any

from bigbatch.comm.rendezvous.addresses import own_address
from bigbatch.comm.rendezvous.bounded_store import answer_within
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.ports import hold_port
from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.errors import CommError, first_line, pip_install


@cache
def scripts_mpi() -> bool:
    """Return whether the script imported mpi4py's MPI before bigbatch did: then it uses MPI also after close()."""
    return "mpi4py.MPI" in sys.modules


def import_mpi() -> Any:
    """Import mpi4py's MPI module, initialized for threads and not finalized at exit unless the script imported it.

    Without finalize at exit a rank that fails ends at once and mpirun ends the job; with it the rank would wait in
    MPI_Finalize for peers that wait for it. Raises: CommError naming the extra to install.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise CommError(f"the MPI backend needs mpi4py and an MPI library: {pip_install('mpi')}") from error
    if not scripts_mpi():  # before the import of MPI, which reads it
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): {pip_install('mpi')}") from error
    return MPI


def mpi_world(env: ProcessEnv) -> Any:
    """Return MPI's communicator of all ranks.

    Raises: CommError if MPI is not initialized, or reports another rank or size than the launcher.
    """
    MPI = import_mpi()
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise CommError("MPI is not initialized or is finalized: connect() after MPI.Init(), close() before Finalize()")
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (env.rank, env.world_size):
        raise CommError(
            f"{env.launcher} started rank {env.rank} of {env.world_size}, but MPI sees rank {world.rank} of "
            f"{world.size}: start the job with the mpirun of the MPI library that mpi4py uses"
        )
    return world


def meet_by_mpi(env: ProcessEnv, *, timeout_seconds: float) -> ProcessEnv:
    """Return env with an address and port of rank 0's host, which that rank holds, and a new secret.

    Collective over MPI's world.

    Raises: CommError if rank 0's host name does not resolve or only to its loopback, and after timeout_seconds without
    the other ranks.
    """
    world, holder = mpi_world(env), None
    answer: tuple[str, int, str] | str | None = None  # a text: the error of rank 0, for the other ranks
    if world.rank == 0:
        try:
            address = own_address(is_one_host=env.is_one_host, interface=env.interface)
        except CommError as error:
            answer = str(error)
        else:
            holder = hold_port(address)
            answer = address, holder.getsockname()[1], new_secret()
    try:
        answer = answer_within(timeout_seconds, lambda: world.bcast(answer, root=0))
    except Exception as error:  # the control channel, which could explain it, does not exist yet
        raise CommError(
            f"rank {env.rank}: meeting by MPI failed ({first_line(error)}): check that all ranks started"
        ) from error
    if isinstance(answer, str):
        raise CommError(answer)
    assert answer is not None
    address, port, secret = answer
    return replace(env, master=(address, port), secret=secret.encode(), listener=holder.detach() if holder else None)
