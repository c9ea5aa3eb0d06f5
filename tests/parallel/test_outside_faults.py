"""Campaigns of faults outside of a job's own processes: 40 drawn ones of each kind, some here, all of them weekly.

The seed of a fault is its number; `pytest -k "silent and 17"` repeats one.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_ranks import exit_codes
from small_sweep import write as write_sweep

from bigbatch.errors import LOST
from tests.laws.jobs import TIMEOUT_SECONDS, Forked, ForkedJob, assert_identical, final_state, records
from tests.laws.jobs import train_command as command_of
from tests.parallel.test_healing import HEALING, LIMITS, data, undisturbed

__all__ = ("data", "undisturbed")
pytestmark = pytest.mark.long

NUM_FAULTS = 40
DISTURBED = "tests.parallel.disturbed:bigbatch"
PLAIN = {**HEALING, **LIMITS, "comm.meeting_seconds": 8}
END_SECONDS = 100.0
"""Time within which the ranks that are left end: the time limits of some waits, on a machine that others use."""


def seeds(*few: int) -> list[Any]:
    """Return the numbers of all faults of a campaign; all but few are weekly."""
    marked = [pytest.param(seed, marks=[] if seed in few else [pytest.mark.weekly]) for seed in range(NUM_FAULTS)]
    return sorted(marked, key=lambda each: len(each.marks))


def start(command: list[str], num_ranks: int, log: Path, fault: dict[str, Any], **environ: str) -> ForkedJob:
    return ForkedJob(Forked(tuple(command), num_ranks, DISTURBED), log, FAULT=json.dumps(fault), **environ)


def end_of(ranks: Sequence[BaseProcess], log: Path, fault: object, *, seconds: float = END_SECONDS) -> list[int]:
    """Wait for the ranks of a job, none of which may hang or print a traceback; return their exit codes."""
    codes, said = exit_codes(ranks, timeout_seconds=seconds), log.read_text()
    assert codes is not None, f"{fault}\n{said}"
    assert "Traceback" not in said, f"{fault}\n{said}"
    return codes


@pytest.mark.parametrize("seed", seeds(3))
def test_peer_that_is_silent_after_the_right_secret_ends_the_others_in_time(
    seed: int, data: Path, tmp_path: Path
) -> None:
    """It sends a part of any message from the rendezvous on, to the store or to another rank."""
    draw = random.Random(f"silent {seed}")
    victim, then = draw.randrange(3), draw.choice(("stop", "sleep", "close"))
    options = {"at": draw.randint(1, 90), "share": draw.choice((0.0, 0.5, 0.9)), "then": then}
    settings = {**PLAIN, "run.heal": "restart", "optimizer.loss": "cross_entropy", "comm.backend": "tcp"}
    fault = {"kind": "cut_message", "rank": victim, "options": options}
    log = tmp_path / "log"
    job = start(command_of(data, tmp_path / "run", settings), 3, log, fault)
    others = [rank for number, rank in enumerate(job.ranks) if number != victim]
    codes, said = end_of(others, log, fault), log.read_text()
    job.ranks[victim].kill()
    assert codes in ([0, 0], [LOST, LOST]), f"{fault} {codes}\n{said}"
    assert codes == [0, 0] or f"rank {victim}" in said, f"{fault}\n{said}"


@pytest.mark.parametrize("seed", seeds(1))
def test_joining_rank_that_stops_in_the_midst_changes_nothing(
    seed: int, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Over tcp, and over NCCL, which gloo plays."""
    draw = random.Random(f"joining {seed}")
    lost, step = draw.randrange(3), draw.randint(2, 4)
    options = {
        "at": draw.randint(1, 50),
        "share": draw.choice((0.0, 0.5)),
        "then": draw.choice(("stop", "stop", "close")),
    }
    fault = {"kind": "cut_message", "rank": lost, "joins": True, "options": options}
    is_nccl = seed % 2 == 0
    settings = {**PLAIN, "comm.timeout_seconds": 8, **({} if is_nccl else {"comm.backend": "tcp"})}
    log, run = tmp_path / "log", tmp_path / "run"
    variables = {"PACE": "0.4", "DIE": f"{lost}/{step}/forward", **({"NCCL": "1"} if is_nccl else {})}
    job = start(command_of(data, run, settings), 3, log, fault, **variables)
    joining = job.join_again(lost)
    others = [rank for number, rank in enumerate(job.ranks) if number != lost]
    codes = end_of(others, log, fault)
    joining.kill()
    assert codes == [0, 0], f"{fault} {codes}\n{log.read_text()}"
    assert_identical(final_state(run), final_state(undisturbed))


