"""Law 7: who is late is named on all ranks, first as a warning, then as the end of the job."""

import re
import time
from pathlib import Path

import pytest
from test_lost_rank import Ranks, finish, start_ranks

WARNED = (
    r"rank {rank} on node{node} has waited [\d.]+ s in all-reduce of buffer 0 \(1\.bias and 3 .*\): "
    r"(.*) ha(?:s|ve) not come to it \(the job"
)
LATE = "rank 1 on node0"
OTHERS = {0: "rank 0 on node0", 2: "rank 2 on node1"}
IS_LATE = "rank 1 on node0 is late: other ranks wait for it in all-reduce of buffer 0 (1.bias and 3 more"


def start(until: Path, *, timeout_seconds: int) -> Ranks:
    """Three ranks, of which the late one waits for a file."""
    return start_ranks(3, ["tcp", str(until), str(timeout_seconds)], target="ranks_stall:main")


def end(ranks: Ranks) -> list[tuple[int, str]]:
    """Exit code and output of each; the late one is ended once all others are."""
    return finish(ranks, victim=1, timeout_seconds=120)


def assert_each_names_the_late(outputs: dict[int, str]) -> None:
    """Once, and never itself; where a busy machine makes one of them late, too, it finds the other one there."""
    named = {}
    for rank, output in outputs.items():
        (found,) = re.findall(WARNED.format(rank=rank, node=rank // 2), output)
        named[rank] = found
    assert LATE in named.values(), named
    assert named[0] in (LATE, f"{LATE}, {OTHERS[2]}"), named
    assert named[2] in (LATE, f"{OTHERS[0]}, {LATE}"), named


def test_a_late_rank_is_named_by_all_and_the_job_goes_on(tmp_path: Path) -> None:
    ranks = start(tmp_path / "come", timeout_seconds=120)
    words = {0: " has waited ", 1: IS_LATE, 2: " has waited "}
    deadline = time.monotonic() + 100
    while not all(said in ranks.read(rank) for rank, said in words.items()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "come").touch()
    results = end(ranks)
    assert [code for code, _ in (results[0], results[2])] == [0, 0], results
    assert_each_names_the_late({rank: results[rank][1] for rank in OTHERS})
    assert IS_LATE in results[1][1], results[1][1]


@pytest.mark.long
def test_a_rank_that_does_not_come_ends_the_job(tmp_path: Path) -> None:
    results = end(start(tmp_path / "never", timeout_seconds=10))
    assert_each_names_the_late({rank: results[rank][1] for rank in OTHERS})
    for rank in OTHERS:
        code, output = results[rank]
        assert code == 7, output
        ended = f"ended: rank {rank}: all-reduce of buffer 0 .* no answer from rank 1 on node0"
        assert re.search(ended, output), output
