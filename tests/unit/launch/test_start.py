"""Argument lists as pure functions, word by word; the foreground runner's exit codes and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.launch.jobs.spec import JobSpec, make_job, parse_hosts
from bigbatch.launch.launchers.mpirun import mpirun_argv
from bigbatch.launch.launchers.torchrun import torchrun_argv
from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")


def test_mpirun_on_this_host() -> None:
    assert mpirun_argv(JobSpec(TRAIN, 2)) == [
        *("mpirun", "-n", "2", "--bind-to", "none", "--map-by", "slot"),
        *("-x", "BIGBATCH_TERMINAL_COLUMNS=0", sys.executable, "-m", "bigbatch", *TRAIN),
    ]


def test_mpirun_across_hosts_as_root_with_too_few_cores() -> None:
    job = JobSpec(TRAIN, 16, hosts=(("n0", 8), ("n1", 8)), oversubscribe=True)
    assert mpirun_argv(job, mpirun="/opt/mpirun", is_root=True, terminal_columns=80) == [
        *("/opt/mpirun", "-n", "16", "--bind-to", "none", "--map-by", "slot", "--allow-run-as-root"),
        *("--host", "n0:8,n1:8", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"),
        *("-x", "BIGBATCH_TERMINAL_COLUMNS=80", sys.executable, "-m", "bigbatch", *TRAIN),
    ]


def test_mpirun_passes_variables_of_the_transports_to_other_hosts() -> None:
    variables = ("PATH", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOME", "MASTER_ADDR")
    argv = mpirun_argv(JobSpec(TRAIN, 2, hosts=(("n0", 1), ("n1", 1))), variables=variables)
    first = argv.index("-x")
    assert argv[first : first + 7 : 2] == ["-x"] * 4
    assert argv[first + 1 : first + 6 : 2] == ["GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_SOCKET_IFNAME"]
    assert "NCCL_SOCKET_IFNAME" not in mpirun_argv(JobSpec(TRAIN, 2), variables=variables), "inherited on this host"


def test_torchrun_on_this_host() -> None:
    assert torchrun_argv(JobSpec(TRAIN, 4)) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("-m", "bigbatch", *TRAIN),
    ]


def test_torchrun_takes_no_hosts() -> None:
    with pytest.raises(LaunchOptionError, match="--hosts"):
        torchrun_argv(JobSpec(TRAIN, 4, hosts=(("n0", 4),)))


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


def test_launch_of_nothing_is_refused() -> None:
    with pytest.raises(LaunchOptionError, match="nothing to start"):
        make_job((), num_ranks=1, hosts=(), num_cores=2)


def test_launch_dry_run_prints_a_line_that_a_shell_takes_apart_again(capsys: pytest.CaptureFixture[str]) -> None:
    folder = 'runs/it\'s; $(touch x) "here"'
    assert main(["torchrun", "--ranks", "2", "--dry-run", "--", *TRAIN, "--run.directory", folder]) == 0
    printed = capsys.readouterr().out
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {printed}"], capture_output=True, text=True, check=True)
    assert words.stdout.splitlines()[-1] == folder


def in_foreground(argv: list[str]) -> int:
    return run_in_foreground(argv, environ=os.environ, asks_to_stop=signal.SIGUSR1).code


def test_foreground_exit_codes_pass_through() -> None:
    assert in_foreground([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert in_foreground([sys.executable, "-c", killed]) == 128 + signal.SIGKILL


def test_foreground_launcher_that_is_missing_names_the_extra() -> None:
    with pytest.raises(LaunchOptionError, match=r"pip install 'bigbatch\[mpi\]'"):
        in_foreground(["no-such-mpirun"])


PARENT = """
import signal
import sys
from bigbatch.launch.jobs.foreground import run_in_foreground
import os
argv = [sys.executable, "-c", sys.argv[1]]
ended = run_in_foreground(argv, environ=os.environ, asks_to_stop=signal.SIGUSR1)
print("asked" if ended.was_asked else "by itself", flush=True)
sys.exit(ended.code)
"""
CHILD = """
import signal, sys, time
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("disposition", "num_interrupts"), [(signal.SIG_DFL, 1), (signal.SIG_IGN, 2)])
def test_foreground_takes_a_closed_terminal_for_a_ctrl_c_except_under_nohup(
    disposition: int, num_interrupts: int
) -> None:
    """What asks must not end the launcher, and the second that asks ends the job."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, disposition),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGHUP, *[signal.SIGINT] * num_interrupts):
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(0.3)
    assert process.wait(timeout=20) == 5
    assert process.stdout.read() == "SIGUSR1\nSIGTERM\nasked\n"


def test_foreground_first_ctrl_c_asks_and_second_ends(tmp_path: Path) -> None:
    """The whole process group gets SIGINT, as from a terminal; the child must hear SIGUSR1, then SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "SIGUSR1\n"
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "SIGTERM\n"
    assert process.wait(timeout=20) == 5
