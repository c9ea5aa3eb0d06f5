"""Jobs for Kubernetes, as JobSet manifests to be kept and edited."""

import argparse
import json
import re
import secrets
import subprocess
from collections.abc import Mapping
from typing import Any

import yaml

from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.errors import LaunchOptionError, SchedulerError, print_lines
from bigbatch.launch.jobs.findings import Findings
from bigbatch.launch.jobs.foreground import one_line
from bigbatch.launch.jobs.spec import JobSpec, refuse
from bigbatch.launch.launchers.base import Launcher
from bigbatch.launch.launchers.k8s_checks import check_folders
from bigbatch.launch.launchers.k8s_jobset import jobset
from bigbatch.launch.launchers.k8s_pod import JOB_SECRET_KEY, SECRET, Fields

REFUSED = {
    "hosts": "Kubernetes chooses the nodes: state --nodes and --ranks-per-node, and --exclude for bad ones",
    **dict.fromkeys(("node_rank", "master"), "the pods find each other by their names: leave it out"),
    "partition": "a queue of Kueue is --queue",
    "qos": "state a --priority",
    **dict.fromkeys(("account", "reservation"), "Kubernetes counts by --namespace and --queue"),
    "constraint": "state --node-selector KEY=VALUE",
    "array": "start one job per value",
    **dict.fromkeys(("sbatch", "mpi"), "Slurm's own: edit the manifest for what Kubernetes has"),
    "gpu_type": "state the number alone, and --node-selector KEY=VALUE",
    "preflight": "start a job of its own: -- preflight",
    "modules": "the image holds all that is needed",
    "container": "Kubernetes runs the image by itself",
    "logs": "kubectl logs shows what the ranks print",
}

LOGS = (
    "kubectl logs -f{namespace} -l jobset.sigs.k8s.io/jobset-name={name} --prefix --tail=-1 --max-log-requests {pods}"
)

HEADER = """\
# Made by bigbatch launch k8s, to be kept and edited. The cluster needs JobSet, from 0.10 on:
#   kubectl create -f THIS_FILE
#   {logs}
"""

NEEDS_JOB_SECRET = """\
# Its pods wait for a Secret of this name, by which the ranks know each other; bigbatch launch k8s makes it, else:
#   head -c 32 /dev/urandom | base64 | kubectl create secret generic{namespace} {name} --from-file={key}=/dev/stdin
"""

NEEDS_SECRET = """\
# Before, in the same namespace, a Secret with {names}, one NAME=VALUE on each line of a file that only you can read:
#   kubectl create secret generic{namespace} {secret} --from-env-file=FILE
"""


class _Dumper(yaml.SafeDumper):
    """Quotes each string that another reader of YAML may take for a number or a truth value, as Go's does 1e3 and y."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        is_plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]+", text, re.ASCII)
        style = None if is_plain else '"' if "\n" in text else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def manifest(job: JobSpec, *, name: str) -> str:
    """Return YAML of the job; pure. Raises: LaunchOptionError for what Kubernetes cannot say."""
    content = as_objects(job, name=name)
    namespace = f" -n {job.namespace}" if job.namespace else ""
    taken: dict[str, list[str]] = {}
    for variable, secret in job.taken:
        taken.setdefault(secret or SECRET, []).append(variable)
    head = HEADER.format(logs=logs_command(job, name=name))
    if needs_secret(job):
        head += NEEDS_JOB_SECRET.format(name=name, key=JOB_SECRET_KEY, namespace=namespace)
    for secret, names in taken.items():
        head += NEEDS_SECRET.format(secret=secret, names=", ".join(names), namespace=namespace)
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_objects(job: JobSpec, *, name: str) -> Fields:
    """Return the same as plain objects. Raises: LaunchOptionError."""
    refuse(job, launcher="k8s", refused=REFUSED)
    if job.image is None:
        raise LaunchOptionError("--image is missing: name the image of bigbatch that the cluster can pull")
    return jobset(job, name=name)


def needs_secret(job: JobSpec) -> bool:
    """Tell whether ranks of several pods must prove to each other that they are of one job."""
    return (job.num_nodes or 1) > 1


def logs_command(job: JobSpec, *, name: str) -> str:
    """Return what shows what the ranks print."""
    namespace = f" -n {job.namespace}" if job.namespace else ""
    return LOGS.format(name=name, namespace=namespace, pods=job.num_nodes or 1)


def draw_name(job: JobSpec) -> str:
    """Return the job's name with five characters behind it, so that each start is a job of its own.

    Raises: LaunchOptionError.
    """
    name = job.name or "bigbatch"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,36}[a-z0-9])?", name):  # its pods' names are longer, and no more than 63
        raise LaunchOptionError(
            f"--name {name!r} must be up to 38 of a-z, 0-9 and -, a letter first, for Kubernetes, such as resnet50-32k"
        )
    return name + "-" + "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))


def submit(job: JobSpec, text: str) -> None:
    """Hand a manifest to kubectl, and the Secret of its ranks, which ends with the job.

    Its value is in no list of processes and in no file of ours.
    Raises: SchedulerError with kubectl's words, and where it is not installed; nothing is left behind then.
    """
    created = _kubectl("create", "-f", "-", "-o", "json", text=text)
    if not needs_secret(job):
        return
    try:
        _kubectl("create", "-f", "-", text=json.dumps(_secret(json.loads(created), value=new_secret())))
    except SchedulerError:
        _kubectl("delete", "-f", "-", text=text)
        raise


def _secret(owner: Fields, *, value: str) -> Fields:
    """Return the Secret of a job that has been made: it is deleted with it."""
    facts = owner["metadata"]
    reference = {**{key: owner[key] for key in ("apiVersion", "kind")}, "name": facts["name"], "uid": facts["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": facts["name"],
            **({"namespace": facts["namespace"]} if "namespace" in facts else {}),
            "ownerReferences": [reference],
        },
        "immutable": True,
        "stringData": {JOB_SECRET_KEY: value},
    }


def _kubectl(*words: str, text: str) -> str:
    try:
        done = subprocess.run(["kubectl", *words], input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise SchedulerError(
            "kubectl is not installed here: add --dry-run, and create the manifest elsewhere"
        ) from error
    if done.returncode:
        raise SchedulerError(f"kubectl refused the job: {one_line(done.stderr)}")
    return done.stdout


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    with Findings() as findings:
        findings.ask(check_folders, job)
        name = findings.ask(draw_name, job) or "bigbatch"
        text = findings.ask(manifest, job, name=name)
    return text or ""


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    name = draw_name(job)
    submit(job, manifest(job, name=name))
    print_lines(f"job {name}; its output:\n  {logs_command(job, name=name)}")
    return 0


LAUNCHER = Launcher(
    name="k8s",
    help="submit a JobSet to Kubernetes",
    default_ranks="--nodes times --ranks-per-node",
    passes="none",
    example="--nodes 4 --ranks-per-node 8 --image registry/bigbatch --mount data:/data:ro --mount runs:/runs -- "
    "train --config imagenet/resnet50_32k --data.root /data/imagenet --run.directory /runs/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    sees="none",
    site_table="k8s",
    queue="kubectl get jobset shows its jobs, and kubectl delete jobset NAME ends one, which saves first",
)
