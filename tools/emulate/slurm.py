"""A real Slurm in an emulated cluster: its configuration as text, its start, its nodes, commands on its login node."""

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from bigbatch.errors import EmulationError
from bigbatch.files import open_to_append, read_end, write_new
from bigbatch.launch.jobs.foreground import shell_code
from bigbatch.tools.emulate import namespaces
from bigbatch.tools.emulate.cluster import end, join, reporting_lost_cluster, system_path
from bigbatch.tools.emulate.plan import ClusterPlan, address, host
from bigbatch.tools.emulate.state import EmulatedCluster
from bigbatch.trainer.step.signals import handling_stops

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

SINFO = ("sinfo", "--noheader", "--Node", "--partition", PARTITIONS[0], "--format", "%N %T")
START_SECONDS = 180
"""Time limit until all nodes are idle; one second on an idle machine."""

ANSWER_SECONDS = 10


def slurm_folder(cluster_folder: Path) -> Path:
    return cluster_folder / "slurm"


def slurm_conf(plan: ClusterPlan, *, folder: Path) -> str:
    """Return the text of slurm.conf of a cluster with Slurm's files in folder.

    A node has a CPU for each of its ranks, whatever the machine has, and no job waits for memory. Nodes share the
    machine's control groups and its /tmp: no plugin uses control groups, and each node has another folder for TmpFS.
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
    nodes = ["SlurmdParameters=config_overrides", f"SlurmdTimeout={NODE_TIMEOUT_SECONDS}", "ReturnToService=2"]
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


def slurm_environ(environ: Mapping[str, str], *, cluster_folder: Path) -> dict[str, str]:
    """Return variables by which Slurm's commands find this Slurm, without those of an enclosing Slurm job."""
    own = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    return own | {"SLURM_CONF": f"{slurm_folder(cluster_folder)}/slurm.conf"}


def require_slurm(folder: Path, *, environ: Mapping[str, str]) -> None:
    """Check before anything is built. Raises: EmulationError for what this machine, user or folder lacks."""
    if not _may_set_groups():
        raise EmulationError("--slurm needs root: Slurm sets the groups of its jobs, and no plain user may do that")
    missing = [name for name in PROGRAMS if shutil.which(name, path=system_path(environ)) is None]
    if missing:
        raise EmulationError(f"{', '.join(missing)} not installed: apt-get install {PACKAGES}")
    if not re.fullmatch(r"[\w./+-]{1,80}", str(folder), re.ASCII):
        raise EmulationError(
            f"{str(folder)!r} is too long for Slurm's sockets, or has characters other than letters, digits and ./_+-: "
            "set XDG_RUNTIME_DIR to a folder of yours with a short name"
        )


def _may_set_groups() -> bool:
    """Return whether this user may set groups: root may, except in a user namespace that was made without root."""
    switch = Path("/proc/self/setgroups")
    return os.geteuid() == 0 and not (switch.exists() and switch.read_text().strip() == "deny")


def start_slurm(cluster: EmulatedCluster, *, root: Path, environ: Mapping[str, str]) -> None:
    """Start Slurm and wait until all nodes are idle; this process can start no threads afterwards.

    If that fails, the cluster ends, and its folder stays. Raises: EmulationError, naming the node and its log.
    """
    folder = slurm_folder(root / cluster.plan.name)
    environ = slurm_environ(environ, cluster_folder=folder.parent) | {"PATH": system_path(environ)}
    try:
        _prepare(cluster, folder)
        join(cluster)
        for node, argv in slurm_commands(cluster.plan, folder=folder):
            _start(cluster, argv, node=node, folder=folder, environ=environ)
        _wait_for_nodes(cluster, folder=folder, environ=environ)
    except BaseException:
        end(cluster)
        raise


