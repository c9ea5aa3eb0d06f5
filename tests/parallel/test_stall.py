"""Law 7: who is late is named on all ranks, first as a warning, then as the end of the job."""

import re

import pytest
from test_lost_rank import finish, start_ranks

WARNED = r"rank {rank} on node{node} has waited [\d.]+ s in all-reduce of buffer 0 \(1\.bias and 3 .*\): (.*) \(the job"
NAMED = "rank 1 on node0 has not come to it"


def run(*arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of three ranks; the late one is ended once all others are."""
    return finish(start_ranks(3, list(arguments), target="ranks_stall:main"), victim=1, timeout_seconds=60)


def test_a_late_rank_is_named_by_all_and_the_job_goes_on() -> None:
    results = run("tcp", "4", "30")
    for rank, node in ((0, 0), (2, 1)):
        code, output = results[rank]
        assert code == 0, output
        found = re.findall(WARNED.format(rank=rank, node=node), output)
        assert found == [NAMED], output
    late = results[1][1]
    assert "rank 1 on node0 is late: other ranks wait for it in all-reduce of buffer 0 (1.bias and 3 more" in late, late


@pytest.mark.long
def test_a_rank_that_does_not_come_ends_the_job() -> None:
    results = run("tcp", "600", "4")
    for rank, node in ((0, 0), (2, 1)):
        code, output = results[rank]
        assert code == 7, output
        assert re.findall(WARNED.format(rank=rank, node=node), output) == [NAMED], output
        assert re.search(f"ended: rank {rank}: all-reduce of buffer 0 .* no answer from rank 1 on node0", output), (
            output
        )
