"""Launcher for Kubernetes: JobSet manifests, which can be kept and edited."""

import argparse
import json
import re
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import PurePosixPath

import yaml

from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.errors import JobRefused, LaunchOptionError, SchedulerError, print_lines, tell
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.foreground import one_line
from bigbatch.launch.jobs.run_folder import run_argument, try_load_experiment
from bigbatch.launch.jobs.spec import JobSpec, refuse
from bigbatch.launch.launchers.base import Launcher
from bigbatch.launch.launchers.k8s_manifest import JOB_SECRET_KEY, SECRET, has_secret, jobset
from bigbatch.trainer.config.dotted import CLASS

REFUSED = {
    "hosts": "Kubernetes chooses the nodes: state --nodes and --ranks-per-node, and --exclude for bad ones",
    **dict.fromkeys(("partition", "account", "reservation", "qos"), "state --namespace, --queue or --priority"),
    **dict.fromkeys(("constraint", "gpu_type"), "state --node-selector KEY=VALUE"),
    **dict.fromkeys(("array", "preflight"), "submit a separate job, such as -- preflight"),
    "logs": "kubectl logs shows what the ranks print",
    **dict.fromkeys(("node_rank", "master", "sbatch", "mpi", "modules", "container"), "leave it out"),
}

HEADER = """\
# Made by bigbatch launch k8s; you may edit it. The cluster needs JobSet 0.10 or later. To submit it and see its output:
#   kubectl create -f THIS_FILE
#   {logs}
"""
NEEDS_JOB_SECRET = """\
# The pods wait for a Secret with the job's name, by which the ranks authenticate. bigbatch launch k8s creates it; else:
#   head -c 32 /dev/urandom | base64 | kubectl create secret generic{namespace} {name} --from-file={key}=/dev/stdin
"""
NEEDS_SECRET = """\
# First create a Secret with {names} in this namespace, from a file that only you can read, NAME=VALUE on each line:
#   kubectl create secret generic{namespace} {secret} --from-env-file=FILE
"""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings which another parser reads as a number or bool, such as 1e3 and y in Go's."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        is_plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]+", text, re.ASCII)
        style = None if is_plain else '"' if "\n" in text else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def manifest(job: JobSpec, *, name: str) -> str:
    """Return YAML of the job; pure. Raises: LaunchOptionError if Kubernetes does not support it."""
    refuse(job, launcher="k8s", refused=REFUSED)
    if job.image is None:
        raise LaunchOptionError("--image is missing: name the image of bigbatch that the cluster can pull")
    content = jobset(job, name=name)
    taken: dict[str, list[str]] = {}
    for variable, secret in job.forwarded:
        taken.setdefault(secret or SECRET, []).append(variable)
    head = HEADER.format(logs=_logs_command(job, name=name))
    if has_secret(job):
        head += NEEDS_JOB_SECRET.format(name=name, key=JOB_SECRET_KEY, namespace=_namespace(job))
    for secret, names in taken.items():
        head += NEEDS_SECRET.format(secret=secret, names=", ".join(names), namespace=_namespace(job))
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _namespace(job: JobSpec) -> str:
    return f" -n {job.namespace}" if job.namespace else ""


def _logs_command(job: JobSpec, *, name: str) -> str:
    chosen = f"-l jobset.sigs.k8s.io/jobset-name={name} --prefix --tail=-1 --max-log-requests {job.num_nodes or 1}"
    return f"kubectl logs -f{_namespace(job)} {chosen}"


