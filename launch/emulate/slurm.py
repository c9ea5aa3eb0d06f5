"""Slurm on an emulated cluster as text: its configuration, argument lists, and the parser of sinfo's output; pure."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from bigbatch.launch.emulate.plan import ClusterPlan, address, host

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"

PARTITIONS = ("batch", "urgent")
"""The default partition, and one that preempts its jobs: they get their --signal and are requeued."""

REQUEUE_SECONDS = 6
"""Seconds a requeued job waits, the lifetime of its old credentials (Slurm's default: 120)."""

NODE_TIMEOUT_SECONDS = 30
"""Seconds without an answer after which a node is down (Slurm's default: 300)."""

GRACE_SECONDS = 60
"""Seconds that a preempted job gets to save a checkpoint."""


def slurm_folder(cluster_folder: Path) -> Path:
    return cluster_folder / "slurm"


def slurm_conf(plan: ClusterPlan, *, folder: Path) -> str:
    """Return the text of slurm.conf of a cluster with Slurm's files in folder.

    A node has a CPU for each of its ranks, whatever the machine has, and no job waits for memory. Nodes share the
    machine's control groups and its /tmp, so no plugin may use the former, and each has a part of the latter.
    """
    daemons = [
        f"ClusterName={plan.name}",
        f"SlurmctldHost={host(0)}({address(0)})",
        "SlurmUser=root",
        f"AuthInfo=socket={folder}/munge.socket,cred_expire={REQUEUE_SECONDS}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        f"TmpFS={folder}/tmp.%n",
        "MailProg=/bin/true",
    ]
    jobs = [
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "PropagateResourceLimits=NONE",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=bf_interval=2,sched_interval=2",
        "EnforcePartLimits=ALL",
        "MinJobAge=3600",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SlurmctldParameters=preempt_send_user_signal",
    ]
    nodes = [
        "SlurmdParameters=config_overrides",
        f"SlurmdTimeout={NODE_TIMEOUT_SECONDS}",
        "ReturnToService=2",
    ]
    for node, ranks in enumerate(plan.ranks_per_node):
        nodes.append(f"NodeName={host(node)} NodeAddr={address(node)} CPUs={ranks} RealMemory=1000000")
    batch, urgent = PARTITIONS
    partitions = [
        f"PartitionName={batch} Nodes=ALL Default=YES PriorityTier=1 GraceTime={GRACE_SECONDS}",
        f"PartitionName={urgent} Nodes=ALL PriorityTier=2 PreemptMode=OFF",
    ]
    return "\n".join([*daemons, *jobs, *nodes, *partitions]) + "\n"


def slurm_commands(plan: ClusterPlan, *, folder: Path) -> list[tuple[int, list[str]]]:
    """Return the commands that start Slurm, in order, each with its node: every one becomes a daemon.

    All nodes share one munged: its socket is a file. --force tells it that no other user can reach our folder.
    """
    files = {"socket": "munge.socket", "key-file": "munge.key", "seed-file": "munge.seed"}
    files |= {"pid-file": "munged.pid", "log-file": "munged.log"}
    munged = ["munged", "--force", *(f"--{option}={folder}/{name}" for option, name in files.items())]
    conf = f"{folder}/slurm.conf"
    slurmds = [(node, ["slurmd", "-N", host(node), "-f", conf]) for node in range(plan.num_nodes)]
    return [(0, munged), (0, ["slurmctld", "-f", conf]), *slurmds]


def describe_start(plan: ClusterPlan, *, folder: Path) -> str:
    commands = [f"{host(node)}: {shlex.join(argv)}" for node, argv in slurm_commands(plan, folder=folder)]
    return "\n".join([f"{folder}/slurm.conf:", slurm_conf(plan, folder=folder), *commands])


def log_path(argv: list[str], *, folder: Path) -> Path:
    return folder / (f"slurmd.{argv[2]}.log" if argv[0] == "slurmd" else f"{argv[0]}.log")


SINFO = ("sinfo", "--noheader", "--Node", "--partition", PARTITIONS[0], "--format", "%N %T")


def parse_states(text: str) -> dict[str, str]:
    """Parse SINFO's output, 'n0 idle', 'n1 down*', into node -> state."""
    return {host: state for host, _, state in (line.partition(" ") for line in text.splitlines())}


def slurm_environ(environ: Mapping[str, str], *, cluster_folder: Path) -> dict[str, str]:
    """Return variables by which Slurm's commands find this Slurm, without those of an enclosing Slurm job."""
    own = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    return own | {"SLURM_CONF": f"{slurm_folder(cluster_folder)}/slurm.conf"}