@pytest.mark.parametrize("seed", seeds(5))
def test_clock_that_jumps_during_healing_changes_nothing(
    seed: int, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    draw = random.Random(f"clock {seed}")
    lost, step = draw.randrange(3), draw.randint(2, 9)
    where = draw.choice(("forward", "sums", "update"))
    fault = {"kind": "jump_clock", "rank": None, "options": {"seed": seed}}
    log, run = tmp_path / "log", tmp_path / "run"
    joins = draw.random() < 0.5
    variables = {"DIE": f"{lost}/{step}/{where}", "PACE": "0.4" if joins else "0.05"}
    job = start(command_of(data, run, PLAIN | {"comm.backend": "tcp"}), 3, log, fault, **variables)
    if joins:
        job.ranks.append(job.join_again(lost))
    codes = end_of(job.ranks, log, fault, seconds=TIMEOUT_SECONDS)
    expected = [-signal.SIGKILL if rank == lost else 0 for rank in range(3)] + [0] * joins
    assert codes == expected, f"{codes}\n{log.read_text()}"
    assert_identical(final_state(run), final_state(undisturbed))
    assert json.loads((run / "summary.json").read_text())["seconds"] < TIMEOUT_SECONDS


@pytest.mark.parametrize("seed", seeds(4))
def test_two_hosts_with_one_run_folder_without_locks_train_it_once(
    seed: int, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Each is one process; in some cases one is stopped for longer than an owner may be silent, and wakes."""
    draw = random.Random(f"folder {seed}")
    stops = [(draw.uniform(0.5, 3.0), draw.uniform(0.5, 6.0)) if draw.random() < 0.6 else None for _ in range(2)]
    pauses = [0.0, draw.choice((0.0, draw.uniform(0, 1.5)))]
    run = tmp_path / "run"
    settings = {**PLAIN, "run.checkpoint_every_steps": 2, "optimizer.loss": "cross_entropy", "run.heal": "restart"}
    jobs, logs = [], [tmp_path / "log0", tmp_path / "log1"]
    for number, (pause, stopped) in enumerate(zip(pauses, stops, strict=True)):
        time.sleep(pause)
        options = {"seed": seed, "host": f"n{number}", "stopped": stopped}
        fault = {"kind": "share_folder", "rank": None, "options": options}
        jobs.append(start(command_of(data, run, settings), 1, logs[number], fault, PACE="0.3"))
    ended = [end_of(job.ranks, log, stops, seconds=TIMEOUT_SECONDS) for job, log in zip(jobs, logs, strict=True)]
    assert [0] in ended, f"{stops} {pauses} {ended}"
    for code, log in zip(ended, logs, strict=True):
        assert code == [0] or "belongs to" in log.read_text(), f"{stops} {pauses} {ended}\n{log.read_text()}"
    assert_identical(final_state(run), final_state(undisturbed))
    assert {record["step"] for record in records(run, "train")} == set(range(1, 13))


def doors_of(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses at which a process and its descendants listen."""
    found = set()
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                listening = [c for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                found |= {(c.laddr.ip, c.laddr.port) for c in listening}
    return found


@contextmanager
def hostile_neighbour(pids: list[int], seed: int) -> Iterator[list[int]]:
    """A process of another user, which has no secret and sends what it likes to each open port; yields its counts."""
    draw, ends, count = random.Random(seed), threading.Event(), [0]
    kept: list[socket.socket] = []
    messages = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 4,
        b"\xff" * 16,
        b"bb01" + bytes(52),
        b"bb01" + b"\xff" * 20,
        os.urandom(65536),
    )

    def disturb() -> None:
        while not ends.wait(0.02):
            doors = set().union(*(doors_of(psutil.Process(pid)) for pid in pids if psutil.pid_exists(pid)))
            for door in doors:
                with suppress(OSError):
                    stream = socket.create_connection(door, timeout=0.5)
                    count[0] += 1
                    stream.settimeout(0.05)
                    with suppress(OSError):
                        stream.sendall(draw.choice(messages))
                    if draw.random() < 0.5:
                        kept.append(stream)
                    else:
                        stream.close()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield count
    finally:
        ends.set()
        thread.join()
        for each in kept:
            each.close()


@pytest.mark.parametrize("seed", seeds())
def test_neighbour_at_the_ports_of_comm_bench_and_of_a_sweep_changes_nothing(seed: int, tmp_path: Path) -> None:
    if seed % 2:
        path = write_sweep(tmp_path / "sweep.yaml", grid={"scaling": ["weak"], "ranks": [2]}, steps=5)
        words = ["sweep", str(path), "--folder", str(tmp_path / "sweep")]
    else:
        words = ["launch", "local", "--ranks", "2", "--", "comm", "bench", "--backend", "tcp", "--max-bytes", "64K"]
        words += ["--repetitions", "40"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "bigbatch", *words], stdout=log, stderr=log)
    with hostile_neighbour([process.pid], seed) as count:
        try:
            code = process.wait(timeout=120)
        finally:
            process.kill()
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert "Traceback" not in said, said
    assert "wrong values: 0" in said or seed % 2, said
    assert count[0] > 0
