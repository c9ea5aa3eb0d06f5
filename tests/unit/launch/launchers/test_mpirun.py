"""The argument list of mpirun, word by word."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bigbatch.errors import INTERRUPTED, LOST, LaunchOptionError
from bigbatch.launch.jobs import foreground, ranks_here, run_folder
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers import mpirun
from bigbatch.launch.launchers.mpirun import mpirun_argv
from bigbatch.launch.launchers.registry import load_launcher
from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")


Played = Callable[[str], None]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    """Put a program in the place of mpirun, in a work folder of its own."""

    def play(lines: str) -> None:
        (tmp_path / "mpirun").write_text("#!/bin/bash\n" + lines)
        (tmp_path / "mpirun").chmod(0o755)

    monkeypatch.setattr(mpirun, "find_mpirun", lambda: str(tmp_path / "mpirun"))
    monkeypatch.chdir(tmp_path)
    return play


def start(job: JobSpec) -> int:
    return load_launcher("mpirun").start(job, environ=os.environ, options=argparse.Namespace())


@pytest.mark.parametrize(
    ("rank", "code", "own"),
    [
        ("echo -n 130 > $file", 130, 130),
        ("echo -n 0 > $file", 0, 0),
        ("echo -n 130 > $file; exit 1", 1, 1),
        ("exit 130", 130, 130),
        # mpirun has lost the daemon of a node
        ("true", LOST, 0),
        ("echo -n begun > $file", LOST, LOST),
        ("echo -n 6 > $file; exec sleep 60", LOST, LOST),
        ("rm $file", 0, 0),
    ],
)
def test_mpirun_exit_code_is_the_first_ranks_where_its_own_is_0(
    rank: str, code: int, own: int, played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """own: that of an own script, which may record nothing."""
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.01)
    played(f"file=$BIGBATCH_STOPPED\n{rank}\n")
    assert start(JobSpec(TRAIN, 2)) == code
    assert start(JobSpec(("own.py",), 2, is_python=True)) == own
    elsewhere = JobSpec(TRAIN, 2, hosts=(("n9", 2),), preflight="off")
    assert start(elsewhere) == own, "it may not see the file"
    assert os.listdir(tmp_path) == ["mpirun"], "the file is gone"


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ("echo -n 0 > $file", 0),
        ("echo -n 'begun 1' > $file", LOST),
        ("rm $file", LOST),
        ("echo -n 0 > $file; exec sleep 60", 0),  # a rank that is stopped is left
    ],
)
def test_mpirun_ends_no_other_rank_of_a_job_that_heals_and_its_0_says_nothing(
    rank: str, code: int, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_folder, "REPORT_LOSS_SECONDS", 0.0)
    played(f'file=$BIGBATCH_STOPPED\n[[ "$*" == *recoverable,error-nonzero-status=0* ]] || exit 9\n{rank}\n')
    limits = ("--comm.timeout_seconds", "4", "--comm.warn_seconds", "1", "--data.patience_seconds", "1")
    job = JobSpec((*TRAIN, "--run.heal", "in_place", *limits), 2)
    assert start(job) == code


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("kill -INT $PPID; trap 'exit 1' TERM", INTERRUPTED),  # no rank can take SIGUSR1 yet; mpirun ends with 1
        ("trap 'exit 250' USR1; kill -INT $PPID", INTERRUPTED),  # it starts its daemons, and no rank has begun
        ("trap 'exit 1' USR1; echo -n begun > $BIGBATCH_STOPPED; kill -INT $PPID", 1),  # a rank fails while it saves
        # a request that came before the ranks ran
        ("trap : USR1; trap 'kill $!; exit 1' TERM; kill -INT $PPID; sleep 0.1; $RANK & wait; wait", INTERRUPTED),
    ],
)
def test_mpirun_whose_ranks_cannot_take_a_request_to_stop_yet_ends_at_once(
    script: str, code: int, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.05)
    monkeypatch.setenv("RANK", f"{sys.executable} -c __import__('time').sleep(99)")
    played(f"{script}\nfor i in $(seq 600); do sleep 0.1; done\n")
    assert start(JobSpec(TRAIN, 2)) == code


@pytest.mark.parametrize(("script", "code"), [("exit 1", LOST), ("echo -n begun > $BIGBATCH_STOPPED; exit 1", 1)])
def test_mpirun_that_starts_no_rank_on_the_remaining_hosts_has_lost_one(
    script: str, code: int, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host answered, and was gone when the job started again; an error of a rank that began still ends the job."""
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.05)
    played(script)
    hosts = tuple((name, 1) for name in (socket.gethostname(), "n1", "n2"))
    job = JobSpec(TRAIN, 3, hosts=hosts, preflight="off")
    fit = replace(job, num_ranks=2, hosts=hosts[:2])
    assert mpirun._run_until_hosts_return(fit, job=job, environ=os.environ).code == code
    assert start(job) == 1, "the first start fails with mpirun's own code and words"


