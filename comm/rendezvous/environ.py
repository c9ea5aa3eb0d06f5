"""Read the environment: rank, world size and settings. The only module that reads environment variables of jobs."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bigbatch.comm.rendezvous.launcher import (
    LAUNCHER_VARIABLES,
    RANK_VARIABLES,
    expand_hostlist,
    find_launcher,
    local_size_of,
    missing_of_torchrun,
    number,
    refuse_partial,
    refuse_unknown,
)
from bigbatch.errors import LaunchError

TERMINAL_VARIABLE = "BIGBATCH_TERMINAL_COLUMNS"
"""Set by `bigbatch launch` for the ranks; 0 if its output is not a terminal."""
INTERFACE_VARIABLE = "BIGBATCH_INTERFACE"
"""Set by `bigbatch launch --interface` for the ranks: the network interfaces between the nodes, ib0 or ib0,ib1."""
DEVICE_VARIABLE = "BIGBATCH_DEVICE"
"""Set by `bigbatch launch --device` for the ranks: cpu means that they use no GPU."""
STOPPED_VARIABLE = "BIGBATCH_STOPPED"
"""Set by `bigbatch launch mpirun` for the ranks: the file in which the first one leaves its exit code."""
JOINS_VARIABLE = "BIGBATCH_JOINS"
"""Set by `bigbatch launch` for a rank that it restarts: path of a file that the rank removes once it has joined the
running job."""
LISTENER_VARIABLE = "BIGBATCH_LISTENER"
"""Set by `bigbatch launch local` for rank 0: descriptor of the socket that holds MASTER_PORT."""
IDENTITY_VARIABLES = (*RANK_VARIABLES, STOPPED_VARIABLE, JOINS_VARIABLE, LISTENER_VARIABLE)
"""bigbatch's launchers remove inherited ones, then set those of their ranks; * matches any end of a name."""
_IDENTITY = re.compile("|".join(IDENTITY_VARIABLES).replace("*", ".*"), re.DOTALL)
NOTICE_VARIABLE = "BIGBATCH_STOP_SECONDS"
"""Set by a batch script for the ranks: seconds between the request to stop and the job's time limit."""
WATCHDOG_VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
"""What torch's watchdog does after an error of NCCL; a group reads them when it is made."""
FIND_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Slurm's configuration and the user's token."""
SECRET_VARIABLE = "BIGBATCH_SECRET"
"""Set by `bigbatch launch` for the ranks of each job, or by a user, equal for all ranks; see secret.py."""
SLURM_STEP_PORTS = 1009
"""Distance of ports between two steps of a job: jobs with adjacent numbers, and their steps, may share a node."""
SLURM_RESTART_PORTS = 5003
"""Distance of ports between two starts of a job: a leftover process may still hold the last port."""


@dataclass(frozen=True)
class ProcessEnv:
    """One process as its launcher describes it. master: None if the ranks must meet by MPI."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    master: tuple[str, int] | None
    names_launcher: bool = True
    """False for RANK and WORLD_SIZE without torchrun's own variables: any launcher may set these."""
    listener: int | None = None
    """Descriptor of the socket that already holds master's port, on rank 0; None: rank 0 opens the port."""
    master_runs: bool = False
    """The launcher already serves the rendezvous at master (torchrun); else rank 0 does."""
    agent_pid: int | None = None
    """That launcher's process on this host: killed, it leaves its ranks running, unlike mpirun."""
    terminal_columns: int | None = None
    """Width of the terminal that shows this job; None if there is none."""
    is_notebook: bool = False
    """Output goes to a cell of a Jupyter notebook."""
    plays_host: bool = False
    """host comes from BIGBATCH_HOST, so the launcher's local ranks do not describe it."""
    interface: str | None = None
    """Network interfaces between the nodes, by `bigbatch launch --interface`, else by connect(); None: not stated."""
    keeps_to_cpu: bool = False
    """`bigbatch launch --device cpu`: use no GPU."""
    stopped_file: Path | None = None
    """File for rank 0's exit code, since mpirun ends with 0 after it lost a node's daemon. With it, ranks that were
    asked to stop exit with 0: mpirun treats any other code as a failure."""
    secret: bytes = field(default=b"", repr=False)
    """The job's secret; empty if none was given."""
    notice_seconds: int | None = None
    """Seconds between the request to stop and the job's time limit; None if there is no known limit."""
    joins_file: Path | None = None
    """File that this process removes once it has joined a running job; None if it does not replace a lost rank."""
    former_rank: int | None = None
    """Rank that the launcher gave this process; None unless ranks were renumbered after a rank was lost."""

    @property
    def joins(self) -> bool:
        """Return whether this process replaces a lost rank of a running job."""
        return self.joins_file is not None

    @property
    def launched_as(self) -> int:
        """Return the rank that the launcher gave this process."""
        return self.rank if self.former_rank is None else self.former_rank

    @property
    def started_by(self) -> str:
        """Return the launcher's name; "none" for a single process, or if the variables do not identify a launcher."""
        return self.launcher if self.names_launcher else "none"

    @property
    def is_one_host(self) -> bool:
        """Return whether all ranks run on this host; then sockets listen on loopback only."""
        return self.local_size == self.world_size


