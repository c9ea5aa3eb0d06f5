"""Which hosts of a job still answer, and how many ranks they can have."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.check import most_ranks
from bigbatch.launch.jobs.spec import JobSpec


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
