"""What a launcher starts: a command on some ranks of some hosts, and what is asked of a scheduler."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import DEVICE_VARIABLE, INTERFACE_VARIABLE, interface_settings
from bigbatch.errors import JobRefused, LaunchOptionError
from bigbatch.interpreter import SAFE_PATH_VARIABLE
from bigbatch.launch.jobs.words import check_words, option

INDEX = "{index}"
"""In a word of an array's command: the number of the job in its array."""


@dataclass(frozen=True)
class JobSpec:
    """A job is a command for all ranks. None leaves a choice to the cluster, or to the launcher's own default.

    hosts maps each host to its number of ranks; empty: the launcher, or the scheduler, says where.
    Raises: LaunchOptionError for a value that a launcher's own syntax could take for something else.
    """

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[tuple[str, int], ...] = ()
    oversubscribe: bool = False
    """More ranks than cores on a host: ranks that wait give up their core."""
    num_nodes: int | None = None
    """Nodes with equally many ranks each."""
    node_rank: int | None = None
    """Which of the nodes this is, from 0; torchrun only."""
    master: tuple[str, int] | None = None
    """Host and port at which torchrun's nodes meet."""
    name: str | None = None
    minutes: int | None = None
    """Time limit."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    """Nodes not to use, as Slurm writes them: n3,n[10-12]."""
    sbatch: tuple[tuple[str, str | None], ...] = ()
    """Further options of sbatch by their long names, with their values, or None for one that has none."""
    mpi: str | None = None
    """What srun offers MPI libraries, such as pmix; None: as the cluster is set up."""
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    """Type of these GPUs as Slurm's administrator calls it, such as a100."""
    cpus_per_rank: int | None = None
    memory: str | None = None
    """Memory of each node, such as 200G."""
    image: str | None = None
    """Container in which the ranks run."""
    mounts: tuple[str, ...] = ()
    """What the container sees of the host: SOURCE:TARGET, or SOURCE:TARGET:FLAGS."""
    container: str | None = None
    """What runs the image under Slurm: pyxis or apptainer; None: apptainer for .sif, else pyxis."""
    environment: tuple[tuple[str, str], ...] = ()
    taken: tuple[tuple[str, str | None], ...] = ()
    """Further variables, whose values are written nowhere: of the shell that starts the job, or of a Kubernetes Secret,
    which may be named beside."""
    modules: tuple[str, ...] = ()
    interface: str | None = None
    """Network interface between the nodes, such as eth0; several with commas between."""
    device: str | None = None
    """cpu keeps all ranks to it; None: GPUs where there are some."""
    logs: str | None = None
    """Folder for the job's output."""
    array: str | None = None
    """Numbers of an array's jobs, as Slurm writes them: 0-7, or 3,5,9, or 0-99%4 for four at a time."""
    preflight: str | None = None
    """What to do about unfit nodes before the start: warn, stop, or exclude them; None: do not look."""
    restarts: int | None = None
    """How often in a row it starts again, after it lost a rank, without a newer checkpoint; None: never."""
    namespace: str | None = None
    queue: str | None = None
    """LocalQueue of Kueue."""
    priority: str | None = None
    """PriorityClass of the pods."""
    node_selector: tuple[str, ...] = ()
    """Labels that nodes must have, KEY=VALUE."""
    tolerations: tuple[str, ...] = ()
    """Taints that nodes may have, KEY[=VALUE][:EFFECT]."""
    pull_secrets: tuple[str, ...] = ()
    """Secrets by which the image is pulled."""
    rdma: str | None = None
    """Resource by which pods get the node's RDMA cards, NAME[=NUMBER]."""
    user: str | None = None
    """Numbers of the user and group that the pods run as, UID[:GID]."""
    is_python: bool = False
    """The command is a Python script, or -m and a module, with its arguments; else it is bigbatch's."""
    stop_seconds: int | None = None
    """How long before the time limit the ranks are asked to save a checkpoint and stop; 0: the limit ends the job."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_words(field.name, getattr(self, field.name))

    @property
    def python_words(self) -> tuple[str, ...]:
        """Return what comes behind the interpreter: a script or module with its arguments, or bigbatch with its own."""
        return self.command if self.is_python else ("-m", "bigbatch", *self.command)

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks of each of num_nodes."""
        return self.num_ranks // (self.num_nodes or 1)

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Return what every rank gets, whatever else its launcher passes on; of two of one name the last counts."""
        device = () if self.device is None else ((DEVICE_VARIABLE, self.device),)
        # an own script's folder, or the work folder of an own module, is where it finds what belongs to it
        safe = () if self.is_python else ((SAFE_PATH_VARIABLE, "1"),)
        return (*interface_variables(self.interface), *device, *safe, *self.environment)

    @property
    def grace_seconds(self) -> int:
        """Return what stop_seconds says, or this project's default."""
        return 120 if self.stop_seconds is None else self.stop_seconds


MOST_RANKS = 10**6
"""More than any cluster has; far more of them would fill the memory of this host before anything starts."""

SCHEDULED = (
    *("name", "minutes", "partition", "account", "qos", "reservation", "constraint", "exclude", "sbatch", "mpi"),
    *("gpus_per_node", "gpu_type", "cpus_per_rank", "memory", "array", "stop_seconds"),
)
"""What only a scheduler can give."""

OF_KUBERNETES = ("namespace", "queue", "priority", "node_selector", "tolerations", "pull_secrets", "rdma", "user")
"""What only Kubernetes can give."""


