"""JobSpec: a command, its ranks and hosts, and the requests to a scheduler."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import DEVICE_VARIABLE, INTERFACE_VARIABLE, interface_settings
from bigbatch.errors import JobRefused, LaunchOptionError
from bigbatch.files import TEXT_BYTES, read_plain
from bigbatch.interpreter import SAFE_PATH_VARIABLE
from bigbatch.launch.jobs.validation import check_field, option
from bigbatch.words import count

INDEX = "{index}"
"""Placeholder in an array's command: the number of the job in its array."""


@dataclass(frozen=True)
class JobSpec:
    """A job: one command for all ranks. None: the cluster's or launcher's default.

    hosts: (host, number of ranks) each; empty: the launcher or scheduler decides.
    Raises: LaunchOptionError for a value that a launcher's syntax could misread.
    """

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[tuple[str, int], ...] = ()
    oversubscribe: bool = False
    """Whether a host has more ranks than cores: waiting ranks then yield their core."""
    num_nodes: int | None = None
    """Nodes with equally many ranks each."""
    node_rank: int | None = None
    """Index of this node, from 0; torchrun only."""
    master: tuple[str, int] | None = None
    """Host and port at which torchrun's nodes meet."""
    name: str | None = None
    minutes: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    """Excluded nodes in Slurm's form: n3,n[10-12]."""
    sbatch: tuple[tuple[str, str | None], ...] = ()
    """Further sbatch options: (long name, value, or None without a value)."""
    mpi: str | None = None
    """srun's --mpi, such as pmix; None: the cluster's default."""
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    """Type of the GPUs in Slurm's configuration, such as a100."""
    cpus_per_rank: int | None = None
    memory: str | None = None
    """Memory of each node, such as 200G."""
    image: str | None = None
    """Container in which the ranks run."""
    mounts: tuple[str, ...] = ()
    """Mounts of the container: SOURCE:TARGET, or SOURCE:TARGET:FLAGS."""
    container: str | None = None
    """Container runtime under Slurm: pyxis or apptainer; None: apptainer for .sif, else pyxis."""
    environment: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[tuple[str, str | None], ...] = ()
    """Further variables whose values are not written to files: from the shell that starts the job, or from a Kubernetes
    Secret, which may be named."""
    modules: tuple[str, ...] = ()
    interface: str | None = None
    """Network interface between the nodes, such as eth0; several with commas between."""
    device: str | None = None
    """cpu: all ranks use the CPU; None: GPUs if there are any."""
    logs: str | None = None
    array: str | None = None
    """Numbers of an array's jobs in Slurm's form: 0-7, or 3,5,9, or 0-99%4 for four at a time."""
    preflight: str | None = None
    """Action for unfit nodes before the start: warn, stop or exclude; None: a short preflight that stops; off: none."""
    restarts: int | None = None
    """Maximum number of consecutive restarts after a lost rank without a newer checkpoint. None: no restarts."""
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
    pod: tuple[str, ...] = ()
    """Further fields of the pods, such as "host-network" and "annotation.NAME=VALUE"."""
    rdma: str | None = None
    """Resource for the node's RDMA cards, NAME[=NUMBER]."""
    user: str | None = None
    """User and group of the pods, UID[:GID]."""
    is_python: bool = False
    """Whether the command is a Python script, or -m and a module, with arguments; else a bigbatch command."""
    stop_seconds: int | None = None
    """Seconds before the time limit at which the ranks are asked to save and stop; 0: the limit ends the job."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_field(field.name, getattr(self, field.name))

    @property
    def python_words(self) -> tuple[str, ...]:
        """Return the arguments of the interpreter: a script or module, or bigbatch, with arguments."""
        return self.command if self.is_python else ("-m", "bigbatch", *self.command)

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // (self.num_nodes or 1)

    @property
    def spans_nodes(self) -> bool:
        return (self.num_nodes or 1) > 1

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Return the variables that every rank gets from the job; of two with one name the last counts."""
        device = () if self.device is None else ((DEVICE_VARIABLE, self.device),)
        # a user's script imports from its folder, a user's module from the work folder
        safe = () if self.is_python else ((SAFE_PATH_VARIABLE, "1"),)
        return (*interface_variables(self.interface), *device, *safe, *self.environment)

    @property
    def grace_seconds(self) -> int:
        """Return stop_seconds, or its default."""
        return 120 if self.stop_seconds is None else self.stop_seconds


