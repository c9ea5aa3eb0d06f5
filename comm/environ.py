"""Who am I: the only reader of what mpirun, srun and torchrun put into the environment."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

LAUNCHER_VARIABLES = {
    # launcher: (rank, world size, local rank, local size)
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
}
"""In order of precedence: torchrun inside srun counts as torchrun, mpirun inside sbatch as openmpi."""

TERMINAL_VARIABLE = "BIGBATCH_TERMINAL_COLUMNS"
"""Set by `bigbatch launch` for the ranks; 0 where its output is no terminal."""

FIRST_SLURM_PORT = 20000
NUM_SLURM_PORTS = 20000


@dataclass(frozen=True)
class ProcessEnv:
    """One process as its launcher describes it. master is None where the ranks must find each other by MPI."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    master: tuple[str, int] | None
    master_runs: bool = False
    """The launcher already serves the rendezvous at master (torchrun); else rank 0 does."""
    terminal_columns: int | None = None
    """Width of the terminal that shows this job; None where there is none."""

    @property
    def is_one_host(self) -> bool:
        """All ranks run on this host, so nothing needs to listen beyond the loopback interface."""
        return self.local_size == self.world_size


def read_process_env(environ: Mapping[str, str] | None = None) -> ProcessEnv:
    """Find the launcher by its variables; without any, this is a world of one process.

    Raises: ValueError when a launcher's variables are incomplete or not numbers.
    """
    variables = os.environ if environ is None else environ
    launcher = _launcher(variables)
    host = variables.get("SLURMD_NODENAME") or variables.get("BIGBATCH_HOST") or socket.gethostname()
    if launcher is None:
        return ProcessEnv("none", 0, 1, 0, 1, host, None, terminal_columns=terminal_columns(variables))
    names = LAUNCHER_VARIABLES[launcher]
    rank, world_size, local_rank = (_number(variables, name, launcher) for name in names[:3])
    local_size = _slurm_local_size(variables) if launcher == "srun" else _number(variables, names[3], launcher)
    if not 0 <= rank < world_size:
        raise ValueError(f"{names[0]}={rank} is not below {names[1]}={world_size}; start all ranks in one job")
    one_host = local_size == world_size
    return ProcessEnv(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        host=host,
        master=_master(variables, launcher, is_one_host=one_host),
        master_runs=launcher == "torchrun" and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        terminal_columns=terminal_columns(variables),
    )


def terminal_columns(environ: Mapping[str, str] | None = None) -> int | None:
    """Width of the terminal behind standard output, or None.

    mpirun puts a pseudo-terminal before every rank even when its own output goes to a file, so under it only
    the word of `bigbatch launch`, which sees the real output, counts.
    """
    variables = os.environ if environ is None else environ
    if TERMINAL_VARIABLE in variables:
        return int(variables[TERMINAL_VARIABLE]) or None
    if _launcher(variables) == "openmpi" or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def prefer_loopback() -> None:
    """Keep gloo on the loopback interface: for jobs on one host, where no one else needs to connect.

    A user's own GLOO_SOCKET_IFNAME wins. Also needed where the host's own name does not resolve.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")


def _launcher(variables: Mapping[str, str]) -> str | None:
    for launcher, names in LAUNCHER_VARIABLES.items():
        if launcher == "srun" and "SLURM_STEP_ID" not in variables:
            continue  # the batch script itself, not a task that srun started
        if names[0] in variables and names[1] in variables:
            return launcher
    return None


def _number(variables: Mapping[str, str], name: str, launcher: str) -> int:
    try:
        return int(variables[name])
    except KeyError:
        raise ValueError(f"{launcher} did not set {name}; start the job with {launcher}'s own command") from None
    except ValueError:
        raise ValueError(f"{name}={variables[name]!r} is not a number") from None


def _slurm_local_size(variables: Mapping[str, str]) -> int:
    """Tasks on this node out of '2(x3),1': two on each of three nodes, one on the fourth."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text!r} is not of Slurm's form, such as 8(x4)")
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(variables.get("SLURM_NODEID", "0"))
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node} has no entry in SLURM_TASKS_PER_NODE={text!r}")
    return counts[node]


def _master(variables: Mapping[str, str], launcher: str, *, is_one_host: bool) -> tuple[str, int] | None:
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        return variables["MASTER_ADDR"], _number(variables, "MASTER_PORT", launcher)
    if launcher != "srun":
        return None
    hosts = expand_hostlist(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "localhost"))
    job = int(variables.get("SLURM_JOB_ID", "0")) + int(variables.get("SLURM_STEP_ID", "0"))
    return "127.0.0.1" if is_one_host else hosts[0], FIRST_SLURM_PORT + job % NUM_SLURM_PORTS


def expand_hostlist(text: str) -> list[str]:
    """Slurm's compact host list, written out: 'n[01-03,7],login' -> n01 n02 n03 n7 login.

    Raises: ValueError where the text is not a host list.
    """
    hosts: list[str] = []
    for item in re.findall(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*(?:,|$)", text):
        if item := item.rstrip(","):
            hosts += _expand_item(item)
    if not hosts:
        raise ValueError(f"{text!r} is not a Slurm host list, such as node[01-04]")
    return hosts


def _expand_item(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if not match:
        return [item]
    names = []
    for span in match[1].split(","):
        first, _, last = span.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(f"{item!r} is not a Slurm host list, such as node[01-04]")
        for number in range(int(first), int(last or first) + 1):
            names += _expand_item(f"{item[: match.start()]}{number:0{len(first)}d}{item[match.end() :]}")
    return names