def refuse(job: JobSpec, *, launcher: str, refused: Mapping[str, str]) -> None:
    """Say which options a launcher cannot honour, and what to do instead, rather than drop them.

    Raises: JobRefused.
    """
    of_others = () if launcher == "k8s" else OF_KUBERNETES
    refused = {**dict.fromkeys(of_others, "Kubernetes alone has it: leave it out"), **refused}
    found = [each.name for each in fields(JobSpec) if each.name in refused and getattr(job, each.name) != each.default]
    said = [f"{option(name)}: bigbatch launch {launcher} cannot do that; {refused[name]}" for name in found]
    said += [
        f"--env {name}@{secret}: a Secret is Kubernetes' own: export {name} here and state --env {name}"
        for name, secret in job.taken
        if secret is not None and launcher != "k8s"
    ]
    if said:
        raise JobRefused(said)


def interface_variables(name: str | None) -> tuple[tuple[str, str], ...]:
    """Return what tells bigbatch, gloo and NCCL which network interface to use, or which ones."""
    return () if name is None else ((INTERFACE_VARIABLE, name), *interface_settings(name).items())


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Read 'n0:8,n1:8' -> (('n0', 8), ('n1', 8)); ':1' may be left out.

    Raises: LaunchOptionError for anything else, so that no host name can be taken for an option.
    """
    hosts = []
    for part in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d{1,9}))?", part, re.ASCII)
        if not match or (match[2] and int(match[2]) == 0):
            raise LaunchOptionError(f"--hosts {text!r}: {part!r} is not of the form HOST:RANKS, such as n0:8,n1:8")
        hosts.append((match[1], int(match[2] or 1)))
    return tuple(hosts)


def parse_master(text: str) -> tuple[str, int]:
    """Read 'n0:29500' -> ('n0', 29500), and '[::1]:29500' -> ('::1', 29500). Raises: LaunchOptionError."""
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):(\d{1,5})", text, re.ASCII)
    if not match or not 0 < int(match[2]) < 65536:
        raise LaunchOptionError(f"--master {text!r} is not of the form HOST:PORT, such as n0:29500")
    return match[1].strip("[]"), int(match[2])


def read_hostfile(path: Path) -> tuple[tuple[str, int], ...]:
    """Read lines 'n0 slots=8' (Open MPI, whose max_slots is left out; Kubernetes' operator), 'n0:8' or 'n0'.

    Raises: LaunchOptionError naming the file and the line.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchOptionError(f"--hostfile {str(path)!r} cannot be read: {reason}") from error
    hosts: list[tuple[str, int]] = []
    for number, line in enumerate(lines, start=1):
        word = re.sub(r"\s+slots\s*=\s*", ":", re.sub(r"\s+max[-_]slots\s*=\s*\d+", "", line))
        try:
            hosts += parse_hosts(word) if word else ()
        except LaunchOptionError as error:
            raise LaunchOptionError(
                f"--hostfile {str(path)!r}, line {number}: {line!r} is not of the form HOST slots=RANKS: n0 slots=8"
            ) from error
    if not hosts:
        raise LaunchOptionError(f"--hostfile {str(path)!r} names no host; write lines such as: n0 slots=8")
    return tuple(hosts)


def make_job(
    command: tuple[str, ...],
    *,
    num_ranks: int | None,
    hosts: tuple[tuple[str, int], ...],
    num_cores: int,
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
    default_ranks: int = 1,
    **others: Any,
) -> JobSpec:
    """Check the numbers; others are further fields of JobSpec.

    default_ranks is how many a node gets of which nothing is said. Raises: LaunchOptionError.
    """
    if not command:
        raise LaunchOptionError(
            "nothing to start: put a bigbatch command behind --, such as -- train --config quickstart"
        )
    if hosts and (num_nodes is not None or ranks_per_node is not None):
        raise LaunchOptionError("--hosts states nodes and ranks by itself: leave out --nodes and --ranks-per-node")
    for name, value in (("--nodes", num_nodes), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise LaunchOptionError(f"{name} {value} is not a number from 1 on")
    slots = sum(count for _, count in hosts)
    nodes = num_nodes or 1
    given = others.get("gpus_per_node") if ranks_per_node is None else ranks_per_node
    total = num_ranks if num_ranks is not None else slots or nodes * (given or default_ranks)
    if total < 1 or (hosts and total > slots):
        raise LaunchOptionError(f"--ranks {total} is not between 1 and the {slots or 'available'} slots of --hosts")
    if total > MOST_RANKS:
        of_nodes = "" if num_nodes is None else f" of --nodes {num_nodes}"
        raise LaunchOptionError(f"{total} ranks{of_nodes} are more than any job has: state {MOST_RANKS} or fewer")
    if total % nodes or (ranks_per_node is not None and total != nodes * ranks_per_node):
        raise LaunchOptionError(f"--ranks {total} does not fill --nodes {nodes} evenly: state --ranks-per-node instead")
    return JobSpec(
        command,
        total,
        hosts,
        oversubscribe=not hosts and num_nodes is None and total > num_cores,
        num_nodes=num_nodes,
        **others,
    )


def check_time(job: JobSpec, *, stop_seconds: int, early_seconds: int = 0) -> None:
    """Raise LaunchOptionError where ranks would be asked to stop before they have started, and trained a little.

    early_seconds: how much earlier the scheduler may ask them.
    """
    if job.minutes is not None and stop_seconds > 0 and job.minutes * 60 <= stop_seconds + early_seconds:
        earlier = f", and up to {early_seconds} s earlier" if early_seconds else ""
        raise LaunchOptionError(
            f"--time of {job.minutes} min leaves no time to train: the ranks are asked to stop {stop_seconds} s before "
            f"it{earlier}; lengthen it or lower --stop-seconds"
        )