ALONE = ProcessEnv("none", 0, 1, 0, 1, "here", None)
"""A job of one process, independent of the environment."""


def read_process_env(environ: Mapping[str, str] = os.environ, *, has_group: bool = False) -> ProcessEnv:
    """Read this process's rank and settings; without a launcher's variables it is a job of one process.

    has_group: torch's process group states the rank, so incomplete or unknown launchers are not refused.

    Raises: LaunchError if a launcher's variables are incomplete, contradictory or not numbers, or belong to an
    unsupported launcher, whose ranks would each train alone.
    """
    launcher = find_launcher(environ, host=socket.gethostname())
    alone = replace(
        ALONE,
        host=_host(environ, launcher),
        terminal_columns=terminal_columns(environ),
        is_notebook=_is_notebook(),
        plays_host=bool(environ.get("BIGBATCH_HOST")),
        interface=environ.get(INTERFACE_VARIABLE) or None,
        keeps_to_cpu=_keeps_to_cpu(environ),
        stopped_file=Path(path) if (path := environ.get(STOPPED_VARIABLE)) else None,
        secret=environ.get(SECRET_VARIABLE, "").encode(),
        notice_seconds=number(environ, NOTICE_VARIABLE, "bigbatch launch") if NOTICE_VARIABLE in environ else None,
    )
    missing = missing_of_torchrun(environ) if launcher == "torchrun" else []
    is_one = (environ.get("RANK"), environ.get("WORLD_SIZE")) == ("0", "1")  # such as a PyTorchJob of one replica
    if (missing and is_one) or (has_group and (launcher is None or missing)):
        return alone
    if launcher is None:
        refuse_unknown(environ)
        return alone
    if missing:
        refuse_partial(environ, missing)
    return _of_several(environ, launcher, alone)


def _of_several(environ: Mapping[str, str], launcher: str, alone: ProcessEnv) -> ProcessEnv:
    """Return alone with what the launcher states of this rank. Raises: LaunchError."""
    names = LAUNCHER_VARIABLES[launcher]
    rank, world_size, local_rank = (number(environ, name, launcher) for name in names[:3])
    master_runs = launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local_size = local_size_of(environ, launcher)
    if local_size > world_size:
        raise LaunchError(f"{names[3]}={local_size} exceeds {names[1]}={world_size}; start all ranks in one job")
    for index, count, what in ((rank, world_size, names[:2]), (local_rank, local_size, names[2:])):
        if not 0 <= index < count:
            raise LaunchError(f"{what[0]}={index} is not below {what[1]}={count}; start all ranks in one job")
    return replace(
        alone,
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        joins_file=Path(environ[JOINS_VARIABLE]) if environ.get(JOINS_VARIABLE) else None,
        listener=number(environ, LISTENER_VARIABLE, "bigbatch launch") if LISTENER_VARIABLE in environ else None,
        master=_master(environ, launcher, is_one_host=local_size == world_size),
        names_launcher=launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environ,
        master_runs=master_runs,
        agent_pid=os.getppid() if master_runs else None,
    )


def is_identity(name: str) -> bool:
    """Return whether a variable of that name states a process's rank."""
    return _IDENTITY.fullmatch(name) is not None


def without_identity(environ: Mapping[str, str] = os.environ, *, keep: Collection[str] = ()) -> dict[str, str]:
    """Return the environment without variables that state a rank, for a launcher that sets its own.

    Variables in keep stay.
    """
    return {name: value for name, value in environ.items() if name in keep or not is_identity(name)}


def with_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a new secret for one job, unless the user has set one."""
    from bigbatch.comm.rendezvous.secret import new_secret  # late: launchers call this, and ranks do not

    return {SECRET_VARIABLE: new_secret(), **environ}


def terminal_columns(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the width of the terminal behind standard output, or None.

    mpirun gives every rank a pseudo-terminal even if its own output goes to a file. So under mpirun only the value
    that `bigbatch launch` has set counts.
    """
    if TERMINAL_VARIABLE in environ:
        return number(environ, TERMINAL_VARIABLE, "bigbatch launch") or None
    # a script may have closed or replaced the stream
    is_terminal = not getattr(sys.stdout, "closed", True) and getattr(sys.stdout, "isatty", bool)()
    if find_launcher(environ, host=socket.gethostname()) == "openmpi" or not is_terminal:
        return None
    return shutil.get_terminal_size().columns


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None  # a shell in a terminal has none


def prefer_interface(name: str | None, *, is_one_host: bool) -> None:
    """Set the network interfaces for gloo and NCCL; without a name, gloo on one host uses loopback.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the user take precedence. Loopback also works if the host's own name
    does not resolve.
    """
    if name is not None:
        for variable, value in interface_settings(name).items():
            os.environ.setdefault(variable, value)
    elif is_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")


