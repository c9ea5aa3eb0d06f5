"""JobSpec: a command, its ranks and hosts, and the requests to a scheduler. Each option of a job is one field."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

from bigbatch.comm.rendezvous.environ import DEVICE_VARIABLE, INTERFACE_VARIABLE, interface_settings
from bigbatch.errors import JobRefused, LaunchOptionError
from bigbatch.interpreter import SAFE_PATH_VARIABLE
from bigbatch.launch.jobs.fields import KUBERNETES, REQUEST, Option, Words, containers, option, pods, ranks, request
from bigbatch.launch.jobs.validation import (
    NAME,
    SUBDOMAIN,
    check_array,
    check_command_words,
    check_environment,
    check_exclude,
    check_forwarded,
    check_pod,
    check_sbatch,
    parse_environment,
    parse_forwarded,
    parse_gpus,
    parse_hosts,
    parse_master,
    parse_minutes,
    parse_sbatch,
    read_hostfile,
)
from bigbatch.paths import as_path, expand_path
from bigbatch.words import whole

INDEX = "{index}"
"""Placeholder in an array's command: the number of the job in its array."""


def name_like(example: str, *, pattern: str = NAME) -> Words:
    return Words(pattern, f"letters, digits and . _ + @ -, such as {example}")


def names_like(example: str) -> Words:
    return name_like(example, pattern=f"{NAME}(?:,{NAME})*")


INTERFACE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}"
"""Name of a network interface; Linux allows 15 characters."""
SPAN = "[0-9]+(?:-[0-9]+(?::[0-9]+)?)?"
LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
QUALIFIED = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
KEY = rf"(?:{SUBDOMAIN}/)?{QUALIFIED}"
"""Key of a Kubernetes label, taint or resource."""

