"""Command lines to start in each node: mpirun, one torchrun per node, or the ranks themselves; pure."""

import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bigbatch.comm.rendezvous.ports import FIRST_JOB_PORT
from bigbatch.errors import LaunchOptionError
from bigbatch.interpreter import python_argv
from bigbatch.launch.jobs.fields import Option
from bigbatch.launch.jobs.processes import NodeProcess
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.mpirun import ASKS_TO_STOP as MPIRUN_ASKS
from bigbatch.launch.launchers.mpirun import mpirun_argv
from bigbatch.launch.launchers.torchrun import ASKS_TO_STOP as TORCHRUN_ASKS
from bigbatch.launch.launchers.torchrun import torchrun_argv
from bigbatch.tools.emulate.plan import ClusterPlan, address, host, place_ranks

ORDERS = ("block", "cyclic")

AGENT = "bigbatch.tools.emulate.agent"
"""The module that replaces ssh."""


@dataclass(frozen=True)
class StartContext:
    """What a job's processes depend on, besides the job and the plan."""

    order: str = "block"
    """Order in which ranks are placed on nodes: one of ORDERS."""
    master_port: int = FIRST_JOB_PORT
    """Port at which the ranks meet in the first node."""
    mpirun: str = "mpirun"
    folder: Path = Path()
    """Folder of the cluster for files of mpirun and torchrun: hosts of several clusters have the same names."""
    terminal_columns: int = 0
    """Width of the terminal; 0 without one."""
    variables: tuple[str, ...] = ()
    """Names of the variables in the environment of this process."""


MakeProcesses = Callable[[JobSpec, ClusterPlan, StartContext], tuple[NodeProcess, ...]]
"""Returns the processes to start in existing nodes; pure. Raises: LaunchOptionError for a job that it cannot start."""


def plain_processes(job: JobSpec, plan: ClusterPlan, context: StartContext) -> tuple[NodeProcess, ...]:
    """Return the ranks themselves, with torchrun's variables."""
    shared = {"WORLD_SIZE": plan.world_size, "MASTER_ADDR": address(0), "MASTER_PORT": context.master_port}
    starts = []
    for rank, (node, local_rank) in enumerate(place_ranks(plan.ranks_per_node, order=context.order)):
        own = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": plan.ranks_per_node[node],
            "GROUP_RANK": node,
        }
        variables = (*((name, str(value)) for name, value in (shared | own).items()), *job.variables)
        name = f"rank {rank} on {host(node)}"
        starts.append(NodeProcess(node, (sys.executable, *job.python_words), variables, name))
    return tuple(starts)


def torchrun_processes(job: JobSpec, plan: ClusterPlan, context: StartContext) -> tuple[NodeProcess, ...]:
    """Return one torchrun per node. Raises: LaunchOptionError for an order that torchrun lacks."""
    if context.order != "block":
        raise LaunchOptionError(
            f"--place {context.order}: torchrun numbers ranks node by node; use --launcher mpirun or plain"
        )
    port, logs = context.master_port, str(context.folder / "torchrun")
    shared = replace(job, num_nodes=plan.num_nodes, master=(address(0), port), restarts=None)
    parts = [
        replace(shared, num_ranks=count * plan.num_nodes, node_rank=node)
        for node, count in enumerate(plan.ranks_per_node)
    ]
    return tuple(
        NodeProcess(node, tuple(torchrun_argv(part, log_dir=logs)), job.variables) for node, part in enumerate(parts)
    )


def mpirun_processes(job: JobSpec, plan: ClusterPlan, context: StartContext) -> tuple[NodeProcess, ...]:
    """Return mpirun in the first node, which reaches the others by the agent instead of ssh.

    Inside, all processes are root. Waiting ranks yield their core: all nodes share this machine's cores.
    Raises: LaunchOptionError for a path of Python that mpirun cannot take.
    """
    if re.search(r"[\s:]", sys.executable):  # mpirun splits its agents at colons and their words at blanks; no quotes
        raise LaunchOptionError(
            f"mpirun cannot call {sys.executable!r}, as its path has a blank or a colon: use --launcher torchrun or "
            "plain, or a virtual environment elsewhere"
        )
    options = (
        *("--map-by", "slot" if context.order == "block" else "node", "--prtemca", "plm", "ssh"),
        *("--prtemca", "plm_ssh_agent", f"{' '.join(python_argv())} -m {AGENT}"),
        *("--prtemca", "prte_tmpdir_base", str(context.folder), "--mca", "mpi_yield_when_idle", "1"),
    )
    argv = mpirun_argv(
        replace(job, hosts=tuple((host(node), count) for node, count in enumerate(plan.ranks_per_node))),
        mpirun=context.mpirun,
        is_root=True,
        terminal_columns=context.terminal_columns,
        variables=context.variables,
        options=options,
    )
    return (NodeProcess(0, tuple(argv), job.variables),)


NODE_LAUNCHERS: dict[str, tuple[MakeProcesses, signal.Signals]] = {
    "mpirun": (mpirun_processes, MPIRUN_ASKS),
    "torchrun": (torchrun_processes, TORCHRUN_ASKS),
    "plain": (plain_processes, signal.SIGTERM),
}
"""Launcher -> function that makes its processes, and signal that asks these to make ranks save and stop."""

RUN_OPTIONS = (
    Option("link", "rate of each node's link, each way, such as 200mbit (default: none = unlimited)"),
    Option("delay", "added one-way delay between nodes, such as 500us (default: 0)"),
    Option("launcher", "what starts the ranks (default: mpirun)", choices=tuple(NODE_LAUNCHERS), default="mpirun"),
    Option("place", "order of ranks on nodes (default: block)", choices=ORDERS, default="block"),
)
"""Options of `bigbatch launch emulate run` that a sweep may state."""
