"""Slurm in the box without a cluster: its configuration and commands line by line, and what is refused."""

import os
import sys
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.boot import boot_id, start_ticks
from bigbatch.errors import EmulationError, LaunchOptionError
from bigbatch.launch.emulate import cluster, slurm_start
from bigbatch.launch.emulate.plan import ClusterPlan
from bigbatch.launch.emulate.state import EmulatedCluster
from bigbatch.launch.start import main

UNEVEN = ClusterPlan("box", (3, 1), None, slurm=True)
FOLDER = Path("/run/box/slurm")

CONF = """\
ClusterName=box
SlurmctldHost=n0(10.77.0.1)
SlurmUser=root
AuthInfo=socket=/run/box/slurm/munge.socket,cred_expire=6
StateSaveLocation=/run/box/slurm/state
SlurmdSpoolDir=/run/box/slurm/spool.%n
SlurmctldPidFile=/run/box/slurm/slurmctld.pid
SlurmdPidFile=/run/box/slurm/slurmd.%n.pid
SlurmctldLogFile=/run/box/slurm/slurmctld.log
SlurmdLogFile=/run/box/slurm/slurmd.%n.log
TmpFS=/run/box/slurm/tmp.%n
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
EnforcePartLimits=ALL
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
SlurmdTimeout=30
ReturnToService=2
NodeName=n0 NodeAddr=10.77.0.1 CPUs=3 RealMemory=1000000
NodeName=n1 NodeAddr=10.77.0.2 CPUs=1 RealMemory=1000000
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
COMMANDS = [
    "n0: munged --force --socket=/run/box/slurm/munge.socket --key-file=/run/box/slurm/munge.key "
    "--seed-file=/run/box/slurm/munge.seed --pid-file=/run/box/slurm/munged.pid --log-file=/run/box/slurm/munged.log",
    "n0: slurmctld -f /run/box/slurm/slurm.conf",
    "n0: slurmd -N n0 -f /run/box/slurm/slurm.conf",
    "n1: slurmd -N n1 -f /run/box/slurm/slurm.conf",
]


def emulate(*words: str) -> int:
    return main(["emulate", *words])


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_slurm_dry_run_prints_configuration_and_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert emulate("up", "--ranks-per-node", "3,1", "--slurm", "--dry-run") == 0
    said = capsys.readouterr().out.replace(f"{tmp_path}/bigbatch-emulate/box", "/run/box").splitlines()
    assert said[0].startswith("switch: ip link add")
    start = said.index("/run/box/slurm/slurm.conf:")
    assert said[start + 1 :] == [*CONF.splitlines(), "", *COMMANDS]
    assert not (tmp_path / "bigbatch-emulate/box").exists()
    assert emulate("up", "--ranks-per-node", "3,1", "--dry-run") == 0
    assert "slurm" not in capsys.readouterr().out


# --- what is refused ---


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_start, "_may_set_groups", lambda: True)


def test_slurm_programs_that_are_missing_name_their_packages(
    as_root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bigbatch.launch.emulate.cluster.SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sinfo").touch(mode=0o755)
    packages = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
    with pytest.raises(EmulationError, match=rf"^munged, slurmctld, slurmd [^,]*: apt-get install {packages}$"):
        emulate("up", "--nodes", "2", "--slurm")


@pytest.mark.parametrize("folder", ["/run/a b", "/run/a#b", "/run/a\nb", "/run/%n", "/" + "x" * 80])
def test_slurm_folder_that_it_would_not_understand_is_refused(
    folder: str, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_start, "PROGRAMS", ())
    with pytest.raises(EmulationError, match=naming(repr(folder), "XDG_RUNTIME_DIR")):
        slurm_start.require_slurm(Path(folder), environ=os.environ)
    slurm_start.require_slurm(Path("/run/user/1000/bigbatch-emulate/box-2"), environ=os.environ)


def test_slurm_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(EmulationError, match=naming("--slurm", "root")):
        slurm_start.require_slurm(Path("/run/box"), environ=os.environ)


def test_emulate_exec_needs_a_command_and_a_cluster() -> None:
    with pytest.raises(LaunchOptionError, match="-- sbatch"):
        emulate("exec")
    with pytest.raises(EmulationError, match=naming("box", "bigbatch launch emulate up")):
        emulate("exec", "--", "squeue")


@pytest.mark.skipif(sys.platform != "linux", reason="clusters need Linux")
@pytest.mark.parametrize(
    ("has_slurm", "words", "error", "told"),
    [
        (False, ("exec", "--", "squeue"), EmulationError, "bigbatch launch emulate up --slurm"),
        (True, ("run", "--", "train"), LaunchOptionError, "bigbatch launch emulate exec --name box -- sbatch"),
    ],
)
def test_slurm_starts_the_jobs_of_its_cluster_and_run_those_of_others(
    has_slurm: bool, words: tuple[str, ...], error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ClusterPlan("box", (1, 1), None, slurm=has_slurm)
    found = EmulatedCluster(plan, os.getpid(), start_ticks(os.getpid()) or 0, boot_id())
    monkeypatch.setattr(cluster, "find", lambda name, root: found)
    with pytest.raises(error, match=naming("box", told)):
        emulate(*words)


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (None, ("slurmctld ", "/slurmctld.log: empty")),
        ({"n0": "idle", "n1": "down*"}, ("n1: down*", "0 s", "/slurmd.n1.log: fatal: no clock")),
        ({"n0": "unknown*", "n1": "idle"}, ("n0: unknown*", "0 s", "/slurmd.n0.log: empty")),
        ({"n0": "idle"}, ("n1: unknown ", "0 s", "/slurmd.n1.log")),
    ],
)
def test_slurm_node_that_is_not_idle_in_time_is_named_with_its_log(
    states: dict[str, str] | None, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm_start, "START_SECONDS", 0)
    monkeypatch.setattr(slurm_start, "ask_states", lambda cluster, environ: states)
    (tmp_path / "slurmd.n1.log").write_text("fatal: no clock\n")
    with pytest.raises(EmulationError, match=naming(*named)):
        slurm_start._wait_for_nodes(EmulatedCluster(UNEVEN, 0, 0, ""), folder=tmp_path, environ={})
