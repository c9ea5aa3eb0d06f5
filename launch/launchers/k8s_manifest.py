"""A JobSet (jobset.x-k8s.io/v1alpha2): one pod per node, whose ranks meet by torch's rendezvous; no ssh, no root."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import NOTICE_VARIABLE, SECRET_VARIABLE
from bigbatch.comm.rendezvous.launcher import expand_hostlist
from bigbatch.comm.rendezvous.ports import FIRST_JOB_PORT
from bigbatch.errors import CRASHED, FAILED, INTERRUPTED, PIPE_CLOSED, LaunchOptionError
from bigbatch.launch.jobs.restarts import may_restart
from bigbatch.launch.jobs.run_folder import try_load_experiment
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.jobs.validation import UNLIMITED
from bigbatch.launch.launchers.local import node_launch_words
from bigbatch.trainer.config.strict_yaml import parse_yaml

SECRET, JOB_SECRET_KEY = "bigbatch", "secret"
"""Secret with the values of --env NAME; key of the job's own secret in its Secret."""
RESTARTS = 3
"""Default number of restarts: a lost node must not end the job."""
STEP_SECONDS = 60
"""Time for the current step before a checkpoint is written."""
NOT_STARTED = (126, 127)
"""Exit codes of a shell and a container runtime if the command cannot be started."""
EXIT_CODES = (*range(FAILED, CRASHED + 1), *NOT_STARTED, PIPE_CLOSED)
"""Exit codes that end the job. Not INTERRUPTED: a pod that saved and stopped was on a drained node."""

POD_PORT = 29500
"""Port of the rendezvous in a network of the pods' own."""
NUM_HOST_PORTS = 10_000
"""Ports of the rendezvous in the nodes' network: 20000 to 29999, below the NodePorts of services."""

IF_STOPPED = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [INTERRUPTED]}}
TEMPLATE = Path(__file__).with_name("jobset.yaml")

Fields = dict[str, Any]


