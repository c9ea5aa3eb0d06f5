"""Who am I: the only reader of what mpirun, srun and torchrun put into the environment."""

import contextlib
import itertools
import os
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.addresses import loopback
from bigbatch.comm.rendezvous.launcher import (
    LAUNCHER_VARIABLES,
    PLACE_VARIABLES,
    find_launcher,
    local_size_of,
    number,
    refuse_unknown,
)
from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.errors import LaunchError, shortened
from bigbatch.files import parse_json
from bigbatch.paths import as_path

COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Read by torch.compile, whose own default lies in /tmp, where a reboot or a container's end wipes it out."""
MAX_HOSTS = 100_000
"""Most hosts in a host list: more than any cluster has, and few enough to expand at once."""
TERMINAL_VARIABLE = "BIGBATCH_TERMINAL_COLUMNS"
"""Set by `bigbatch launch` for the ranks; 0 where its output is no terminal."""
INTERFACE_VARIABLE = "BIGBATCH_INTERFACE"
"""Set by `bigbatch launch --interface` for the ranks: the network interfaces between the nodes, ib0 or ib0,ib1."""
DEVICE_VARIABLE = "BIGBATCH_DEVICE"
"""Set by `bigbatch launch --device` for the ranks: cpu keeps them off the GPUs that their hosts have."""
STOPPED_VARIABLE = "BIGBATCH_STOPPED"
"""Set by `bigbatch launch mpirun` for the ranks: the file in which the first one leaves its exit code."""
IDENTITY_VARIABLES = (*PLACE_VARIABLES, STOPPED_VARIABLE)
"""Each launcher of ours defines those of its ranks, and removes all others; * stands for any end of a name."""
_IDENTITY = re.compile("|".join(IDENTITY_VARIABLES).replace("*", ".*"), re.DOTALL)

NOTICE_VARIABLE = "BIGBATCH_STOP_SECONDS"
"""Set by the script of a job in a queue for the ranks: how long before its time limit they are asked to stop."""
SITE_VARIABLE = "BIGBATCH_SITE"
"""Set by `bigbatch launch` for the ranks: what it took from which bigbatch.toml, as JSON."""
SITE_FILE_VARIABLE = "BIGBATCH_SITE_FILE"
"""Set by users: this bigbatch.toml, and no other; empty: none."""
SYSTEM_SITE_FILE = Path("/etc/bigbatch/bigbatch.toml")

FIND_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Its configuration, and who asks."""
SECRET_VARIABLE = "BIGBATCH_SECRET"
"""Set by `bigbatch launch` for the ranks, anew for each job, or by a user alike for all: see secret.py."""
FIRST_JOB_PORT = 20000
NUM_JOB_PORTS = 12000
"""Up to 31999: Linux hands out the ports from 32768 on to anyone who connects."""
SLURM_STEP_PORTS = 1009
"""How far apart two steps of a job meet: jobs with neighbouring numbers may share a node, and their steps, too."""
SLURM_RESTART_PORTS = 5003
"""How far apart two starts of a job meet: what was left of the last one, or somebody else, may hold its port."""


@dataclass(frozen=True)
class ProcessEnv:
    """Describes one process as its launcher does. master is None where the ranks must find each other by MPI."""

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
    """Return the width of the terminal that shows this job; None where there is none."""
    plays_host: bool = False
    """host is a name that the user made up (BIGBATCH_HOST), so the launcher's local ranks say nothing about it."""
    interface: str | None = None
    """Network interfaces between the nodes, as `bigbatch launch --interface` names them; they go before a config's."""
    keeps_to_cpu: bool = False
    """`bigbatch launch --device cpu` says so, whatever GPUs the host has."""
    stopped_file: Path | None = None
    """Where the first rank leaves its exit code: mpirun ends with 0 after it lost a node's daemon. Ranks that were
    stopped then leave with 0, as mpirun takes any other code for a failure."""

    secret: bytes = field(default=b"", repr=False)
    """What all ranks of the job know, and nobody else; empty where nobody told."""

    notice_seconds: int | None = None
    """How long before its time limit the job asks the ranks to stop; None where nothing is known of one."""

    @property
    def is_one_host(self) -> bool:
        """Tell whether all ranks run on this host, so that nothing needs to listen beyond the loopback interface."""
        return self.local_size == self.world_size


