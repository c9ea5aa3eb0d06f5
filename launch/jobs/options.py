"""The options that all launchers share, and the JobSpec that they state."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bigbatch.launch.jobs.spec import JobSpec, make_job, parse_hosts, parse_master, read_hostfile
from bigbatch.launch.jobs.words import parse_environment, parse_minutes

STATED = (
    *("name", "partition", "account", "qos", "reservation", "constraint", "exclude", "gpus_per_node", "cpus_per_rank"),
    *("memory", "image", "container", "interface", "logs", "array", "stop_seconds", "node_rank", "preflight"),
)
"""Fields that the command line states as they are."""


def job_options() -> argparse.ArgumentParser:
    """The parent of each launcher's parser."""
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parent.add_argument("--dry-run", action="store_true", help="print exactly what would run instead of running it")
    ranks = parent.add_argument_group("ranks")
    ranks.add_argument("--ranks", type=int, help="number of ranks in all (default: see above)")
    ranks.add_argument("--hosts", help="hosts and their ranks, such as n0:8,n1:8 (default: this host)")
    ranks.add_argument("--hostfile", type=Path, help="the same in a file: lines such as n0 slots=8")
    ranks.add_argument("--nodes", type=int, help="number of nodes")
    ranks.add_argument("--ranks-per-node", type=int, help="default: --gpus-per-node, else 1")
    ranks.add_argument("--node-rank", type=int, help="torchrun: which of the nodes this is, from 0")
    ranks.add_argument("--master", help="torchrun: where the nodes meet, HOST:PORT of the first one")
    ranks.add_argument("--interface", help="network interface between the nodes, such as eth0")
    ranks.add_argument(
        "--preflight",
        choices=("warn", "stop", "exclude"),
        help="look first whether the nodes are fit; if not: go on, end with 4, or do without them (slurm, mpirun)",
    )
    ranks.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for all ranks")
    ranks.add_argument("--module", action="append", default=[], help="environment module to load first")
    request = parent.add_argument_group("what is asked of the scheduler (default: the cluster's own)")
    request.add_argument("--name", help="of the job (default: bigbatch)")
    request.add_argument("--time", help="limit: minutes, H:MM:SS or D-HH:MM:SS")
    for name, text in (("partition", "queue"), ("account", "to charge"), ("qos", "quality of service")):
        request.add_argument(f"--{name}", help=text)
    request.add_argument("--reservation", help="name of a reservation")
    request.add_argument("--constraint", help="features that nodes must have, such as 'a100&nvlink'")
    request.add_argument("--exclude", help="nodes not to use, such as n3,n[10-12]")
    request.add_argument("--gpus-per-node", type=int, help="such as 8")
    request.add_argument("--cpus-per-rank", type=int, help="such as 12")
    request.add_argument("--memory", help="of each node, such as 200G")
    request.add_argument("--array", help="jobs that differ in {index} in COMMAND: 0-7, or 0-99%%4 for 4 at a time")
    request.add_argument(
        "--stop-seconds",
        type=int,
        help="checkpoint and requeue so long before the time limit (default: 120; 0: not at all, the limit is the end)",
    )
    request.add_argument("--logs", help="folder for output (default: logs)")
    container = parent.add_argument_group("container")
    container.add_argument("--image", help="that the ranks run in: a .sqsh or .sif file, or a registry's name")
    container.add_argument("--mount", action="append", default=[], help="SOURCE:TARGET[:FLAGS], once per mount")
    container.add_argument(
        "--container", choices=("pyxis", "apptainer"), help="(default: apptainer for .sif, else pyxis)"
    )
    return parent


def read_job(
    arguments: argparse.Namespace, command: Sequence[str], *, num_cores: int, default_ranks: int = 1
) -> JobSpec:
    """What the options state. Raises: ConfigError."""
    hosts = () if arguments.hosts is None else parse_hosts(arguments.hosts)
    if arguments.hostfile is not None:
        hosts += read_hostfile(arguments.hostfile)
    return make_job(
        tuple(command),
        num_ranks=arguments.ranks,
        hosts=hosts,
        num_cores=num_cores,
        num_nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        default_ranks=default_ranks,
        minutes=parse_minutes(arguments.time) if arguments.time is not None else None,
        master=parse_master(arguments.master) if arguments.master is not None else None,
        mounts=tuple(arguments.mount),
        environment=parse_environment(arguments.env),
        modules=tuple(arguments.module),
        **{name: getattr(arguments, name) for name in STATED},
    )