def jobset(job: JobSpec, *, name: str) -> Fields:
    """Return the job as plain objects. Raises: LaunchOptionError if Kubernetes does not support it."""
    user, _, group = (job.user or "1000").partition(":")
    job = replace(job, restarts=RESTARTS if job.restarts is None else job.restarts)
    # jobs on one node share its ports
    port = FIRST_JOB_PORT + zlib.crc32(name.encode()) % NUM_HOST_PORTS if "host-network" in job.pod else POD_PORT
    # Kubernetes substitutes $(JOB_COMPLETION_INDEX) in the pods of an indexed Job
    starter = node_launch_words(job, node_rank="$(JOB_COMPLETION_INDEX)", master=f"{name}-node-0-0.{name}:{port}")
    # a container's own /dev/shm has 64 MB
    volumes: list[Fields] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    volume_mounts: list[Fields] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(job.mounts):
        source, target, *flags = mount.split(":")
        is_folder = source.startswith("/")
        place = {"hostPath": {"path": source}} if is_folder else {"persistentVolumeClaim": {"claimName": source}}
        volumes.append({"name": f"mount-{number}", **place})
        is_read_only = {"readOnly": True} if "ro" in flags else {}
        volume_mounts.append({"name": f"mount-{number}", "mountPath": target, **is_read_only})
    values = {
        "name": name,
        "namespace": job.namespace,
        "labels": {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else None,
        "restarts": job.restarts,
        "nodes": job.num_nodes or 1,
        "deadline": None if job.minutes in (None, UNLIMITED) else (job.minutes or 0) * 60,
        # a script may exit with this code for its own reasons and would restart forever
        "if_stopped": None if job.is_python else IF_STOPPED,
        "final_codes": [c for c in EXIT_CODES if c in NOT_STARTED or not may_restart(c, is_python=job.is_python)],
        "grace": _grace_seconds(job),
        "user": int(user),
        "group": int(group or user),
        "affinity": _affinity(job.exclude) if job.exclude else None,
        "node_selector": dict(word.split("=", 1) for word in job.node_selector) or None,
        "tolerations": [_toleration(word) for word in job.tolerations] or None,
        "priority": job.priority,
        "pull_secrets": [{"name": secret} for secret in job.pull_secrets] or None,
        "image": job.image,
        "command": ["bigbatch", *starter, *map(_escaped, job.command)],
        "env": _variables(job, name=name),
        "limits": _limits(job),
        "volume_mounts": volume_mounts,
        "capabilities": ["IPC_LOCK"] if job.rdma else None,
        "volumes": volumes,
        **_pod_fields(job.pod, name=name),
    }
    template = parse_yaml(TEMPLATE.read_bytes())
    filled: Fields = _fill_template(template, {f"${key}": value for key, value in values.items()})
    return filled


def has_secret(job: JobSpec) -> bool:
    """Return whether ranks of several pods must authenticate to each other."""
    return (job.num_nodes or 1) > 1


def _fill_template(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        filled = {key: _fill_template(each, values) for key, each in part.items()}
        return {key: each for key, each in filled.items() if each is not None}
    if isinstance(part, list):
        return [each for each in (_fill_template(each, values) for each in part) if each is not None]
    return values.get(part, part)


def _grace_seconds(job: JobSpec) -> int:
    """Return the pods' grace time: --stop-seconds, else the time limit of the run's checkpoints.

    A pod whose ranks have saved ends at once. A user's script's time to save is unknown.
    """
    if job.stop_seconds is not None or (config := try_load_experiment(job)) is None:
        return job.grace_seconds
    return math.ceil(config.run.checkpoint_timeout_seconds) + STEP_SECONDS


def _affinity(exclude: str) -> Fields:
    avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": expand_hostlist(exclude)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [avoid]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _toleration(word: str) -> Fields:
    """Parse KEY[=VALUE][:EFFECT] in the form of kubectl taint; without an effect, all effects."""
    stated, _, effect = word.partition(":")
    key, mark, value = stated.partition("=")
    matches = {"operator": "Equal", "value": value} if mark else {"operator": "Exists"}
    return {"key": key, **matches, **({"effect": effect} if effect else {})}


def _pod_fields(words: Sequence[str], *, name: str) -> Fields:
    """Return the values of the template's words for --pod; None for those that are not stated."""
    stated = dict(word.partition("=")[::2] for word in words)
    named = {
        kind: {key.removeprefix(f"{kind}."): value for key, value in stated.items() if key.startswith(f"{kind}.")}
        for kind in ("annotation", "label")
    }
    metadata = {f"{kind}s": values for kind, values in named.items() if values}
    spread = {
        "maxSkew": 1,
        "topologyKey": stated.get("spread"),
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}},
    }
    is_on_host = True if "host-network" in stated else None
    return {
        "pod_metadata": metadata or None,
        "service_account": stated.get("service-account"),
        "host_network": is_on_host,
        # else pods of the node's network do not find the first pod by its name
        "dns_policy": "ClusterFirstWithHostNet" if is_on_host else None,
        "runtime_class": stated.get("runtime-class"),
        "scheduler": stated.get("scheduler"),
        "spread": [spread] if "spread" in stated else None,
    }


def _variables(job: JobSpec, *, name: str) -> list[Fields]:
    """Return the environment of a container; the Secret with the job's name contains the ranks' secret."""
    stated = {**dict(job.variables), **({NOTICE_VARIABLE: str(grace)} if (grace := _grace_seconds(job)) else {})}
    taken = {variable: {"name": secret or SECRET, "key": variable} for variable, secret in job.forwarded}
    if has_secret(job) and SECRET_VARIABLE not in {*stated, *taken}:
        taken[SECRET_VARIABLE] = {"name": name, "key": JOB_SECRET_KEY}
    return [
        *({"name": variable, "value": _escaped(value)} for variable, value in stated.items()),
        *({"name": variable, "valueFrom": {"secretKeyRef": key}} for variable, key in taken.items()),
    ]


def _limits(job: JobSpec) -> Fields:
    """Return the resources of a node's pod. Raises: LaunchOptionError if Kubernetes does not support them."""
    own = job.ranks_per_node if job.device is None else 0
    gpus = own if job.gpus_per_node is None else job.gpus_per_node
    limits: Fields = {"nvidia.com/gpu": gpus} if gpus else {}
    if job.rdma is not None:
        card, _, number = job.rdma.partition("=")
        limits[card] = int(number or 1)
    if job.cpus_per_rank is not None:
        limits["cpu"] = job.cpus_per_rank * job.ranks_per_node
    if job.memory is not None:
        if job.memory == "0":
            raise LaunchOptionError("--memory 0: Kubernetes gives no whole node: state how much, such as 200G")
        # Slurm's units are powers of two, in upper or lower case
        limits["memory"] = job.memory.upper() + ("i" if job.memory[-1].isalpha() else "Mi")
    return limits


def _escaped(word: str) -> str:
    """Escape $ as $$, since Kubernetes substitutes $(NAME) in commands and values."""
    return word.replace("$", "$$")
