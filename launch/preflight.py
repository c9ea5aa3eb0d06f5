"""`bigbatch launch preflight`: start `bigbatch preflight` on the hosts of a job; what a job does about its answer."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from bigbatch.launch.job import SCHEDULED, JobSpec
from bigbatch.trainer.errors import ConfigError
from bigbatch.trainer.rundir import writing

UNFIT = 4
"""Exit code of a preflight that found something; bigbatch.trainer.preflight.command has the same."""

CHOICES = ("warn", "stop", "exclude")


def preflight_command(command: Sequence[str], *options: str) -> tuple[str, ...]:
    """What checks the hosts for `train ...`: its experiment is looked at, too; other commands have none."""
    return ("preflight", *options, *(command[1:] if command[:1] == ("train",) else ()))


def choose_launcher(job: JobSpec) -> str:
    """slurm where anything is asked of a scheduler, else mpirun."""
    asked = [field for field in fields(JobSpec) if field.name in (*SCHEDULED, "num_nodes")]
    return "slurm" if any(getattr(job, field.name) != field.default for field in asked) else "mpirun"


def read_bad_nodes(path: Path) -> list[str]:
    """As a preflight wrote them; none where it did not come so far."""
    return path.read_text().split() if path.exists() else []


def without(job: JobSpec, bad: Sequence[str]) -> JobSpec:
    """The job on its other hosts. Raises: ConfigError where these have too few slots."""
    names = {name.partition(".")[0] for name in bad}
    hosts = tuple((host, slots) for host, slots in job.hosts if host.partition(".")[0] not in names)
    slots = sum(count for _, count in hosts)
    if not hosts or slots < job.num_ranks:
        raise ConfigError(
            f"without {', '.join(bad)} there are {slots} slots for {job.num_ranks} ranks: name more --hosts, or state "
            "fewer --ranks"
        )
    return replace(job, hosts=hosts)


def write_hostfile(path: Path, hosts: Sequence[tuple[str, int]], *, bad: Sequence[str]) -> None:
    """Of the fit hosts. Raises: RunFolderError."""
    names = {name.partition(".")[0] for name in bad}
    lines = [f"{host} slots={slots}\n" for host, slots in hosts if host.partition(".")[0] not in names]
    with writing(path):
        path.write_text("".join(lines))
