"""Which hosts of a job are fit, as a preflight wrote it, and which still answer."""

import operator
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from ipaddress import ip_address
from pathlib import Path

from bigbatch.errors import LaunchOptionError
from bigbatch.files import write_named
from bigbatch.launch.jobs.check import most_ranks
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec
from bigbatch.trainer.config.options import FLAGS
from bigbatch.trainer.run.folder import writing


def preflight_command(command: Sequence[str], *options: str) -> tuple[str, ...]:
    """Return what checks the hosts for `train ...`: its experiment is looked at, too; other commands have none."""
    experiment = command[1:] if command[:1] == ("train",) else ()
    return ("preflight", *options, *(word for word in experiment if word not in FLAGS))


def preflight_of(job: JobSpec) -> JobSpec:
    """Return the job that looks at the hosts of another; of an own script, at no experiment."""
    return replace(job, command=preflight_command(() if job.is_python else job.command), is_python=False)


def choose_launcher(job: JobSpec) -> str:
    """Return slurm where anything is asked of a scheduler, else mpirun."""
    asked = [field for field in fields(JobSpec) if field.name in (*SCHEDULED, "num_nodes")]
    return "slurm" if any(getattr(job, field.name) != field.default for field in asked) else "mpirun"


def without(job: JobSpec, bad: Sequence[str]) -> JobSpec:
    """Return the job on its other hosts. Raises: LaunchOptionError where they have too few slots, or cannot be told."""
    hosts = fit_hosts(job.hosts, bad=bad)
    slots = sum(count for _, count in hosts)
    if not hosts or slots < job.num_ranks:
        raise LaunchOptionError(
            f"without {', '.join(bad)} there are {slots} slots for {job.num_ranks} ranks: name more --hosts, or state "
            "fewer --ranks"
        )
    return replace(job, hosts=hosts)


def write_hostfile(path: Path, hosts: Sequence[tuple[str, int]], *, bad: Sequence[str]) -> None:
    """Write a hostfile of the fit hosts. Raises: RunFolderError; LaunchOptionError where they cannot be told."""
    lines = [f"{host} slots={slots}\n" for host, slots in fit_hosts(hosts, bad=bad)]
    with writing(path):
        write_named(path, "".join(lines).encode())


def fit_hosts(hosts: Sequence[tuple[str, int]], *, bad: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return those that are no bad nodes. Raises: LaunchOptionError where a bad node cannot be told among them."""
    unfit = {_find_host(name, [host for host, _ in hosts]) for name in bad if hosts}
    return tuple((host, slots) for host, slots in hosts if host not in unfit)


def _find_host(name: str, hosts: Sequence[str]) -> str:
    """Return the stated host that a node is, whose ranks call it by that name."""
    ways: tuple[Callable[[str, str], bool], ...] = (operator.eq, _same_label, _same_address)
    for is_same in ways:
        found = {host for host in hosts if is_same(host, name)}
        if len(found) == 1:
            return found.pop()
    raise LaunchOptionError(
        f"--hosts: it cannot be told which of them is the unfit node {name}: leave it out yourself, or state each by "
        "the name that `hostname` prints there"
    )


def _same_label(a: str, b: str) -> bool:
    """Say whether n1 is n1.cluster; the dots of an address mean something else."""
    return not (_is_address(a) or _is_address(b)) and a.partition(".")[0] == b.partition(".")[0]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _same_address(a: str, b: str) -> bool:
    return bool(_addresses(a) & _addresses(b))


def _addresses(host: str) -> set[str]:
    """Resolve it as this host does, without loopback, which is another host everywhere; none for an unknown name."""
    try:
        found = {str(where[0]) for *_, where in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError: too long for a name
        return set()
    return {address for address in found if not ip_address(address).is_loopback}


def on_hosts_left(job: JobSpec, *, answers: Callable[[str], bool]) -> JobSpec:
    """Return the job on those of its hosts that answer, with as many of its ranks as can share its batch there.

    Batch, order of samples and ghost batches stay: the ranks that are left do more each.
    Raises: LaunchOptionError where no ranks can.
    """
    if not job.hosts:
        return job
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        is_there = list(pool.map(answers, [host for host, _ in job.hosts]))
    hosts = tuple(each for each, is_up in zip(job.hosts, is_there, strict=True) if is_up)
    if hosts == job.hosts:
        return job
    slots = sum(count for _, count in hosts)
    ranks = most_ranks(job, limit=min(job.num_ranks, slots))
    if ranks is None:
        lost = ", ".join(host for host, _ in job.hosts if host not in dict(hosts))
        raise LaunchOptionError(
            f"{lost}: no answer, and the batch has no room for {slots} rank(s) or fewer, on the hosts that are left: "
            "the same command goes on when they are back"
        )
    return replace(job, hosts=hosts, num_ranks=ranks)
