"""An MPIJob for Kubernetes' MPI operator (kubeflow.org/v2beta1), as a manifest to be kept and edited."""

import argparse
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import yaml

from bigbatch.comm.rendezvous.environ import expand_hostlist
from bigbatch.errors import LaunchOptionError, SchedulerError
from bigbatch.launch.jobs.foreground import one_line
from bigbatch.launch.jobs.spec import JobSpec, refuse
from bigbatch.launch.jobs.words import UNLIMITED
from bigbatch.launch.launchers.base import Launcher

HOSTFILE = "/etc/mpi/hostfile"
"""Where the operator writes the workers' names, as 'NAME slots=N'."""

UNTIL_RANKS_END = [
    *("sh", "-c"),
    "while grep -aqs -e '[b]igbatch' -e '[p]rted' /proc/[0-9]*/cmdline; do sleep 1; done",
]
"""Holds a worker that is being deleted: with sshd its ranks would go, which the launcher has asked to save first.
Ranks of an own script are seen by mpirun's daemon, prted, which started them and stays until they have ended."""

REFUSED = {
    "hosts": "Kubernetes chooses the nodes: state --nodes and --ranks-per-node, and --exclude for bad ones",
    **dict.fromkeys(("node_rank", "master"), "the operator's hostfile names the workers: leave it out"),
    **dict.fromkeys(("partition", "account", "qos", "reservation"), "name a queue in the manifest's schedulingPolicy"),
    "constraint": "add a nodeSelector to the manifest",
    "array": "start one job per value",
    "preflight": "start a job of its own: -- preflight",
    "modules": "the image holds all that is needed",
    "container": "Kubernetes runs the image by itself",
    "logs": "kubectl logs shows what the launcher prints",
}

HEADER = """\
# Made by bigbatch launch k8s, to be kept and edited. The cluster needs the MPI operator, and the image an sshd:
#   kubectl apply -f THIS_FILE
#   kubectl logs -f job/{name}-launcher
"""


def manifest(job: JobSpec) -> str:
    """Return YAML of the job; pure. Raises: LaunchOptionError for what an MPIJob cannot say."""
    return HEADER.format(name=_name(job)) + yaml.safe_dump(mpijob(job), sort_keys=False, allow_unicode=True)


def mpijob(job: JobSpec) -> dict[str, Any]:
    """Return the same as plain objects. Raises: LaunchOptionError."""
    refuse(job, launcher="k8s", refused=REFUSED)
    if job.image is None:
        raise LaunchOptionError("--image is missing: name the image of bigbatch that the cluster can pull")
    nodes = job.num_nodes or 1
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 3}
    if job.minutes is not None and job.minutes != UNLIMITED:
        policy["activeDeadlineSeconds"] = job.minutes * 60
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": _name(job)},
        "spec": {
            "slotsPerWorker": job.ranks_per_node,
            # else mpirun could call before the workers' sshd is there
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": policy,
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": _launcher(job)}},
                "Worker": {"replicas": nodes, "restartPolicy": "Never", "template": {"spec": _worker(job)}},
            },
        },
    }


def apply(text: str) -> None:
    """Hand a manifest to kubectl. Raises: SchedulerError with its words, and where it is not installed."""
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise SchedulerError(
            "kubectl is not installed here: add --dry-run, and apply the manifest elsewhere"
        ) from error
    if done.returncode:
        raise SchedulerError(f"kubectl refused the job: {one_line(done.stderr)}")


def _name(job: JobSpec) -> str:
    name = job.name or "bigbatch"
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name):  # the operator appends -worker-NNN
        raise LaunchOptionError(
            f"--name {name!r} must be up to 52 of a-z, 0-9 and - for Kubernetes, such as resnet50-32k"
        )
    return name


def _launcher(job: JobSpec) -> dict[str, Any]:
    """Return the pod of bigbatch launch mpirun: that turns the SIGTERM that ends a pod into a request to save."""
    words = ["bigbatch", "launch", "mpirun", "--hostfile", HOSTFILE, "--ranks", str(job.num_ranks)]
    for name, value in job.variables:  # ssh hands none of a container's own variables to the ranks
        words += [f"--env={name}={value}"]
    words += [] if job.restarts is None else [f"--restarts={job.restarts}"]
    words += ["--python"] if job.is_python else []
    container = {
        "name": "launcher",
        "image": job.image,
        "command": [_literal(word) for word in (*words, "--", *job.command)],
    }
    return {"terminationGracePeriodSeconds": job.grace_seconds, **_pod(job), "containers": [container]}


def _worker(job: JobSpec) -> dict[str, Any]:
    """Return the pod that waits in each node for mpirun's ssh."""
    own = job.ranks_per_node if job.device is None else 0
    gpus = own if job.gpus_per_node is None else job.gpus_per_node
    limits: dict[str, Any] = {"nvidia.com/gpu": gpus} if gpus else {}
    if job.cpus_per_rank is not None:
        limits["cpu"] = job.cpus_per_rank * job.ranks_per_node
    if job.memory is not None:
        if job.memory == "0":
            raise LaunchOptionError("--memory 0: Kubernetes gives no whole node: state how much, such as 200G")
        # Slurm's units are powers of two, in letters of any case
        limits["memory"] = job.memory.upper() + ("i" if job.memory[-1].isalpha() else "Mi")
    volumes, mounts = _volumes(job)
    container = {
        "name": "worker",
        "image": job.image,
        "command": ["/usr/sbin/sshd", "-De"],
        "lifecycle": {"preStop": {"exec": {"command": UNTIL_RANKS_END}}},
        "volumeMounts": mounts,
        "resources": {"limits": limits},
    }
    return {
        # longer than the launcher's, whose ranks save here meanwhile
        "terminationGracePeriodSeconds": job.grace_seconds + 30,
        **_pod(job),
        "containers": [container],
        "volumes": volumes,
    }


def _pod(job: JobSpec) -> dict[str, Any]:
    """Return what launcher and workers share: root, for sshd, and nodes to avoid."""
    pod: dict[str, Any] = {"securityContext": {"runAsUser": 0}}
    if job.exclude is not None:
        avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": expand_hostlist(job.exclude)}
        required = {"nodeSelectorTerms": [{"matchExpressions": [avoid]}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return pod


def _volumes(job: JobSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return volumes and where they are mounted: /dev/shm in memory, since a container's own has 64 MB, and --mount's.

    Each of those is a folder of the node, or a claim by its name.
    """
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(job.mounts):
        source, target, *flags = mount.split(":")
        is_folder = source.startswith("/")
        place = {"hostPath": {"path": source}} if is_folder else {"persistentVolumeClaim": {"claimName": source}}
        volumes.append({"name": f"mount-{number}", **place})
        mounts.append({"name": f"mount-{number}", "mountPath": target, **({"readOnly": True} if "ro" in flags else {})})
    return volumes, mounts


def _literal(word: str) -> str:
    """Write $$ for $, as Kubernetes replaces $(NAME) in commands; $$ stands for $."""
    return word.replace("$", "$$")


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    text = manifest(job)
    apply(text)
    print(text.splitlines()[2].removeprefix("#   "))
    return 0


LAUNCHER = Launcher(
    name="k8s",
    help="submit an MPIJob to Kubernetes",
    default_ranks="--nodes times --ranks-per-node",
    passes="none",
    example="--nodes 4 --ranks-per-node 8 --image registry/bigbatch -- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=lambda job, environ: manifest(job),
    start=_start,
    sees="none",
    queue="kubectl get mpijob shows its jobs, and kubectl delete mpijob NAME saves a checkpoint and ends one",
)