ALONE = ProcessEnv("none", 0, 1, 0, 1, "here", None)
"""A world of one process, whatever the environment says."""


def read_process_env(environ: Mapping[str, str] = os.environ) -> ProcessEnv:
    """Find the launcher by its variables; without any, this is a world of one process.

    Raises: LaunchError when a launcher's variables are incomplete, contradictory or not numbers, or those of one that
    does not say how many ranks there are: each would train by itself.
    """
    launcher = find_launcher(environ, host=socket.gethostname())
    alone = replace(
        ALONE,
        host=_host(environ, launcher),
        terminal_columns=terminal_columns(environ),
        plays_host=bool(environ.get("BIGBATCH_HOST")),
        interface=environ.get(INTERFACE_VARIABLE) or None,
        keeps_to_cpu=_keeps_to_cpu(environ),
        stopped_file=Path(path) if (path := environ.get(STOPPED_VARIABLE)) else None,
        secret=environ.get(SECRET_VARIABLE, "").encode(),
        notice_seconds=number(environ, NOTICE_VARIABLE, "bigbatch launch") if NOTICE_VARIABLE in environ else None,
    )
    if launcher is None:
        refuse_unknown(environ)
        return alone
    names = LAUNCHER_VARIABLES[launcher]
    rank, world_size, local_rank = (number(environ, name, launcher) for name in names[:3])
    local_size = local_size_of(environ, launcher)
    for index, count, what in ((rank, world_size, names[:2]), (local_rank, local_size, names[2:])):
        if not 0 <= index < count:
            raise LaunchError(f"{what[0]}={index} is not below {what[1]}={count}; start all ranks in one job")
    one_host = local_size == world_size
    return replace(
        alone,
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        master=_master(environ, launcher, is_one_host=one_host),
        master_runs=launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def is_identity(name: str) -> bool:
    """Tell whether a variable of that name says which rank a process is."""
    return _IDENTITY.fullmatch(name) is not None


def without_identity(environ: Mapping[str, str] = os.environ, *, keep: Collection[str] = ()) -> dict[str, str]:
    """Return an environment for a launcher of ours, which alone says who its ranks are: without any other launcher's.

    What is named by keep stays.
    """
    return {name: value for name, value in environ.items() if name in keep or not is_identity(name)}


def with_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for the ranks of one job, with a secret of its own where the user has set none."""
    return {SECRET_VARIABLE: new_secret(), **environ}


def terminal_columns(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the width of the terminal behind standard output, or None.

    mpirun puts a pseudo-terminal before every rank even when its own output goes to a file, so under it only
    the word of `bigbatch launch`, which sees the real output, counts.
    """
    if TERMINAL_VARIABLE in environ:
        return number(environ, TERMINAL_VARIABLE, "bigbatch launch") or None
    if find_launcher(environ, host=socket.gethostname()) == "openmpi" or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def runtime_folder(environ: Mapping[str, str] | None) -> str | None:
    """Return the folder for what this user's programs keep while they run, or None. environ: None for the real one."""
    return (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR") or None


def visible_gpus(count: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """List names by which CUDA_VISIBLE_DEVICES may pass on the count GPUs that this process sees."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def prefer_interface(name: str | None, *, is_one_host: bool) -> None:
    """Tell gloo and NCCL which network interfaces to use; without a name, gloo on one host keeps to loopback.

    A user's own GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME wins. Loopback is also needed where the host's own name
    does not resolve.
    """
    if name is not None:
        for variable, value in interface_settings(name).items():
            os.environ.setdefault(variable, value)
    elif is_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")


def interface_settings(names: str) -> dict[str, str]:
    """Return what has gloo and NCCL use these network interfaces, and no others; they have commas between them.

    NCCL takes a name without = for the beginning of one: ib1 would be ib10, too. Torch gives gloo's sums to each
    interface in turn.
    """
    return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": f"={names}"}


def _keeps_to_cpu(variables: Mapping[str, str]) -> bool:
    name = variables.get(DEVICE_VARIABLE) or None
    if name not in (None, "cpu"):
        raise LaunchError(f"{DEVICE_VARIABLE}={name!r} is unknown: set it to cpu, or not at all")
    return name == "cpu"


def ask_for_deterministic_cublas() -> None:
    """Give cuBLAS workspaces of its own, without which torch refuses its products to be deterministic; before any."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def record_flights() -> None:
    """Let torch keep its last collectives in memory for a stall's message, as its later releases do by themselves."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # the other is its older name, of which torch warns


def flight_prefix() -> str | None:
    """Return the path, but for the rank behind it, to which torch's flight recorder is told to write."""
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def _host(variables: Mapping[str, str], launcher: str | None) -> str:
    """Return this node's name; BIGBATCH_HOST plays a node. Some give all ranks the SLURMD_NODENAME of the first."""
    is_own = launcher not in ("mpich", "pals", "flux")
    name = variables.get("BIGBATCH_HOST") or (is_own and variables.get("SLURMD_NODENAME"))
    return name or socket.gethostname()


def _master(variables: Mapping[str, str], launcher: str, *, is_one_host: bool) -> tuple[str, int] | None:
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        return variables["MASTER_ADDR"].strip("[]"), number(variables, "MASTER_PORT", launcher)
    if launcher != "srun":
        return None
    job, step = number(variables, "SLURM_JOB_ID", launcher), number(variables, "SLURM_STEP_ID", launcher)
    restarts = number(variables, "SLURM_RESTART_COUNT", launcher) if "SLURM_RESTART_COUNT" in variables else 0
    port = FIRST_JOB_PORT + (job + SLURM_STEP_PORTS * step + SLURM_RESTART_PORTS * restarts) % NUM_JOB_PORTS
    return loopback() if is_one_host else expand_hostlist(variables.get("SLURM_STEP_NODELIST", ""))[0], port


def step_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the nodes of this step of Slurm's, whether their ranks have come or not; none under other launchers.

    Raises: LaunchError where the variable is no host list.
    """
    text = environ.get("SLURM_STEP_NODELIST")
    return expand_hostlist(text) if text else []


def slurm_job(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the number of Slurm's job around this process, with its cluster's name, and its restarts; or None."""
    if not (number := environ.get("SLURM_JOB_ID")):
        return None
    cluster = environ.get("SLURM_CLUSTER_NAME")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return f"{number} of {cluster}" if cluster else number, int(restarts) if restarts.isdecimal() else 0


def start_of_launcher() -> str:
    """Return what tells one start of a launcher from all others, the same for its ranks; empty where none tells."""
    return os.environ.get(STOPPED_VARIABLE, "")


def outside_of_jobs(environ: Mapping[str, str] | None) -> tuple[dict[str, str], list[str]]:
    """Return variables without those of a Slurm job around this process, and the names of sbatch's that were left out.

    What finds Slurm itself stays. SBATCH_* go before what a script states, and SLURM_* and SRUN_* would tell the job's
    srun of another job. environ: None for the real one.
    """
    variables = os.environ if environ is None else environ
    kept = {
        name: value
        for name, value in variables.items()
        if name in FIND_SLURM or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
    return kept, sorted(name for name in variables if name.startswith("SBATCH_"))


def keep_compiled_code(environ: MutableMapping[str, str] = os.environ, *, torchs_own: str) -> Path:
    """Tell torch.compile where to keep its code from run to run, and return that folder; the user's own goes first.

    torchs_own: what torch sets the variable to, as it is imported, where the user has not. It stays where there is no
    home, or none to write to.
    Ranks, runs and nodes may share the folder: entries are named by what they depend on and put in place whole.
    """
    if environ.setdefault(COMPILED_VARIABLE, torchs_own) == torchs_own:
        with contextlib.suppress(OSError, RuntimeError):
            folder = _own_folder(environ, "cache") / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                environ[COMPILED_VARIABLE] = str(folder)
    return Path(environ[COMPILED_VARIABLE])


def calibration_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where tables that were measured on this user's clusters are kept, or None where there is no home."""
    with contextlib.suppress(RuntimeError):
        return _own_folder(environ, "cache") / "calibration"
    return None


def site_files(environ: Mapping[str, str] | None) -> list[Path]:
    """List a site's files of settings, the nearest first: the user's and the system's, if they are there, or the one
    that is named, there or not. environ: None for the real one.
    """
    environ = os.environ if environ is None else environ
    if (named := environ.get(SITE_FILE_VARIABLE)) is not None:
        return [as_path(named)] if named else []
    found = [SYSTEM_SITE_FILE]
    with contextlib.suppress(RuntimeError):  # of a user without a home
        found.insert(0, _own_folder(environ, "config") / "bigbatch.toml")
    return [path for path in found if path.exists()]


def site_settings(environ: Mapping[str, str] = os.environ) -> Any:
    """Return what `bigbatch launch` took from a site's files, by file and option; None where there was nothing."""
    text = environ.get(SITE_VARIABLE)
    try:
        return parse_json(text) if text else None
    except ValueError:  # of somebody else's
        return text


def _own_folder(variables: Mapping[str, str], kind: str) -> Path:
    """Return the user's folder for config or cache. Raises: RuntimeError if there is no home; PathError."""
    return as_path(variables.get(f"XDG_{kind.upper()}_HOME") or f"{Path.home()}/.{kind}") / "bigbatch"


def wandb_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the project, name and mode for Weights & Biases that the environment states."""
    stated = {name: environ.get(f"WANDB_{name.upper()}") for name in ("project", "name", "mode")}
    return {name: value for name, value in stated.items() if value}


def nccl_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what tells NCCL how to sum: not where its ranks meet, nor what it logs."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("NCCL_") and name != "NCCL_COMM_ID" and not name.startswith("NCCL_DEBUG")
    }


def expand_hostlist(text: str) -> list[str]:
    """Write out Slurm's compact host list: 'n[01-03,7],login' -> n01 n02 n03 n7 login.

    Raises: LaunchError where the text is not a host list, or holds more than MAX_HOSTS.
    """
    item = r"(?:[^,\[\]\s]|\[[^\[\]]*\])+"
    if not re.fullmatch(f"{item}(?:,{item})*", text, re.ASCII):
        raise LaunchError(f"{shortened(text)} is not a Slurm host list, such as node[01-04]")
    written = (host for each in re.findall(item, text, re.ASCII) for host in _expand_item(each))
    hosts = list(itertools.islice(written, MAX_HOSTS + 1))
    if len(hosts) > MAX_HOSTS:
        raise LaunchError(f"{shortened(text)} holds more than {MAX_HOSTS} hosts: name fewer, such as node[01-04]")
    return hosts


def _expand_item(item: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if not match:
        yield item
        return
    for span in match[1].split(","):
        limits = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", span, re.ASCII)
        if not limits or int(limits[1]) > int(limits[2] or limits[1]):
            raise LaunchError(f"{shortened(item)} is not a Slurm host list, such as node[01-04]")
        for each in range(int(limits[1]), int(limits[2] or limits[1]) + 1):
            yield from _expand_item(f"{item[: match.start()]}{each:0{len(limits[1])}d}{item[match.end() :]}")
