"""Folders of a job whose pods take theirs with them: what is to outlive them lies in a mount."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from bigbatch.errors import ConfigError, LaunchOptionError
from bigbatch.launch.jobs.findings import Findings
from bigbatch.launch.jobs.run_folder import load_experiment, trained_run
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.trainer.config.schema import Config


def check_folders(job: JobSpec) -> None:
    """Refuse a run folder outside of the mounts, and data at a path that means something else in a pod.

    Pictures at an absolute path may come with the image. Raises: JobRefused.
    """
    with Findings() as findings:
        try:
            config = load_experiment(job)
        except ConfigError:  # refused elsewhere
            config = None
        if config is not None:
            findings.ask(_check_run, job, config.run.directory)
            findings.ask(_check_data, job, config)
        if (run := findings.ask(trained_run, job)) is not None:
            findings.ask(_check_trained, job, run)


def _check_trained(job: JobSpec, run: str) -> None:
    if _mount_of(job, run) is None:
        raise LaunchOptionError(f"{job.command[0]} {run}: pods see no such folder: name one below a --mount")


def _check_run(job: JobSpec, folder: str) -> None:
    name = PurePosixPath(folder).name
    mount = _mount_of(job, folder)
    if mount is None:
        raise LaunchOptionError(
            f"--run.directory {folder}: its checkpoints would end with the pods: {_example(job, 'runs', name=name)}"
        )
    if "ro" in mount.split(":")[2:]:
        raise LaunchOptionError(f"--run.directory {folder}: --mount {mount} is read only: leave out :ro there")


def _check_data(job: JobSpec, config: Config) -> None:
    root = config.data.root
    if not root.startswith("/"):
        raise LaunchOptionError(
            f"--data.root {root}: pods have no such work folder: {_example(job, 'data', name=PurePosixPath(root).name)}"
        )


def _mount_of(job: JobSpec, folder: str) -> str | None:
    """Return the mount that holds a folder, the innermost; None for none, and for a relative path."""

    def target(mount: str) -> PurePosixPath:
        return PurePosixPath(mount.split(":")[1])

    holding = [mount for mount in job.mounts if PurePosixPath(folder).is_relative_to(target(mount))]
    return max(holding, key=lambda mount: len(target(mount).parts), default=None)


def _example(job: JobSpec, what: str, *, name: str) -> str:
    """Say what to state instead: a folder below a mount that is there, or a mount, too."""
    option = f"--{'run.directory' if what == 'runs' else 'data.root'}"
    for target in _targets(job, writable=what == "runs"):
        return f"name one below a mount, such as {option} {target}/{name}"
    return f"mount a volume claim and name a folder there, such as --mount {what}:/{what} and {option} /{what}/{name}"


def _targets(job: JobSpec, *, writable: bool) -> Iterator[str]:
    for mount in job.mounts:
        _, target, *flags = mount.split(":")
        if not (writable and "ro" in flags):
            yield target.rstrip("/")
