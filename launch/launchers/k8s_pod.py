"""What the pods of every kind of job have in common, as plain objects of Kubernetes' API (core/v1)."""

import math
from typing import Any

from bigbatch.comm.rendezvous.environ import NOTICE_VARIABLE, SECRET_VARIABLE, expand_hostlist
from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.run_folder import find_save_seconds
from bigbatch.launch.jobs.spec import JobSpec

Fields = dict[str, Any]

SECRET = "bigbatch"
"""That has the values of --env NAME."""

JOB_SECRET_KEY = "secret"
"""Of the Secret that is made for each job and has its name: what its ranks prove that they know."""

TTL_SECONDS = 7 * 24 * 3600
"""How long a job that has ended is kept, with its pods and their logs."""

STARTS = 4
"""Of a job that states no restarts: a drained node must not end it."""

STEP_SECONDS = 60
"""For the step under way, before a checkpoint is written."""


def grace_seconds(job: JobSpec) -> int:
    """Return how long pods may take to end: --stop-seconds, else the time in which the run's checkpoints must be saved.

    A pod whose ranks have saved ends at once. A script's time to save is not known.
    """
    if job.stop_seconds is not None or (save := find_save_seconds(job)) is None:
        return job.grace_seconds
    return math.ceil(save) + STEP_SECONDS


def max_restarts(job: JobSpec) -> int:
    """Return how often a job that lost a rank starts again."""
    return STARTS - 1 if job.restarts is None else job.restarts


def metadata(job: JobSpec, *, name: str) -> Fields:
    """Return name, namespace, and the queue of Kueue that the job waits in."""
    return {
        "name": name,
        **({"namespace": job.namespace} if job.namespace else {}),
        **({"labels": {"kueue.x-k8s.io/queue-name": job.queue}} if job.queue else {}),
    }


def placement(job: JobSpec) -> Fields:
    """Return what says which nodes a pod may run on, before whom, and by which secrets its image is pulled."""
    placed: Fields = {}
    if job.exclude is not None:
        avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": expand_hostlist(job.exclude)}
        required = {"nodeSelectorTerms": [{"matchExpressions": [avoid]}]}
        placed["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    if job.node_selector:
        placed["nodeSelector"] = dict(word.split("=", 1) for word in job.node_selector)
    if job.tolerations:
        placed["tolerations"] = [toleration(word) for word in job.tolerations]
    if job.priority:
        placed["priorityClassName"] = job.priority
    if job.pull_secrets:
        placed["imagePullSecrets"] = [{"name": name} for name in job.pull_secrets]
    return placed


def toleration(word: str) -> Fields:
    """Read KEY[=VALUE][:EFFECT], as kubectl taint writes it; without an effect, all of them."""
    stated, _, effect = word.partition(":")
    key, mark, value = stated.partition("=")
    matches = {"operator": "Equal", "value": value} if mark else {"operator": "Exists"}
    return {"key": key, **matches, **({"effect": effect} if effect else {})}


def variables(job: JobSpec, *, job_secret: str | None = None) -> list[Fields]:
    """Return the environment of a container; job_secret names the Secret that the job's ranks share."""
    stated = {**dict(job.variables), **({NOTICE_VARIABLE: str(grace)} if (grace := grace_seconds(job)) else {})}
    taken = [(name, secret or SECRET, name) for name, secret in job.taken]
    if job_secret is not None and SECRET_VARIABLE not in {*stated, *(name for name, _, _ in taken)}:
        taken.append((SECRET_VARIABLE, job_secret, JOB_SECRET_KEY))
    return [
        *({"name": name, "value": literal(value)} for name, value in stated.items()),
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in taken),
    ]


def resources(job: JobSpec) -> Fields:
    """Return what a node's pod gets. Raises: LaunchOptionError for what Kubernetes cannot say."""
    own = job.ranks_per_node if job.device is None else 0
    gpus = own if job.gpus_per_node is None else job.gpus_per_node
    limits: Fields = {"nvidia.com/gpu": gpus} if gpus else {}
    if job.rdma is not None:
        name, _, number = job.rdma.partition("=")
        limits[name] = int(number or 1)
    if job.cpus_per_rank is not None:
        limits["cpu"] = job.cpus_per_rank * job.ranks_per_node
    if job.memory is not None:
        if job.memory == "0":
            raise LaunchOptionError("--memory 0: Kubernetes gives no whole node: state how much, such as 200G")
        # Slurm's units are powers of two, in letters of any case
        limits["memory"] = job.memory.upper() + ("i" if job.memory[-1].isalpha() else "Mi")
    return {"limits": limits}


def volumes(job: JobSpec) -> tuple[list[Fields], list[Fields]]:
    """Return volumes and where they are mounted: /dev/shm in memory, since a container's own has 64 MB, and --mount's.

    Each of those is a folder of the node, or a claim by its name.
    """
    there: list[Fields] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Fields] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(job.mounts):
        source, target, *flags = mount.split(":")
        is_folder = source.startswith("/")
        place = {"hostPath": {"path": source}} if is_folder else {"persistentVolumeClaim": {"claimName": source}}
        there.append({"name": f"mount-{number}", **place})
        mounts.append({"name": f"mount-{number}", "mountPath": target, **({"readOnly": True} if "ro" in flags else {})})
    return there, mounts


def literal(word: str) -> str:
    """Write $$ for $, as Kubernetes replaces $(NAME) in commands and values; $$ stands for $."""
    return word.replace("$", "$$")
