"""An MPIJob (kubeflow.org/v2beta1) of Kubernetes' MPI operator: mpirun in a launcher's pod, sshd in those of nodes."""

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

HOSTFILE = "/etc/mpi/hostfile"
"""Where the operator writes the workers' names, as 'NAME slots=N'."""

ASK_RANKS = [
    *("sh", "-c"),
    'for each in /proc/[0-9]*/stat; do read -r pid _ _ parent _ 2>/dev/null <"$each" && '
    'read -r name 2>/dev/null <"/proc/$parent/comm" && [ "${name#pr}" = ted ] && kill -USR1 "$pid"; done; '
    "while grep -aqs -e '[b]igbatch' -e '[p]rted' /proc/[0-9]*/cmdline; do sleep 1; done",
]
"""Asks the ranks of a worker that is deleted to save, and holds it until they have ended: with sshd they would go.
Ranks are what mpirun's daemon, prted, started; it stays until those of an own script have ended, too."""


def mpijob(job: JobSpec, *, name: str) -> Fields:
    """Return the job as plain objects. Raises: LaunchOptionError."""
    policy: Fields = {
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": TTL_SECONDS,
        "backoffLimit": max_restarts(job),
    }
    if job.minutes is not None and job.minutes != UNLIMITED:
        policy["activeDeadlineSeconds"] = job.minutes * 60
    workers = {"replicas": job.num_nodes or 1, "restartPolicy": "Never", "template": {"spec": _worker(job)}}
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata(job, name=name),
        "spec": {
            "slotsPerWorker": job.ranks_per_node,
            # else mpirun could call before the workers' sshd is there
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": policy,
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": _launcher(job)}},
                "Worker": workers,
            },
        },
    }


def _launcher(job: JobSpec) -> Fields:
    """Return the pod of bigbatch launch mpirun: that turns the SIGTERM that ends a pod into a request to save."""
    words = ["bigbatch", "launch", "mpirun", "--hostfile", HOSTFILE, "--ranks", str(job.num_ranks)]
    environment = variables(job)
    words += [f"--env={each['name']}" for each in environment]  # ssh hands none of a container's own to the ranks
    words += [] if job.restarts is None else [f"--restarts={job.restarts}"]
    words += ["--python"] if job.is_python else []
    container = {
        "name": "launcher",
        "image": job.image,
        "command": [literal(word) for word in (*words, "--", *job.command)],
        "env": environment,
    }
    return {"terminationGracePeriodSeconds": grace_seconds(job), **_pod(job), "containers": [container]}


def _worker(job: JobSpec) -> Fields:
    """Return the pod that waits in each node for mpirun's ssh."""
    there, mounts = volumes(job)
    container = {
        "name": "worker",
        "image": job.image,
        # host keys of its own: an image that brought them would have the same everywhere
        "command": ["sh", "-c", "ssh-keygen -A && exec /usr/sbin/sshd -De"],
        # what WaitForWorkersReady waits for: the keys take a second, and mpirun calls once
        "readinessProbe": {"tcpSocket": {"port": 22}, "periodSeconds": 1},
        "lifecycle": {"preStop": {"exec": {"command": ASK_RANKS}}},
        "volumeMounts": mounts,
        "resources": resources(job),
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if job.rdma else {}),
    }
    # longer than the launcher's, whose ranks save here meanwhile
    seconds = grace_seconds(job) + 30
    return {"terminationGracePeriodSeconds": seconds, **_pod(job), "containers": [container], "volumes": there}


def _pod(job: JobSpec) -> Fields:
    """Return what launcher and workers share: root, for sshd, and which nodes they may run on."""
    return {"securityContext": {"runAsUser": 0}, **placement(job)}