def _check_folders(job: JobSpec) -> None:
    """Refuse a run folder outside of the mounts, which is lost with the pods, and data at a relative path.

    Data at an absolute path may be part of the image. Raises: JobRefused; PathError.
    """
    found = []
    if config := try_load_experiment(job):
        folder, root = config.run.directory, config.data.root
        mount = _mount_of(job, folder)
        if mount is None:
            example = f"--mount runs:/runs --run.directory /runs/{PurePosixPath(folder).name}"
            found.append(
                f"--run.directory {folder}: it is lost with the pods: name a folder in a --mount, as in {example}"
            )
        elif "ro" in mount.split(":")[2:]:
            found.append(f"--run.directory {folder}: --mount {mount} is read only: leave out :ro there")
        if not root.startswith(("/", CLASS)) and "://" not in root:
            example = f"--mount data:/data:ro --data.root /data/{PurePosixPath(root).name}"
            found.append(f"--data.root {root}: pods have no such folder: name one in a --mount, as in {example}")
    if (run := run_argument(job)) is not None and _mount_of(job, run) is None:
        found.append(f"{job.command[0]} {run}: pods have no such folder: name one in a --mount")
    if found:
        raise JobRefused(found)


def _mount_of(job: JobSpec, folder: str) -> str | None:
    """Return the innermost mount that contains a folder; None if there is none, and for a relative path."""
    targets = {mount: PurePosixPath(mount.split(":")[1]) for mount in job.mounts}
    holding = [mount for mount, target in targets.items() if PurePosixPath(folder).is_relative_to(target)]
    return max(holding, key=lambda mount: len(targets[mount].parts), default=None)


def _draw_name(job: JobSpec) -> str:
    """Return the job's name with five random characters: each start is another job. Raises: LaunchOptionError."""
    name = job.name or "bigbatch"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,36}[a-z0-9])?", name):  # its pods' names are longer, at most 63
        raise LaunchOptionError(
            f"--name {name!r} must have up to 38 characters of a-z, 0-9 and -, the first a letter, such as resnet50-32k"
        )
    return name + "-" + "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))


def _submit(job: JobSpec, text: str) -> None:
    """Create the manifest's job by kubectl, and the Secret of its ranks, which Kubernetes deletes with the job.

    The Secret's value appears in no process list and in no file of ours.
    Raises: SchedulerError with kubectl's message, or if it is not installed; nothing remains then.
    """
    created = json.loads(_kubectl("create", "-f", "-", "-o", "json", text=text))
    if not has_secret(job):
        return
    facts = created["metadata"]
    owner = {"apiVersion": created["apiVersion"], "kind": created["kind"], "name": facts["name"], "uid": facts["uid"]}
    metadata = {key: facts[key] for key in ("name", "namespace") if key in facts}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "ownerReferences": [owner]},
        "immutable": True,
        "stringData": {JOB_SECRET_KEY: new_secret()},
    }
    try:
        _kubectl("create", "-f", "-", text=json.dumps(secret))
    except SchedulerError:
        _kubectl("delete", "-f", "-", text=text)
        raise


def _kubectl(*words: str, text: str) -> str:
    try:
        done = subprocess.run(["kubectl", *words], input=text or "", text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise SchedulerError("kubectl is not installed here: submit the output of --dry-run elsewhere") from error
    if done.returncode:
        raise SchedulerError(f"kubectl refused the job: {one_line(done.stderr)}")
    return done.stdout


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    with Problems() as findings:
        findings.attempt(_check_folders, job)
        name = findings.attempt(_draw_name, job) or "bigbatch"
        text = findings.attempt(manifest, job, name=name)
    missing = {"--cpus-per-rank": job.cpus_per_rank, "--memory": job.memory}
    if options := " and ".join(name for name, value in missing.items() if value is None):
        tell(
            f"warning: without {options} the pods request none: Kubernetes may place them on a busy node, and ends "
            "them first if its memory is full"
        )
    return text or ""


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    name = _draw_name(job)
    _submit(job, manifest(job, name=name))
    print_lines(f"job {name}; its output:\n  {_logs_command(job, name=name)}")
    return 0


LAUNCHER = Launcher(
    default_ranks="--nodes times --ranks-per-node",
    environment_help="none",
    example="--nodes 4 --ranks-per-node 8 --image registry/bigbatch --mount data:/data:ro --mount runs:/runs -- "
    "train --config imagenet/resnet50_32k --data.root /data/imagenet --run.directory /runs/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    visible="none",
    site_table="k8s",
    queue="kubectl get jobset shows its jobs, and kubectl delete jobset NAME ends one, which saves first",
)
