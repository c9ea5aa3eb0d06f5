"""Law 7: a rank that dies or stalls ends the job within a stated time, and the survivors say which one it was.

The ranks are forked, with torchrun's variables, so that no launcher ends the survivors first.
"""

import re
import signal
import tempfile
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from forked_ranks import exit_codes, places, start_rank

SURVIVED = 7
NOTICE_SECONDS = 45
"""Some seconds are enough, unless the machine is slow; less than the time limit of 60 s, which is not to be needed."""
NOTICED = re.compile(
    r"noticed after ([\d.]+) s: rank (\d): buffer \d of step [12] failed after [\d.]+ s; (.*) \((\w+): "
)


@dataclass(frozen=True)
class Ranks:
    """Processes, and the folder of their outputs."""

    processes: list[BaseProcess]
    folder: "tempfile.TemporaryDirectory[str]"

    def output(self, rank: int) -> Path:
        """What a rank prints to."""
        return Path(self.folder.name) / str(rank)

    def read(self, rank: int) -> str:
        """What it has printed so far."""
        return self.output(rank).read_text() if self.output(rank).exists() else ""


def start_ranks(num_ranks: int, arguments: list[str], *, target: str = "ranks:main") -> Ranks:
    """One process per rank; two to a host: ranks 0 and 1 play node0."""
    ranks = Ranks([], tempfile.TemporaryDirectory())
    for rank, place in enumerate(places(num_ranks)):
        environ = {**place, "OMP_NUM_THREADS": "1", "BIGBATCH_HOST": f"node{rank // 2}"}
        output = ranks.output(rank)
        ranks.processes.append(start_rank(target, arguments, environ=environ, stdout=output, stderr=output))
    return ranks


def finish(ranks: Ranks, *, timeout_seconds: float, victim: int) -> list[tuple[int, str]]:
    """Exit code and output of each rank; the victim is ended once all others are."""
    survivors = [process for rank, process in enumerate(ranks.processes) if rank != victim]
    try:
        codes = exit_codes(survivors, timeout_seconds=timeout_seconds)
    finally:
        ranks.processes[victim].kill()
    with ranks.folder:
        outputs = [ranks.output(rank).read_text() for rank in range(len(ranks.processes))]
    if codes is None:
        pytest.fail(f"a rank did not end within {timeout_seconds} s; what they said: {outputs}", pytrace=False)
    ended = exit_codes([ranks.processes[victim]], timeout_seconds=10)
    assert ended is not None
    codes[victim:victim] = ended
    return list(zip(codes, outputs, strict=True))


HOLDER = "the job's key-value store, which runs beside rank 0"


@pytest.mark.parametrize(
    ("num_ranks", "backend", "algorithm", "victim", "how", "timeout", "named"),
    [
        # rank 3 has no connection to rank 1 in a ring: it must neither wait for its own timeout nor be taken for lost
        pytest.param(4, "gloo", "ring", 1, "kill", 60, "rank 1 on node0", marks=pytest.mark.long),
        (3, "gloo", "native", 0, "kill", 60, HOLDER),
        # the process beside rank 0, which runs the store, still answers
        pytest.param(3, "tcp", "ring", 0, "stop", 10, "rank 0 on node0", marks=pytest.mark.long),
        # the stall is inside a group of its own, whose timeout must be the job's
        pytest.param(3, "gloo", "doubling", 1, "stop", 10, "rank 1 on node0", marks=pytest.mark.long),
        pytest.param(3, "tcp", "hierarchical", 0, "kill", 60, HOLDER, marks=pytest.mark.long),
        # ranks 2 and 3 share no memory with rank 1, and no rank tells rank 3 that it waits
        (4, "tcp", "sharded", 1, "stop", 10, "rank 1 on node0"),
    ],
)
def test_survivors_name_the_lost_rank(
    num_ranks: int, backend: str, algorithm: str, victim: int, how: str, timeout: int, named: str
) -> None:
    ranks = start_ranks(num_ranks, ["lose", backend, algorithm, str(victim), how, str(timeout)])
    results = finish(ranks, victim=victim, timeout_seconds=150)
    assert results[victim][0] == -signal.SIGKILL, results[victim][1]
    for rank, (code, output) in enumerate(results):
        if rank == victim:
            continue
        assert code == SURVIVED, f"rank {rank} ended with {code}:\n{output}"
        match = NOTICED.search(output)
        assert match, output
        seconds, said_by, reason, library = float(match[1]), int(match[2]), match[3], match[4]
        assert (said_by, library) == (rank, backend)
        # what its library says of a dead peer may come before the end of the rendezvous that it held
        named_as = {named, "rank 0 on node0"} if named == HOLDER else {named}
        assert reason.removeprefix("no answer from ") in named_as, output
        detection = timeout if how == "stop" else 0
        assert seconds < detection + NOTICE_SECONDS, output


def operation_without_rank_1(rank: int, code: int, output: str) -> str:
    """What a survivor was in when it noticed, before its time limit of 60 s, that rank 1 is gone."""
    assert code == SURVIVED, f"rank {rank} ended with {code}:\n{output}"
    match = re.search(rf"noticed after ([\d.]+) s: rank {rank}: (.*) failed after", output)
    assert match, output
    assert float(match[1]) < NOTICE_SECONDS, output
    assert "no answer from rank 1 on node0" in output
    return match[2]


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.long)])
def test_a_rank_lost_between_two_norm_layers_is_named_by_its_group_and_the_others(where: str) -> None:
    ranks = start_ranks(4, ["norm", "tcp", where, "60"])
    results = finish(ranks, victim=1, timeout_seconds=150)
    operations = {rank: operation_without_rank_1(rank, *results[rank]) for rank in (0, 2, 3)}
    assert operations[0] == "gather of batch-norm statistics over ranks 0 to 1"


@pytest.mark.long
def test_a_rank_lost_while_weights_are_gathered_is_named_by_the_next_forward() -> None:
    results = finish(start_ranks(3, ["gather", "gloo", "60"]), victim=1, timeout_seconds=150)
    for rank in (0, 2):
        assert re.fullmatch(r"all-gather of weights \d+", operation_without_rank_1(rank, *results[rank]))