def test_mpirun_in_a_folder_that_takes_no_file_leaves_codes_as_they_are(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played('[[ "$*" != *BIGBATCH_STOPPED* ]] && exit 130\n')
    monkeypatch.setattr(mpirun, "exit_path", lambda folder: folder / "none" / "file")
    assert start(JobSpec(TRAIN, 2)) == 130


LEFT = """\
mkfifo pipe
(OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE={} exec setsid sh -c 'echo $$ > left; exec sleep 600' > pipe &)
exec 3< pipe
until [ -s left ]; do sleep 0.01; done
{}
read -r line <&3   # like mpirun: until all have closed the ranks' output
rm pipe
exit {}
"""


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("record", "own", "code", "lives"),
    [
        ("echo -n 0 > $BIGBATCH_STOPPED", 9, 0, True),
        ("echo -n 3 > $BIGBATCH_STOPPED", 9, 3, True),
        ("", 0, 0, False),  # only mpirun knows how the ranks of a script ended that never connected
        ("", 137, 137, False),
    ],
)
def test_mpirun_does_not_wait_for_processes_that_the_ranks_left_behind(
    record: str, own: int, code: int, lives: bool, played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ranks_here, "LOOKS", 2)
    played(LEFT.format(2, record, own))
    try:
        assert start(JobSpec(("own.py",), 2, is_python=True)) == code
        program = Path("/proc", (tmp_path / "left").read_text().strip(), "exe")
        deadline = time.monotonic() + 20  # its pipe is closed before it has ended
        while program.exists() != lives:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="reads /proc")
@pytest.mark.parametrize(("num_here", "code"), [(2, 0), (1, 9)])
def test_mpirun_does_not_wait_for_left_processes_with_other_variables_if_all_ranks_were_here(
    num_here: int, code: int, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ranks_here, "LOOKS", 2)
    rank = f"OMPI_COMM_WORLD_RANK=0 {sys.executable} -S -c 'import time; time.sleep(0.2)' &\n"
    left = "mkfifo pipe\n(env -i sleep 1 > pipe &)\nread -r line < pipe"
    played(f"{rank * num_here}wait\necho -n 0 > $BIGBATCH_STOPPED\n{left}\nexit 9\n")
    assert start(JobSpec(("own.py",), 2, is_python=True)) == code