def interface_settings(names: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use exactly these network interfaces. names: separated by commas.

    Without "=" NCCL treats a name as a prefix: ib1 would also match ib10. torch distributes gloo's sums over the
    interfaces.
    """
    return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": f"={names}"}


def _keeps_to_cpu(variables: Mapping[str, str]) -> bool:
    name = variables.get(DEVICE_VARIABLE) or None
    if name not in (None, "cpu"):
        raise LaunchError(f"{DEVICE_VARIABLE}={name!r} is unknown: set it to cpu, or not at all")
    return name == "cpu"


def expandable_segments() -> str:
    """Return the variable that turns torch's expandable segments on, as NAME=VALUE; "" if none does.

    Captured sums over NCCL may hang with them (pytorch issue 158029).
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in (value := os.environ.get(name, "")).replace(" ", "").lower():
            return f"{name}={value}"
    return ""


def set_deterministic_libraries() -> None:
    """Set what torch requires for deterministic products of cuBLAS, and what its compiler reads when it is loaded.

    Call it before the first product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


def enable_flight_recorder() -> None:
    """Enable torch's flight recorder, which a hanging rank dumps; later releases of torch enable it by default."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # the other is the deprecated name


@contextmanager
def without_torch_watchdog() -> Iterator[None]:
    """Make NCCL groups in which torch's watchdog does not end the process after an error or an abort, or wait to dump.

    The failure detector does both. Groups that a script makes elsewhere keep torch's settings.
    """
    before = {name: os.environ.get(name) for name in WATCHDOG_VARIABLES}
    os.environ.update(dict.fromkeys(WATCHDOG_VARIABLES, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def flight_prefix() -> str | None:
    """Return the path, without the rank, to which torch's flight recorder writes."""
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def _host(variables: Mapping[str, str], launcher: str | None) -> str:
    """Return this node's name. Some launchers give all ranks the SLURMD_NODENAME of the first node."""
    is_own = launcher not in ("mpich", "pals", "flux")
    name = variables.get("BIGBATCH_HOST") or (is_own and variables.get("SLURMD_NODENAME"))
    return name or socket.gethostname()


def _master(variables: Mapping[str, str], launcher: str, *, is_one_host: bool) -> tuple[str, int] | None:
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        address, port = variables["MASTER_ADDR"].strip(" []"), number(variables, "MASTER_PORT", launcher)
        if not address:
            raise LaunchError("MASTER_ADDR is empty: set it to the name or address of rank 0's host")
        if not 0 < port < 65536:
            raise LaunchError(f"MASTER_PORT={port} is no port: set it to a free one of rank 0's host, 1 to 65535")
        return address, port
    if launcher != "srun":
        return None
    from bigbatch.comm.rendezvous.addresses import loopback  # late: only srun leaves the choice of a port to its ranks
    from bigbatch.comm.rendezvous.ports import FIRST_JOB_PORT, NUM_JOB_PORTS

    job, step = number(variables, "SLURM_JOB_ID", launcher), number(variables, "SLURM_STEP_ID", launcher)
    restarts = number(variables, "SLURM_RESTART_COUNT", launcher) if "SLURM_RESTART_COUNT" in variables else 0
    port = FIRST_JOB_PORT + (job + SLURM_STEP_PORTS * step + SLURM_RESTART_PORTS * restarts) % NUM_JOB_PORTS
    return loopback() if is_one_host else expand_hostlist(variables.get("SLURM_STEP_NODELIST", ""))[0], port


def step_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the nodes of this Slurm step, also those without a rank so far; none under other launchers.

    Raises: LaunchError if the variable is not a host list.
    """
    text = environ.get("SLURM_STEP_NODELIST")
    return expand_hostlist(text) if text else []


def slurm_job(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the enclosing Slurm job, as "NUMBER of CLUSTER", and its restart count; None outside of a Slurm job."""
    if not (number := environ.get("SLURM_JOB_ID")):
        return None
    cluster = environ.get("SLURM_CLUSTER_NAME")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return f"{number} of {cluster}" if cluster else number, int(restarts) if restarts.isdecimal() else 0


def read_launch_id() -> str:
    """Return the identifier of this launch of the job, equal on its ranks; "" if the launcher sets none."""
    return os.environ.get(STOPPED_VARIABLE, "")


def without_slurm_job(environ: Mapping[str, str] | None) -> tuple[dict[str, str], list[str]]:
    """Return the variables without those of the enclosing Slurm job, and the names of the SBATCH_* left out.

    Variables that locate Slurm stay. SBATCH_* override a script's options, and SLURM_* and SRUN_* would describe
    another job to the new job's srun. environ: None for the process's own.
    """
    variables = os.environ if environ is None else environ
    kept = {
        name: value
        for name, value in variables.items()
        if name in FIND_SLURM or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
    return kept, sorted(name for name in variables if name.startswith("SBATCH_"))
