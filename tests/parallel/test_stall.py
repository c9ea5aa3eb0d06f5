"""Law 7: a rank that is late is named on all ranks, as a warning (test_lost_rank.py has the end of the job)."""

import re
import time
from pathlib import Path

import torch
from patient_count import await_all_but
from test_lost_rank import finish, start_ranks
from torch import nn

from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.reducer import GradientReducer

WARNED = (
    r"rank {rank} on node{node} has waited [\d.]+ s in all-reduce of buffer 0 \(1\.bias and 3 .*\): "
    r"(.*) ha(?:s|ve) not started it \(the job"
)
LATE = "rank 1 on node0"
OTHERS = {0: "rank 0 on node0", 2: "rank 2 on node1"}
IS_LATE = "rank 1 on node0 is late: other ranks wait for it in all-reduce of buffer 0 (1.bias and 3 more"


def live(until: str) -> int:
    """What a rank does: train two steps; the late one waits for a file before the second one's backward."""
    torch.set_num_threads(1)
    await_all_but(1)
    communicator = connect(backend="tcp", warn_seconds=1.0, timeout_seconds=120)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    reducer = GradientReducer(model.named_parameters(), communicator)
    for step in range(2):
        while step == 1 and communicator.rank == 1 and not Path(until).exists():
            time.sleep(0.05)
        model(torch.ones(1, 4)).sum().backward()
        reducer.wait()
    communicator.close()
    return 0


def test_a_late_rank_is_named_by_all_and_the_job_goes_on(tmp_path: Path) -> None:
    """Once by each other rank; where a busy machine makes one of them late, too, the other one finds it there."""
    ranks = start_ranks(3, [str(tmp_path / "come")], target="test_stall:live")
    words = {0: " has waited ", 1: IS_LATE, 2: " has waited "}
    deadline = time.monotonic() + 100
    while not all(said in ranks.read(rank) for rank, said in words.items()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "come").touch()
    results = finish(ranks, victim=1, timeout_seconds=120)
    assert [code for code, _ in (results[0], results[2])] == [0, 0], results
    assert IS_LATE in results[1][1], results[1][1]
    named = {}
    for rank in OTHERS:
        (named[rank],) = re.findall(WARNED.format(rank=rank, node=rank // 2), results[rank][1])
    assert LATE in named.values(), named
    assert named[0] in (LATE, f"{LATE}, {OTHERS[2]}"), named
    assert named[2] in (LATE, f"{OTHERS[0]}, {LATE}"), named
