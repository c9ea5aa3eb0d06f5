"""Hosts and numbers of ranks that the options of a job state."""

from typing import Any

import pytest
from error_texts import naming

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.spec import make_job, parse_hosts
from bigbatch.launch.launchers.local import local_starts

TRAIN = ("train", "--config", "quickstart")


def test_launch_hosts() -> None:
    assert parse_hosts("n0:8,node-1.cluster:4,n2") == (("n0", 8), ("node-1.cluster", 4), ("n2", 1))


@pytest.mark.parametrize("text", ["", "n0:", "n0:0", "n0:x", "-x:1", "n0 n1", "n0;rm:1", "n0:1,", "$(id):1", "n\n:1"])
def test_launch_host_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchOptionError, match="HOST:RANKS"):
        parse_hosts(text)


def test_launch_ranks_default_to_the_slots_of_the_hosts() -> None:
    hosts = (("n0", 8), ("n1", 4))
    assert make_job(TRAIN, num_ranks=None, hosts=hosts, num_cores=2).num_ranks == 12
    assert make_job(TRAIN, num_ranks=None, hosts=(), num_cores=2).num_ranks == 1


def test_launch_ranks_beyond_the_cores_share_them() -> None:
    assert make_job(TRAIN, num_ranks=3, hosts=(), num_cores=2).oversubscribe
    assert not make_job(TRAIN, num_ranks=2, hosts=(), num_cores=2).oversubscribe
    assert not make_job(TRAIN, num_ranks=8, hosts=(("n0", 8),), num_cores=2).oversubscribe, "hosts state their slots"


@pytest.mark.parametrize(("ranks", "hosts"), [(0, ()), (-1, ()), (9, (("n0", 8),))])
def test_launch_ranks_that_cannot_be_are_refused(ranks: int, hosts: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(LaunchOptionError, match="--ranks"):
        make_job(TRAIN, num_ranks=ranks, hosts=hosts, num_cores=2)


@pytest.mark.parametrize(
    "stated",
    [{"num_ranks": 5_000_000}, {"num_nodes": 10**9}, {"hosts": (("n0", 10**8),)}, {"ranks_per_node": 10**7}],
)
def test_launch_ranks_that_no_cluster_has_are_refused_before_memory_is_taken_for_each(stated: dict[str, Any]) -> None:
    with pytest.raises(LaunchOptionError, match=r"ranks .*are more than any job has: state 1000000 or fewer"):
        make_job(TRAIN, **{"num_ranks": None, "hosts": (), "num_cores": 2, **stated})


def test_launch_local_refuses_ranks_that_no_host_can_run() -> None:
    job = make_job(TRAIN, num_ranks=900_000, hosts=(), num_cores=2)
    with pytest.raises(LaunchOptionError, match=naming("900000 ranks", "4096 or fewer")):
        local_starts(job, port=29500)


def test_launch_of_nothing_is_refused() -> None:
    with pytest.raises(LaunchOptionError, match=naming("-- train --config quickstart")):
        make_job((), num_ranks=1, hosts=(), num_cores=2)
