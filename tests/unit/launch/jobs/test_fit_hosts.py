"""What launchers make of preflight: which command looks, and with which hosts the job starts."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.fit_hosts import (
    choose_launcher,
    fit_hosts,
    without_hosts,
    write_hostfile,
)
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.spec import JobSpec

TRAIN = ("train", "--config", "quickstart")


def test_preflight_starts_by_the_launcher_of_the_job() -> None:
    assert choose_launcher(JobSpec(TRAIN, 2)) == "mpirun"
    assert choose_launcher(JobSpec(TRAIN, 2, hosts=(("n0", 2),))) == "mpirun"
    for asked in ({"num_nodes": 2}, {"partition": "gpu"}, {"minutes": 5}):
        assert choose_launcher(JobSpec(TRAIN, 2, **asked)) == "slurm"  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", ["0", "-10", "nan", "inf", "1e400"])
def test_preflight_is_not_submitted_with_a_link_of_no_rate(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "preflight", "--nodes", "2", "--link-gbit", rate, "--dry-run"])
    assert ended.value.code == 2
    assert f"argument --link-gbit: {rate} must be a positive number" in capsys.readouterr().err


def test_job_without_its_unfit_hosts() -> None:
    job = JobSpec(TRAIN, 4, hosts=(("n0.cluster", 2), ("n1.cluster", 2), ("n2.cluster", 2)))
    assert without_hosts(job, ["n1"]).hosts == (("n0.cluster", 2), ("n2.cluster", 2))
    with pytest.raises(LaunchOptionError, match=naming(" n0, n1 ", " 2 slots ", " 4 ranks", "--hosts", "--ranks")):
        without_hosts(job, ["n0", "n1"])
    with pytest.raises(LaunchOptionError, match=naming(" n0, n1, n2 ", " 0 slots")):
        without_hosts(replace(job, num_ranks=1), ["n0", "n1", "n2"])


ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.1.1")


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name -> address, as this host resolves it; addresses are their own."""
    known: dict[str, str] = {}

    def getaddrinfo(host: str, port: None) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in known and not host[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (known.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize(
    ("hosts", "known", "bad", "fit"),
    [
        (("n0", "n1.cluster", "n10"), {}, "n1", ("n0", "n10")),
        (("n0", "n1", "n10"), {}, "n1.cluster", ("n0", "n10")),
        (("n1.a", "n1.b"), {}, "n1.b", ("n1.a",)),
        (("n1.a", "n1.b"), {"n1": "10.0.0.1", "n1.a": "10.0.0.1", "n1.b": "10.0.0.2"}, "n1", ("n1.b",)),
        (ADDRESSES, {}, "10.0.0.1", ADDRESSES[1:]),
        (ADDRESSES, {"n1": "10.0.0.2"}, "n1", (ADDRESSES[0], ADDRESSES[2])),
        (("left", "right"), {"left": "10.0.0.1", "right": "10.0.0.2", "n1": "10.0.0.2"}, "n1", ("left",)),
    ],
)
def test_unfit_host_is_found_under_another_name(
    hosts: tuple[str, ...], known: dict[str, str], bad: str, fit: tuple[str, ...], resolves: dict[str, str]
) -> None:
    resolves.update(known)
    assert fit_hosts([(host, 2) for host in hosts], bad=[bad]) == tuple((host, 2) for host in fit)


@pytest.mark.parametrize(
    ("hosts", "known"),
    [
        (ADDRESSES, {}),
        (("left", "right"), {"left": "10.0.0.1"}),
        (("n1.a", "n1.b"), {}),
        (("localhost", "right"), {"localhost": "127.0.0.1", "n1": "127.0.0.1"}),  # each is its own
    ],
)
def test_unfit_host_that_cannot_be_told_is_refused(
    hosts: tuple[str, ...], known: dict[str, str], resolves: dict[str, str], tmp_path: Path
) -> None:
    resolves.update(known)
    stated = tuple((host, 2) for host in hosts)
    told = r"^--hosts: [^\n]* n1: [^\n]*`hostname`[^\n]*$"
    with pytest.raises(LaunchOptionError, match=told):
        without_hosts(JobSpec(TRAIN, 2, hosts=stated), ["n1"])
    with pytest.raises(LaunchOptionError, match=told):
        write_hostfile(tmp_path / "good", stated, bad=["n1"])
    assert not (tmp_path / "good").exists()


MPIRUN = """#!/bin/sh
printf '%s\\n' "$*" >> "$CALLS"
while [ $# -gt 0 ]; do
  [ "$1" != --bad-nodes ] || [ "$CODE" = 1 ] || printf "$BAD" > "$2"
  [ "$1" != preflight ] || code=$CODE
  shift
done
exit ${code:-0}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr("bigbatch.launch.launchers.mpirun.find_mpirun", lambda: str(tmp_path / "mpirun"))
    for name, value in (("CALLS", str(tmp_path / "calls")), ("BAD", ""), ("CODE", "0")):
        monkeypatch.setenv(name, value)
    return tmp_path / "calls"


HOSTS = ("--hosts", "n0:2,n1:2,n2:2", "--ranks", "4")


@pytest.mark.parametrize(
    ("choice", "code", "bad", "result", "hosts"),
    [
        ("warn", 0, "", 0, "n0:2,n1:2,n2:2"),
        ("exclude", 0, "", 0, "n0:2,n1:2,n2:2"),
        ("warn", 4, "n1\\n", 0, "n0:2,n1:2,n2:2"),
        ("exclude", 4, "n1\\n", 0, "n0:2,n2:2"),
        ("stop", 4, "n1\\n", 4, None),
        ("exclude", 4, "", 4, None),  # a pair, or the data: no host is to blame
        ("exclude", 1, "", 1, None),  # a rank is missing, and its host is unknown
        ("exclude", 137, "n1\\n", 0, "n0:2,n2:2"),  # what hung there had to be killed
        ("exclude", 4, "n1\\nn2\\n", 1, None),  # too few are left
        ("exclude", 4, "n9\\n", 1, None),  # no host has this name
        ("warn", 137, "n1\\n", 0, "n0:2,n1:2,n2:2"),
    ],
)
def test_mpirun_looks_first(
    choice: str,
    code: int,
    bad: str,
    result: int,
    hosts: str | None,
    calls: Path,
    resolves: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CODE", str(code))
    monkeypatch.setenv("BAD", bad)
    assert main(["launch", "mpirun", *HOSTS, "--preflight", choice, "--", *TRAIN]) == result
    looked, *started = calls.read_text().splitlines()
    assert "-n 6 " in looked, "all slots are looked at"
    assert " preflight --config quickstart --bad-nodes " in looked
    if hosts is None:
        assert started == []
        assert "starting without" not in capsys.readouterr().err
    else:
        assert f"--host {hosts} " in started[0]
        assert "-n 4 " in started[0]
        assert started[0].endswith("-m bigbatch train --config quickstart")


@pytest.mark.parametrize(("choice", "code"), [("warn", 0), ("exclude", 1), ("stop", 4), ("exclude", 138)])
def test_ctrl_c_while_it_looks_starts_nothing(
    choice: str, code: int, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun ends with 138 after the first one, with 1 after the second, or with the preflight's own code."""
    started = []

    def run_in_foreground(argv: list[str], **others: Any) -> Ended:
        started.append(argv)
        Path(argv[argv.index("--bad-nodes") + 1]).write_text("n1\n")
        return Ended(code, was_asked=True)

    monkeypatch.setattr("bigbatch.launch.launchers.mpirun.run_in_foreground", run_in_foreground)
    assert main(["launch", "mpirun", *HOSTS, "--preflight", choice, "--", *TRAIN]) == (code or 130)
    assert len(started) == 1


def test_hostfile_of_the_fit(calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODE", "4")
    monkeypatch.setenv("BAD", "n1\\n")
    good = tmp_path / "good"
    assert main(["launch", "preflight", *HOSTS, "--good-hosts", str(good), "--json", "x.json"]) == 4
    assert good.read_text() == "n0 slots=2\nn2 slots=2\n"
    assert " preflight --json x.json --bad-nodes " in calls.read_text()
    assert main(["launch", "preflight", "--good-hosts", str(good)]) == 1
    assert main(["launch", "preflight", "--nodes", "2", "--good-hosts", str(good)]) == 1


def test_preflight_dry_runs_show_both(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "mpirun", *HOSTS, "--preflight", "stop", "--dry-run", "--", *TRAIN]) == 0
    looked, started = capsys.readouterr().out.splitlines()
    assert " preflight --config quickstart" in looked
    assert started.endswith(" train --config quickstart")
    assert main(["launch", "preflight", "--nodes", "4", "--dry-run", "--", *TRAIN]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=4" in script
    assert "-m bigbatch preflight --config quickstart &" in script
    assert not calls.exists()


def test_preflight_alone_excludes_no_host(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "preflight", *HOSTS, "--preflight", "exclude"]) == 1
    assert capsys.readouterr().err.startswith("bigbatch: --preflight: bigbatch launch preflight ")
    assert not calls.exists()