# legal words of options; Slurm reads #SBATCH lines without a shell's quotes
INTERFACES = Words(f"{INTERFACE}(?:,{INTERFACE})*", "names of interfaces separated by commas, such as eth0")
DEVICE = Words("cpu", "cpu, or leave it out to use GPUs")
PREFLIGHT = Words("off|warn|stop|exclude", "off, warn, stop or exclude")
MODULE = Words(r"[A-Za-z0-9][A-Za-z0-9._/+@-]*", "the name of a module, such as cuda/13.0")
CONSTRAINT = Words(r"[A-Za-z0-9\[(][A-Za-z0-9._&|()*,:\[\]-]*", "names separated by & or |, such as 'a100&nvlink'")
GPU_TYPE = Words(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a type and a number, such as a100:8")
MEMORY = Words(r"0|[1-9][0-9]*[KMGTkmgt]?", "a number and K, M, G or T, such as 200G")
ARRAY = Words(rf"{SPAN}(?:,{SPAN})*(?:%[0-9]+)?", "numbers and ranges, such as 0-7")
LOGS = Words(r"(?!-)[A-Za-z0-9._/+@=:-]+", "letters, digits and . _ / + @ = : -, such as logs")
MPI = Words(r"[a-z][a-z0-9_]*", "one that srun --mpi=list names, such as pmix")
IMAGE = Words(r"[A-Za-z0-9./][^\s\x00-\x1f]*", "a file or a name without blanks, such as bigbatch.sqsh")
MOUNT = Words(
    r"[A-Za-z0-9./][^\s:,]*:/[^\s:,]*(?::[a-z+-]+)?",
    "SOURCE:TARGET without blanks, TARGET an absolute path, such as /data:/data",
)
RUNTIME = Words("pyxis|apptainer", "pyxis or apptainer")
NAMESPACE = Words(LABEL, "a namespace of Kubernetes, such as vision")
LOCAL_QUEUE = Words(SUBDOMAIN, "the name of a LocalQueue, such as research")
PRIORITY_CLASS = Words(SUBDOMAIN, "the name of a PriorityClass, such as high")
NODE_LABEL = Words(f"{KEY}=(?:{QUALIFIED})?", "KEY=VALUE, such as gpu=h200")
TAINT = Words(
    f"{KEY}(?:=(?:{QUALIFIED})?)?(?::(?:NoSchedule|PreferNoSchedule|NoExecute))?",
    "KEY[=VALUE][:EFFECT], such as nvidia.com/gpu:NoSchedule",
)
SECRET = Words(SUBDOMAIN, "the name of a Secret, such as registry")
RESOURCE = Words(f"{KEY}(?:=[1-9][0-9]{{0,3}})?", "a resource, and a number, such as rdma/hca_shared_devices_a")
POD_FIELD = Words(
    rf"host-network|annotation\.{KEY}=[^\x00-\x1f\x7f]{{0,4096}}|label\.{KEY}=(?:{QUALIFIED})?|spread={KEY}"
    f"|(?:service-account|runtime-class|scheduler)={SUBDOMAIN}",
    "host-network, annotation.NAME=VALUE, label.NAME=VALUE, service-account=NAME, spread=NODE_LABEL, "
    "runtime-class=NAME or scheduler=NAME",
)
USER = Words(r"[1-9][0-9]{0,9}(?::[1-9][0-9]{0,9})?", "UID or UID:GID, each at least 1, such as 1000:1000")


@dataclass(frozen=True)
class JobSpec:
    """A job: one command for all ranks. None: the cluster's or launcher's default.

    The command line, site files, sweeps and all checks read options from these fields, whose order is that of the help.
    Each launcher uses a field or refuses it.
    Raises: LaunchOptionError for a value that a launcher's syntax could misread.
    """

    command: tuple[str, ...]
    num_ranks: int = ranks("total number of ranks (default: see above)", name="ranks", kind=whole, default=MISSING)
    hosts: tuple[tuple[str, int], ...] = ranks(
        "hosts and their ranks, such as n0:8,n1:8 (default: this host)",
        parse=parse_hosts,
        also=(Option("hostfile", "the same in a file: lines such as n0 slots=8", as_path, parse=read_hostfile),),
        default=(),
    )
    """(host, number of ranks) each; empty: the launcher or scheduler decides."""
    oversubscribe: bool = False
    """Whether a host has more ranks than cores: waiting ranks then yield their core."""
    num_nodes: int | None = ranks(
        "number of nodes",
        name="nodes",
        kind=whole,
        at_least=1,
        also=(Option("ranks_per_node", "default: --gpus-per-node, else 1", whole),),
    )
    """Nodes with equally many ranks each."""
    node_rank: int | None = ranks("torchrun, local: index of this node, from 0", kind=whole, at_least=0)
    master: tuple[str, int] | None = ranks(
        "torchrun, local: HOST:PORT of the first node, where all nodes meet", parse=parse_master
    )
    interface: str | None = ranks(
        "network interface between the nodes, such as eth0, or ib0,ib1 for both (NCCL and gloo)", words=INTERFACES
    )
    device: str | None = ranks("cpu: train on the CPU, even if the hosts have GPUs", choices=("cpu",), words=DEVICE)
    preflight: str | None = ranks(
        "test the nodes first; if one is unfit: warn, exit with 4, or exclude it (default: a short test of each node's "
        "GPUs, without measurements, which exits with 4; off: none)",
        choices=("off", "warn", "stop", "exclude"),
        words=PREFLIGHT,
    )
    restarts: int | None = ranks(
        "restarts in a row without a newer checkpoint, after a lost rank or node (default: 0; under Kubernetes 3)",
        kind=whole,
        at_least=0,
    )
    environment: tuple[tuple[str, str], ...] = ranks(
        "variable for all ranks; NAME alone: its value in this shell, which is not written to files; under Kubernetes "
        "from the Secret bigbatch, or NAME@SECRET",
        name="env",
        metavar="NAME[=VALUE]",
        repeats=True,
        parse=parse_environment,
        check=check_environment,
    )
    forwarded: tuple[tuple[str, str | None], ...] = ranks(
        name="env", repeats=True, parse=parse_forwarded, check=check_forwarded
    )
    """Further variables whose values are not written to files: from the shell that starts the job, or from a Kubernetes
    Secret, which may be named."""
    modules: tuple[str, ...] = ranks("environment module to load first", name="module", repeats=True, words=MODULE)
    is_python: bool = option("", name="python", default=False)
    """Whether the command is a Python script, or -m and a module, with arguments; else a bigbatch command."""

    name: str | None = request("job name (default: bigbatch)", words=name_like("resnet50-32k"))
    minutes: int | None = request(
        "time limit: minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED", name="time", parse=parse_minutes, at_least=1
    )
    partition: str | None = request("queue", words=names_like("gpu"))
    account: str | None = request("account to charge", words=name_like("vision"))
    qos: str | None = request("quality of service", words=name_like("high"))
    reservation: str | None = request("name of a reservation", words=names_like("maintenance"))
    constraint: str | None = request("required node features, such as 'a100&nvlink'", words=CONSTRAINT)
    exclude: str | None = request("excluded nodes, such as n3,n[10-12]", check=check_exclude)
    gpus_per_node: int | None = request(
        "GPUs of a node, such as 8 or a100:8", parse=lambda text: parse_gpus(text)[1], at_least=0
    )
    gpu_type: str | None = request(name="gpus_per_node", parse=lambda text: parse_gpus(text)[0], words=GPU_TYPE)
    """Type of the GPUs in Slurm's configuration, such as a100."""
    cpus_per_rank: int | None = request("CPU cores of a rank, such as 12", kind=whole, at_least=1)
    memory: str | None = request("memory of each node, such as 200G; under Slurm 0: all of it", words=MEMORY)
    array: str | None = request(
        "array of jobs; {index} in COMMAND is the job's number: 0-7, 0-15:4, or 0-99%%4 for 4 at a time",
        words=ARRAY,
        check=check_array,
    )
    stop_seconds: int | None = request(
        "seconds before the time limit to save and requeue the job (default: 120; 0: the job ends at the limit)",
        kind=whole,
        at_least=0,
    )
    logs: str | None = request("folder for output (default: logs)", kind=expand_path, words=LOGS)
    sbatch: tuple[tuple[str, str | None], ...] = request(
        "another sbatch option by its long name; repeat for several: exclusive, mem-per-gpu=60G",
        metavar="KEY[=VALUE]",
        repeats=True,
        parse=parse_sbatch,
        check=check_sbatch,
    )
    """(long name, value, or None without a value) each."""
    mpi: str | None = request(
        "srun's --mpi, such as none or pmix (default: the cluster's; bigbatch works with none)", words=MPI
    )

    image: str | None = containers(
        "container image with bigbatch: a .sqsh or .sif file, or a name in a registry", kind=expand_path, words=IMAGE
    )
    mounts: tuple[str, ...] = containers(
        "SOURCE:TARGET[:FLAGS]; repeat for several; under Kubernetes SOURCE is a volume claim or a folder of the node",
        name="mount",
        kind=expand_path,
        repeats=True,
        words=MOUNT,
    )
    container: str | None = containers(
        "under Slurm (default: apptainer for .sif, else pyxis)", choices=("pyxis", "apptainer"), words=RUNTIME
    )

    namespace: str | None = pods("namespace (default: kubectl's)", words=NAMESPACE)
    queue: str | None = pods("Kueue's LocalQueue", words=LOCAL_QUEUE)
    priority: str | None = pods("name of a PriorityClass", words=PRIORITY_CLASS)
    node_selector: tuple[str, ...] = pods("required node label", metavar="KEY=VALUE", repeats=True, words=NODE_LABEL)
    tolerations: tuple[str, ...] = pods(
        "tolerated node taint", name="toleration", metavar="KEY[=VALUE][:EFFECT]", repeats=True, words=TAINT
    )
    pull_secrets: tuple[str, ...] = pods(
        "Secret for pulling the image", name="pull_secret", metavar="NAME", repeats=True, words=SECRET
    )
    rdma: str | None = pods(
        "resource of the nodes' RDMA cards, such as rdma/hca_shared_devices_a", metavar="NAME[=NUMBER]", words=RESOURCE
    )
    pod: tuple[str, ...] = pods(
        "another field of the pods: annotation.NAME=VALUE, label.NAME=VALUE, service-account=NAME, host-network, "
        "spread=NODE_LABEL (over nodes that differ in it), runtime-class=NAME, scheduler=NAME",
        metavar="FIELD[=VALUE]",
        repeats=True,
        words=POD_FIELD,
        check=check_pod,
    )
    user: str | None = pods("user and group of the pods (default: 1000)", metavar="UID[:GID]", words=USER)

    def __post_init__(self) -> None:
        check_command_words(self.command)
        for name, each in OPTIONS.items():
            each.checked(getattr(self, name))

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


def _option_of(field: "Field[Any]") -> Option:
    stated = field.metadata.get("option", Option("", ""))
    also = tuple(replace(each, group=stated.group) for each in stated.also)
    return replace(stated, name=stated.name or field.name, also=also)


OPTIONS = {field.name: _option_of(field) for field in fields(JobSpec)}
"""Field of JobSpec -> its option."""
JOB_OPTIONS = tuple(each for stated in OPTIONS.values() if stated.help for each in (stated, *stated.also))
"""Options of all launchers, on the command line and in a sweep's file."""

SCHEDULER_FIELDS = tuple(name for name, each in OPTIONS.items() if each.group == REQUEST and name != "logs")
"""Fields that need a scheduler."""
KUBERNETES_FIELDS = tuple(name for name, each in OPTIONS.items() if each.group == KUBERNETES)
"""Fields that need Kubernetes."""


def refuse(job: JobSpec, *, launcher: str, refused: Mapping[str, str]) -> None:
    """Refuse options that a launcher does not support, with the alternative. Raises: JobRefused."""
    of_others = () if launcher == "k8s" else KUBERNETES_FIELDS
    refused = {**dict.fromkeys(of_others, "it is an option of bigbatch launch k8s: leave it out"), **refused}
    found = [each.name for each in fields(JobSpec) if each.name in refused and getattr(job, each.name) != each.default]
    refusals = [
        f"{OPTIONS[name].flag}: bigbatch launch {launcher} does not support it; {refused[name]}" for name in found
    ]
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
