"""Options shared by all launchers, on the command line and in a sweep's file, and the JobSpec made from them."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.spec import JobSpec, make_job, parse_hosts, parse_master, read_hostfile
from bigbatch.launch.jobs.validation import (
    check_field,
    parse_environment,
    parse_forwarded,
    parse_gpus,
    parse_minutes,
    parse_sbatch,
)
from bigbatch.paths import as_path, expand_path
from bigbatch.words import whole


@dataclass(frozen=True)
class Option:
    """An option with a value: `--gpus-per-node 8` on the command line, `gpus_per_node: 8` in a file."""

    name: str
    help: str
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    default: str | None = None
    metavar: str | None = None
    repeats: bool = False
    """Whether it may be repeated; its value is a list."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


PREFLIGHTS = ("off", "warn", "stop", "exclude")
RESTARTS = Option(
    "restarts",
    "restarts in a row without a newer checkpoint, after a lost rank or node (default: 0; under Kubernetes 3)",
    whole,
)
RANKS = (
    Option("ranks", "total number of ranks (default: see above)", whole),
    Option("hosts", "hosts and their ranks, such as n0:8,n1:8 (default: this host)"),
    Option("hostfile", "the same in a file: lines such as n0 slots=8", as_path),
    Option("nodes", "number of nodes", whole),
    Option("ranks_per_node", "default: --gpus-per-node, else 1", whole),
    Option("node_rank", "torchrun, local: index of this node, from 0", whole),
    Option("master", "torchrun, local: HOST:PORT of the first node, where all nodes meet"),
    Option("interface", "network interface between the nodes, such as eth0, or ib0,ib1 for both (NCCL and gloo)"),
    Option("device", "cpu: train on the CPU, even if the hosts have GPUs", choices=("cpu",)),
    Option(
        "preflight",
        "test the nodes first; if one is unfit: warn, exit with 4, or exclude it (default: a short test of each node's "
        "GPUs, without measurements, which exits with 4; off: none)",
        choices=PREFLIGHTS,
    ),
    RESTARTS,
    Option(
        "env",
        "variable for all ranks; NAME alone: its value in this shell, which is not written to files; under Kubernetes "
        "from the Secret bigbatch, or NAME@SECRET",
        metavar="NAME[=VALUE]",
        repeats=True,
    ),
    Option("module", "environment module to load first", repeats=True),
)
REQUEST = (
    Option("name", "job name (default: bigbatch)"),
    Option("time", "time limit: minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED"),
    Option("partition", "queue"),
    Option("account", "account to charge"),
    Option("qos", "quality of service"),
    Option("reservation", "name of a reservation"),
    Option("constraint", "required node features, such as 'a100&nvlink'"),
    Option("exclude", "excluded nodes, such as n3,n[10-12]"),
    Option("gpus_per_node", "GPUs of a node, such as 8 or a100:8"),
    Option("cpus_per_rank", "CPU cores of a rank, such as 12", whole),
    Option("memory", "memory of each node, such as 200G; under Slurm 0: all of it"),
    Option("array", "array of jobs; {index} in COMMAND is the job's number: 0-7, 0-15:4, or 0-99%%4 for 4 at a time"),
    Option(
        "stop_seconds",
        "seconds before the time limit to save and requeue the job (default: 120; 0: the job ends at the limit)",
        whole,
    ),
    Option("logs", "folder for output (default: logs)", expand_path),
    Option(
        "sbatch",
        "another sbatch option by its long name; repeat for several: exclusive, mem-per-gpu=60G",
        metavar="KEY[=VALUE]",
        repeats=True,
    ),
    Option("mpi", "srun's --mpi, such as none or pmix (default: the cluster's; bigbatch works with none)"),
)
CONTAINER = (
    Option("image", "container image with bigbatch: a .sqsh or .sif file, or a name in a registry", expand_path),
    Option(
        "mount",
        "SOURCE:TARGET[:FLAGS]; repeat for several; under Kubernetes SOURCE is a volume claim or a folder of the node",
        expand_path,
        repeats=True,
    ),
    Option("container", "under Slurm (default: apptainer for .sif, else pyxis)", choices=("pyxis", "apptainer")),
)
KUBERNETES = (
    Option("namespace", "namespace (default: kubectl's)"),
    Option("queue", "Kueue's LocalQueue"),
    Option("priority", "name of a PriorityClass"),
    Option("node_selector", "required node label", metavar="KEY=VALUE", repeats=True),
    Option("toleration", "tolerated node taint", metavar="KEY[=VALUE][:EFFECT]", repeats=True),
    Option("pull_secret", "Secret for pulling the image", metavar="NAME", repeats=True),
    Option("rdma", "resource of the nodes' RDMA cards, such as rdma/hca_shared_devices_a", metavar="NAME[=NUMBER]"),
    Option(
        "pod",
        "another field of the pods: annotation.NAME=VALUE, label.NAME=VALUE, service-account=NAME, host-network, "
        "spread=NODE_LABEL (over nodes that differ in it), runtime-class=NAME, scheduler=NAME",
        metavar="FIELD[=VALUE]",
        repeats=True,
    ),
    Option("user", "user and group of the pods (default: 1000)", metavar="UID[:GID]"),
)
PYTHON_HELP = "COMMAND is a Python script, or -m and a module, with its arguments"
JOB_OPTIONS = (*RANKS, *REQUEST, *CONTAINER, *KUBERNETES)