def test_mpirun_waits_for_ranks_of_other_hosts(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks here have ended first; processes of theirs live on."""
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ranks_here, "LOOKS", 2)
    end = "(sleep 0.5; kill $(cat left)) & disown"
    played(LEFT.format(1, f"echo -n 0 > $BIGBATCH_STOPPED; (sh -c '{end}' &)", 9))
    assert start(JobSpec(("own.py",), 2, is_python=True)) == 9


KILLED = """
import os, signal, sys
from bigbatch.cli import main
from bigbatch.launch.launchers import mpirun, torchrun
def killed(*args, **options):
    print(os.listdir(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
mpirun.run_in_foreground = torchrun.run_in_foreground = killed
main(["launch", sys.argv[1], "--python", "--", "own.py"])
"""


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_launcher_that_is_killed_before_it_has_started_anything_leaves_no_file(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, launcher],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert {"mpirun": ".stopped-", "torchrun": "bigbatch-torchrun-"}[launcher] in done.stdout
    deadline = time.monotonic() + 20
    while os.listdir(tmp_path) != ["own.py"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


ON_TWO_HOSTS = (
    *("mpirun", "--hosts", "n0:1,n1:1", "--preflight", "off", "--restarts", "1", "--"),
    *(*TRAIN, "--run.directory", "run"),
)
HOSTS = """\
# n1 is away while there is a file of its name; a job with its ranks dies, and it is away then
echo "$*" >> {folder}/calls
case "$*" in
  *"--host n1:1"*" true") [ ! -e {folder}/n1 ] ;;
  *" true") ;;
  *"--host n0:1,n1:1"*) [ -e {folder}/again ] && exit 0; touch {folder}/n1 {folder}/again; exit 1 ;;
  *) trap 'exit 130' USR1; rm {folder}/n1; for i in $(seq 600); do sleep 0.1; done; exit 9 ;;
esac
"""


def test_mpirun_goes_on_with_the_hosts_left_and_grows_when_one_is_back(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played(HOSTS.format(folder=tmp_path))
    monkeypatch.setattr(foreground, "MORE_HOSTS_SECONDS", 0.2)
    assert main(ON_TWO_HOSTS) == 0
    started = [line for line in (tmp_path / "calls").read_text().splitlines() if not line.endswith(" true")]
    assert [line.split("--host ")[1].split()[0] for line in started] == ["n0:1,n1:1", "n0:1", "n0:1,n1:1"]
    assert "with 1 of 2 ranks" in capfd.readouterr().err


BUSY = """\
# n1 is away from the first loss on; n0 starts nothing either while the job runs there, as a host that is busy
case "$*" in
  *"--host n1:1"*" true") exit 1 ;;
  *" true") [ ! -e {folder}/runs ] || {{ touch {folder}/asked; exit 1; }} ;;
  *"--host n0:1,n1:1"*) exit 137 ;;
  *) touch {folder}/runs; for i in $(seq 600); do sleep 0.1; [ -e {folder}/asked ] && break; done; sleep 1
     touch {folder}/done ;;
esac
"""


def test_mpirun_leaves_a_job_alone_whose_hosts_do_not_answer_while_it_runs(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only more hosts are asked for: what is wrong with those that it has, it says itself."""
    played(BUSY.format(folder=tmp_path))
    monkeypatch.setattr(foreground, "MORE_HOSTS_SECONDS", 0.2)
    assert main(ON_TWO_HOSTS) == 0
    assert (tmp_path / "asked").exists()
    assert (tmp_path / "done").exists()


def test_mpirun_counts_a_host_that_hangs_as_lost(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    played('[[ "$*" == *" true" ]] || exit 137\nexec sleep 600\n')
    monkeypatch.setattr(mpirun, "ANSWER_SECONDS", 0.3)
    job = JobSpec(("own.py",), 2, hosts=(("n0", 1), ("n1", 1)), is_python=True, restarts=1)
    with pytest.raises(LaunchOptionError, match="n0, n1"):
        start(job)


def test_mpirun_ranks_on_this_host_inherit_variables() -> None:
    assert "NCCL_SOCKET_IFNAME" not in mpirun_argv(JobSpec(TRAIN, 2), variables=("NCCL_SOCKET_IFNAME",))


def test_mpirun_across_hosts_as_root_with_too_few_cores() -> None:
    job = JobSpec(TRAIN, 16, hosts=(("n0", 8), ("n1", 8)), oversubscribe=True)
    assert mpirun_argv(job, mpirun="/opt/mpirun", is_root=True, terminal_columns=80) == [
        *("/opt/mpirun", "-n", "16", "--stdin", "none", "--bind-to", "none", "--map-by", "slot", "--allow-run-as-root"),
        *("--host", "n0:8,n1:8", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"),
        *("-x", "PYTHONSAFEPATH", "-x", "BIGBATCH_TERMINAL_COLUMNS=80", sys.executable, "-m", "bigbatch", *TRAIN),
    ]