def _prepare(cluster: EmulatedCluster, folder: Path) -> None:
    folder.mkdir()
    (folder / "state").mkdir()
    for node in range(cluster.plan.num_nodes):
        (folder / f"spool.{host(node)}").mkdir()
        (folder / f"tmp.{host(node)}").mkdir()
    write_new(folder / "slurm.conf", slurm_conf(cluster.plan, folder=folder).encode())
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def _start(cluster: EmulatedCluster, argv: list[str], *, node: int, folder: Path, environ: Mapping[str, str]) -> None:
    log = folder / (f"slurmd.{argv[2]}.log" if argv[0] == "slurmd" else f"{argv[0]}.log")
    with reporting_lost_cluster(cluster), open_to_append(log) as file:  # not a pipe, which the daemon would keep open
        enter = partial(namespaces.enter_node, cluster.keeper, node)
        nowhere = subprocess.DEVNULL
        done = subprocess.run(argv, preexec_fn=enter, env=environ, stdin=nowhere, stdout=nowhere, stderr=file)
    if done.returncode != 0:
        raise EmulationError(f"{host(node)}: {argv[0]} does not start: {_last_log_line(log)}")


def _wait_for_nodes(cluster: EmulatedCluster, *, folder: Path, environ: Mapping[str, str]) -> None:
    hosts = [host(node) for node in range(cluster.plan.num_nodes)]
    deadline = time.monotonic() + START_SECONDS
    states = ask_states(cluster, environ=environ)
    while not states or any(states.get(each) != "idle" for each in hosts):
        if time.monotonic() > deadline:
            if not states:
                raise EmulationError(f"slurmctld does not answer: {_last_log_line(folder / 'slurmctld.log')}")
            late = next(each for each in hosts if states.get(each) != "idle")
            log = _last_log_line(folder / f"slurmd.{late}.log")
            raise EmulationError(f"{late}: {states.get(late, 'unknown')} after {START_SECONDS} s, not idle: {log}")
        time.sleep(0.1)
        states = ask_states(cluster, environ=environ)


def _last_log_line(log: Path) -> str:
    """Return the fatal error of a log, else its last line, with the log's name."""
    lines = read_end(log).splitlines() if log.exists() else []
    fatal = [line for line in lines if "fatal: " in line]
    return f"{log}: {(fatal or lines or ['empty'])[-1]}"


def ask_states(cluster: EmulatedCluster, *, environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return Slurm's nodes and their states, such as idle or down*; None without an answer in ANSWER_SECONDS."""
    enter = partial(namespaces.enter_node, cluster.keeper, 0)
    try:
        done = subprocess.run(
            SINFO, preexec_fn=enter, env=environ, input="", capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.SubprocessError):  # the cluster may end meanwhile
        return None
    if done.returncode:
        return None
    return {name: state for name, _, state in (line.partition(" ") for line in done.stdout.splitlines())}


def describe_nodes(cluster: EmulatedCluster, *, root: Path, environ: Mapping[str, str]) -> str:
    folder = root / cluster.plan.name
    states = ask_states(cluster, environ=slurm_environ(environ, cluster_folder=folder))
    if not states:
        return f"Slurm does not answer: see {slurm_folder(folder)}/slurmctld.log"
    return f"Slurm: {', '.join(f'{node} {state}' for node, state in states.items())}"


def run_on_login_node(argv: Sequence[str], *, cluster: EmulatedCluster, root: Path, environ: Mapping[str, str]) -> int:
    """Run a user's command in the first node, in the foreground; return its exit code, 128 + signal if one ended it.

    Ctrl-C reaches it from the terminal, like this process. Raises: EmulationError for a program that is not installed.
    """
    name = cluster.plan.name
    if not cluster.plan.slurm:
        raise EmulationError(
            f"{name} runs no Slurm: bigbatch launch emulate run, or a cluster by bigbatch launch emulate up --slurm"
        )
    job_environ = {"OMP_NUM_THREADS": "1"} | slurm_environ(environ, cluster_folder=root / name)
    join(cluster)
    with reporting_lost_cluster(cluster):
        try:
            enter = partial(namespaces.enter_node, cluster.keeper, 0)
            process = subprocess.Popen(argv, preexec_fn=enter, env=job_environ, stdin=None)  # as ssh does
        except (FileNotFoundError, PermissionError) as error:
            raise EmulationError(f"{argv[0]}: {error.strerror}") from error

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    with handling_stops(pass_on):
        return shell_code(process.wait())
