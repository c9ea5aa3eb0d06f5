"""A JobSet (jobset.x-k8s.io/v1alpha2): one pod per node, whose ranks meet by torch's rendezvous; no ssh, no root."""

from bigbatch.exit_codes import (
    CRASHED,
    DIFFERENT,
    FAILED,
    INTERRUPTED,
    LOST,
    PIPE_CLOSED,
    REFUSED,
    SOME_FAILED,
    UNFIT,
)
from bigbatch.launch.jobs.restarts import may_go_on
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.jobs.words import UNLIMITED
from bigbatch.launch.launchers.k8s_pod import (
    TTL_SECONDS,
    Fields,
    grace_seconds,
    literal,
    max_restarts,
    metadata,
    placement,
    resources,
    variables,
    volumes,
)
from bigbatch.launch.launchers.local import node_words

NODES = "node"
"""Names the pods: JOB-node-0-INDEX-XXXXX."""

PORT = 29500
"""Where the ranks meet; a pod has all ports of its own address."""

NO_PROGRAM = (126, 127)
"""A shell's codes, and the container runtime's, where the command cannot be started."""

KNOWN_CODES = (*(FAILED, REFUSED, SOME_FAILED, UNFIT, DIFFERENT, LOST, CRASHED, *NO_PROGRAM, INTERRUPTED, PIPE_CLOSED),)


def jobset(job: JobSpec, *, name: str) -> Fields:
    """Return the job as plain objects. Raises: LaunchOptionError."""
    nodes = job.num_nodes or 1
    limit = {} if job.minutes in (None, UNLIMITED) else {"activeDeadlineSeconds": (job.minutes or 0) * 60}
    one_per_node = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        # one pod that fails ends the others: they cannot go on without it, and all start again or none
        "backoffLimit": 0,
        **limit,
        "podFailurePolicy": {"rules": _pod_rules(job)},
        "template": {"spec": _pod(job, name=name)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, name=name),
        "spec": {
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": max_restarts(job), "rules": RULES},
            "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": one_per_node}}],
        },
    }


def final_codes(job: JobSpec) -> list[int]:
    """Return the codes after which nothing starts again: a person must mend something first.

    Not that of a stop by request: who deletes a job takes its pods along, so that it means a node that is drained.
    """
    final = [code for code in KNOWN_CODES if not may_go_on(code, is_python=job.is_python) or code in NO_PROGRAM]
    return [code for code in final if code != INTERRUPTED]


def _pod_rules(job: JobSpec) -> list[Fields]:
    """Return how a pod's end is told to the JobSet: each of these by the message of its Job, all else by its reason."""

    def on(codes: list[int]) -> Fields:
        return {"action": "FailJob", "onExitCodes": {"operator": "In", "values": codes}}

    drained = [{"type": "DisruptionTarget", "status": "True"}]
    # a script may end so by itself, and would without end
    asked = [] if job.is_python else [on([INTERRUPTED])]
    return [{"action": "FailJob", "onPodConditions": drained}, *asked, on(final_codes(job))]


RULES: list[Fields] = [
    {"name": "timeIsOver", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
    {
        "name": "nodeDrained",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["condition DisruptionTarget ", f"exit code {INTERRUPTED} "],
    },
    {"name": "toBeMended", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
]
"""The first that fits counts; where none does, as after a lost rank, all start again, up to maxRestarts."""


def _pod(job: JobSpec, *, name: str) -> Fields:
    """Return the pod of a node, as the standard "restricted" of Kubernetes' pod security wants it."""
    there, mounts = volumes(job)
    several = (job.num_nodes or 1) > 1
    user, _, group = (job.user or "1000").partition(":")
    may_lock = {"add": ["IPC_LOCK"]} if job.rdma else {}
    container = {
        "name": "ranks",
        "image": job.image,
        "command": _words(job, name=name),
        "env": variables(job, job_secret=name if several else None),
        "resources": resources(job),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **may_lock}},
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds(job),
        # the ranks ask Kubernetes nothing
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(group or user),
            "fsGroup": int(group or user),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **placement(job),
        "containers": [container],
        "volumes": there,
    }


def _words(job: JobSpec, *, name: str) -> list[str]:
    """Return the command of a pod: it starts the ranks of its node, and turns SIGTERM into a request to save."""
    # a variable that Kubernetes gives the pods of an indexed Job, and replaces here
    words = node_words(job, node_rank="$(JOB_COMPLETION_INDEX)", master=f"{name}-{NODES}-0-0.{name}:{PORT}")
    return ["bigbatch", *words, *map(literal, job.command)]
