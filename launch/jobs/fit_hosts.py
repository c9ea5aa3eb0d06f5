"""Find the hosts of a job that a preflight found fit, and those that still answer."""

import operator
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path

from bigbatch.errors import LaunchOptionError
from bigbatch.files import write_named
from bigbatch.launch.jobs.check import largest_num_ranks
from bigbatch.launch.jobs.spec import SCHEDULER_FIELDS, JobSpec
from bigbatch.trainer.config.options import FLAGS
from bigbatch.trainer.folder.folder import writing
from bigbatch.words import count


def preflight_command(command: Sequence[str], *options: str) -> tuple[str, ...]:
    """Return the preflight command for a job's command; for `train` with its experiment."""
    experiment = command[1:] if command[:1] == ("train",) else ()
    return ("preflight", *options, *(word for word in experiment if word not in FLAGS))


def preflight_of(job: JobSpec) -> JobSpec:
    """Return the preflight job for another job; without an experiment for a user's script."""
    return replace(job, command=preflight_command(() if job.is_python else job.command), is_python=False)


def has_whole_preflight(job: JobSpec) -> bool:
    return job.preflight not in (None, "off")


def short_preflight_of(job: JobSpec) -> JobSpec | None:
    """Return the job that tests each node alone before another job, with one rank per node; None if it needs none.

    Without hosts and nodes, the job is of one rank. A job on the CPU, and a preflight, need no test.
    """
    is_preflight = not job.is_python and job.command[:1] == ("preflight",)
    if job.preflight is not None or job.device == "cpu" or is_preflight:
        return None
    # ranks fill the hosts in order; the fewest ranks of a host name no GPU that the job leaves to others
    ends = list(accumulate(slots for _, slots in job.hosts))
    ranks = [min(slots, job.num_ranks - end + slots) for (_, slots), end in zip(job.hosts, ends, strict=True)]
    used = [each for each in ranks if each > 0]
    words = ("--ranks", str(job.num_ranks), "--ranks-per-node", str(min(used, default=job.ranks_per_node)))
    hosts = tuple((host, 1) for host, _ in job.hosts[: len(used)])
    command = ("preflight", "--short", *words)
    return replace(
        job,
        command=command,
        is_python=False,
        hosts=hosts,
        num_ranks=len(hosts) or job.num_nodes or 1,
        preflight="off",
        restarts=None,
    )


def choose_launcher(job: JobSpec) -> str:
    """Return slurm if a request to a scheduler is stated, else mpirun."""
    asked = [field for field in fields(JobSpec) if field.name in (*SCHEDULER_FIELDS, "num_nodes")]
    return "slurm" if any(getattr(job, field.name) != field.default for field in asked) else "mpirun"


def without_hosts(job: JobSpec, bad: Sequence[str]) -> JobSpec:
    """Return the job on its other hosts. Raises: LaunchOptionError if they have too few slots or are unknown."""
    hosts = fit_hosts(job.hosts, bad=bad)
    slots = sum(count for _, count in hosts)
    if not hosts or slots < job.num_ranks:
        raise LaunchOptionError(
            f"without {', '.join(bad)} only {count(slots, 'slot')} would be left for {job.num_ranks} ranks: name more "
            "--hosts, or state fewer --ranks"
        )
    return replace(job, hosts=hosts)


def write_hostfile(path: Path, hosts: Sequence[tuple[str, int]], *, bad: Sequence[str]) -> None:
    """Write a hostfile of the fit hosts. Raises: RunFolderError; LaunchOptionError if they are unknown."""
    lines = [f"{host} slots={slots}\n" for host, slots in fit_hosts(hosts, bad=bad)]
    with writing(path):
        write_named(path, "".join(lines).encode())


def fit_hosts(hosts: Sequence[tuple[str, int]], *, bad: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the hosts that are not bad nodes. Raises: LaunchOptionError if a bad node matches none of them."""
    unfit = {_find_host(name, [host for host, _ in hosts]) for name in bad if hosts}
    return tuple((host, slots) for host, slots in hosts if host not in unfit)


def _find_host(name: str, hosts: Sequence[str]) -> str:
    for is_same in (operator.eq, _same_label, lambda a, b: bool(_addresses(a) & _addresses(b))):
        found = {host for host in hosts if is_same(host, name)}
        if len(found) == 1:
            return found.pop()
    raise LaunchOptionError(
        f"--hosts: none of them, or several, match the unfit node {name}: remove that host yourself, or name each "
        "host as `hostname` prints there"
    )


def _same_label(a: str, b: str) -> bool:
    """Return whether two names are one host, such as n1 and n1.cluster; addresses must be equal."""
    return not (_is_address(a) or _is_address(b)) and a.partition(".")[0] == b.partition(".")[0]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(host: str) -> set[str]:
    """Return the addresses of a name on this host, without loopback; none for an unknown name."""
    try:
        found = {str(where[0]) for *_, where in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError: too long for a name
        return set()
    return {address for address in found if not ip_address(address).is_loopback}


def on_remaining_hosts(job: JobSpec, *, answers: Callable[[str], bool]) -> JobSpec:
    """Return the job on its hosts that answer, with as many ranks as can share the batch.

    Batch, order of samples and ghost batches stay: the remaining ranks do more work each.
    Raises: LaunchOptionError if no number of ranks can share the batch.
    """
    if not job.hosts:
        return job
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        is_there = list(pool.map(answers, [host for host, _ in job.hosts]))
    hosts = tuple(each for each, is_up in zip(job.hosts, is_there, strict=True) if is_up)
    if hosts == job.hosts:
        return job
    slots = sum(count for _, count in hosts)
    ranks = largest_num_ranks(job, limit=min(job.num_ranks, slots))
    if ranks is None:
        lost = ", ".join(host for host, _ in job.hosts if host not in dict(hosts))
        raise LaunchOptionError(
            f"{lost}: no answer; the remaining hosts have {slots} slots, among which the batch cannot be divided: "
            "repeat the command when the lost hosts are back"
        )
    return replace(job, hosts=hosts, num_ranks=ranks)