STATED = (
    *("name", "partition", "account", "qos", "reservation", "constraint", "exclude", "cpus_per_rank", "mpi"),
    *("memory", "image", "container", "interface", "device", "logs", "array", "stop_seconds", "node_rank", "preflight"),
    *("restarts", "namespace", "queue", "priority", "rdma", "user"),
)
"""Fields of JobSpec with the value of the option of the same name."""

LISTED = {"mounts": "mount", "modules": "module", "node_selector": "node_selector"}
LISTED |= {"tolerations": "toleration", "pull_secrets": "pull_secret", "pod": "pod"}
"""Field -> repeated option whose values it lists."""

STAND_INS = {"array": "0", "environment": (), "forwarded": (), "sbatch": (), **dict.fromkeys(LISTED, ())}
"""Values in place of refused ones, so that the rest of the job can be checked."""


def job_options() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parent.add_argument("--dry-run", action="store_true", help="print exactly what would run instead of running it")
    add_options(parent.add_argument_group("ranks"), RANKS)
    add_options(parent.add_argument_group("requests to the scheduler (default: the cluster's)"), REQUEST)
    add_options(parent.add_argument_group("container"), CONTAINER)
    add_options(parent.add_argument_group("Kubernetes"), KUBERNETES)
    return parent


def add_options(parser: "argparse._ActionsContainer", options: Iterable[Option]) -> None:
    for each in options:
        parser.add_argument(
            each.flag,
            action="append" if each.repeats else "store",
            type=each.kind,
            choices=each.choices,
            default=[] if each.repeats else each.default,
            metavar=each.metavar,
            help=each.help,
        )


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Write {'gpus_per_node': 8, 'env': ['a', 'b']} -> --gpus-per-node=8 --env=a --env=b; true has no value."""
    words = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            words.append(flag if each is True else f"{flag}={each}")
    return words


def read_options(stated: Mapping[str, Any], options: Iterable[Option]) -> argparse.Namespace:
    """Parse values by option as if they stood on a command line; a list as repeated options.

    Raises: LaunchOptionError with argparse's message for an illegal value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser, options)
    try:
        return parser.parse_args(
            option_words({each.name: stated[each.name] for each in options if each.name in stated})
        )
    except argparse.ArgumentError as error:
        raise LaunchOptionError(str(error)) from error


def read_job(
    arguments: argparse.Namespace,
    command: Sequence[str],
    *,
    findings: Problems,
    default_ranks: int = 1,
    is_python: bool = False,
) -> JobSpec:
    """Return the job that the options of a command line or a file state.

    Errors go into findings and their values are left out, so that other checks can still run. The job has 0 ranks if
    the stated numbers contradict each other.
    """

    def read(parse: Callable[[Any], Any], words: Any, default: Any = None) -> Any:
        return default if words is None else findings.attempt(parse, words) or default

    gpu_type, gpus_per_node = read(parse_gpus, arguments.gpus_per_node, (None, None))
    stated: dict[str, Any] = {
        "gpus_per_node": gpus_per_node,
        "gpu_type": gpu_type,
        "sbatch": parse_sbatch(arguments.sbatch),
        "minutes": read(parse_minutes, arguments.time),
        "environment": read(parse_environment, arguments.env, ()),
        "forwarded": parse_forwarded(arguments.env),
        **{field: tuple(getattr(arguments, name)) for field, name in LISTED.items()},
        **{name: getattr(arguments, name) for name in STATED},
    }
    fields: dict[str, Any] = {"is_python": is_python, "master": read(parse_master, arguments.master)}
    for name, value in stated.items():
        fields[name] = findings.attempt(check_field, name, value)
        if fields[name] is None and value is not None:
            fields[name] = STAND_INS.get(name)
    words = findings.attempt(check_field, "command", tuple(command)) or ()
    job = findings.attempt(
        make_job,
        words,
        num_ranks=arguments.ranks,
        hosts=read(parse_hosts, arguments.hosts, ()) + read(read_hostfile, arguments.hostfile, ()),
        num_cores=os.cpu_count() or 1,
        num_nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        default_ranks=default_ranks,
        **fields,
    )
    return job or JobSpec(words, 0, **fields)