MAX_RANKS = 10**6
"""Limit of ranks: more than any cluster has; without it a typing error could fill this host's memory."""

SCHEDULER_FIELDS = (
    *("name", "minutes", "partition", "account", "qos", "reservation", "constraint", "exclude", "sbatch", "mpi"),
    *("gpus_per_node", "gpu_type", "cpus_per_rank", "memory", "array", "stop_seconds"),
)
"""Fields that need a scheduler."""

KUBERNETES_FIELDS = (
    "namespace",
    "queue",
    "priority",
    "node_selector",
    "tolerations",
    "pull_secrets",
    "rdma",
    "user",
    "pod",
)
"""Fields that need Kubernetes."""


def refuse(job: JobSpec, *, launcher: str, refused: Mapping[str, str]) -> None:
    """Refuse options that a launcher does not support, with the alternative. Raises: JobRefused."""
    of_others = () if launcher == "k8s" else KUBERNETES_FIELDS
    refused = {**dict.fromkeys(of_others, "it is an option of bigbatch launch k8s: leave it out"), **refused}
    found = [each.name for each in fields(JobSpec) if each.name in refused and getattr(job, each.name) != each.default]
    refusals = [f"{option(name)}: bigbatch launch {launcher} does not support it; {refused[name]}" for name in found]
    refusals += [
        f"--env {name}@{secret}: only Kubernetes has Secrets: export {name} here, and state --env {name}"
        for name, secret in job.forwarded
        if secret is not None and launcher != "k8s"
    ]
    if refusals:
        raise JobRefused(refusals)


def interface_variables(name: str | None) -> tuple[tuple[str, str], ...]:
    """Return the variables that select the network interfaces for bigbatch, gloo and NCCL."""
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
        if path.is_fifo() and path.is_symlink():  # <(COMMAND), a link in /dev/fd, whose end comes
            with path.open("rb") as pipe:
                text = pipe.read(TEXT_BYTES)
        else:
            text = read_plain(path, most=TEXT_BYTES)
        lines = [line.partition("#")[0].strip() for line in text.decode("utf-8-sig").splitlines()]
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
    """Return the JobSpec. Derives the number of ranks from hosts, nodes or GPUs; refuses combinations that contradict.

    default_ranks: ranks of a node if none are stated. others: further fields. Raises: LaunchOptionError.
    """
    if not command:
        raise LaunchOptionError(
            "nothing to start: put a bigbatch command after --, such as -- train --config quickstart"
        )
    if hosts and (num_nodes is not None or ranks_per_node is not None):
        raise LaunchOptionError("--hosts already states nodes and ranks: leave out --nodes and --ranks-per-node")
    for name, value in (("--nodes", num_nodes), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise LaunchOptionError(f"{name} {value} must be at least 1")
    slots = sum(count for _, count in hosts)
    nodes = num_nodes or 1
    given = others.get("gpus_per_node") if ranks_per_node is None else ranks_per_node
    total = num_ranks if num_ranks is not None else slots or nodes * (given or default_ranks)
    if total < 1 or (hosts and total > slots):
        available = count(slots, "slot") if slots else "available slots"
        raise LaunchOptionError(f"--ranks {total} is not between 1 and the {available} of --hosts")
    if total > MAX_RANKS:
        of_nodes = "" if num_nodes is None else f" of --nodes {num_nodes}"
        raise LaunchOptionError(f"{total} ranks{of_nodes} are more than any job has: state {MAX_RANKS} or fewer")
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
    """Raise LaunchOptionError if the request to stop may come as soon as the job starts.

    early_seconds: how much earlier the scheduler may send it.
    """
    if job.minutes is not None and stop_seconds > 0 and job.minutes * 60 <= stop_seconds + early_seconds:
        earlier = f", and up to {early_seconds} s earlier" if early_seconds else ""
        raise LaunchOptionError(
            f"--time of {job.minutes} min leaves no time to train: the ranks are asked to stop {stop_seconds} s before "
            f"it{earlier}; lengthen it or lower --stop-seconds"
        )
