"""Slurm in the box without a cluster: what is refused; its configuration and commands are in tests/golden."""

import os
import sys
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.boot import boot_id, start_ticks
from bigbatch.errors import EmulationError, LaunchOptionError
from bigbatch.launch.start import main
from bigbatch.tools.emulate import cluster, slurm
from bigbatch.tools.emulate.plan import ClusterPlan
from bigbatch.tools.emulate.state import EmulatedCluster

UNEVEN = ClusterPlan("box", (3, 1), None, slurm=True)


def emulate(*words: str) -> int:
    return main(["emulate", *words])


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_may_set_groups", lambda: True)


def test_slurm_programs_that_are_missing_name_their_packages(
    as_root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bigbatch.tools.emulate.cluster.SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sinfo").touch(mode=0o755)
    packages = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
    with pytest.raises(EmulationError, match=rf"^munged, slurmctld, slurmd [^,]*: apt-get install {packages}$"):
        emulate("up", "--nodes", "2", "--slurm")


@pytest.mark.parametrize("folder", ["/run/a b", "/run/a#b", "/run/a\nb", "/run/%n", "/" + "x" * 80])
def test_slurm_folder_that_it_would_not_understand_is_refused(
    folder: str, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "PROGRAMS", ())
    with pytest.raises(EmulationError, match=naming(repr(folder), "XDG_RUNTIME_DIR")):
        slurm.require_slurm(Path(folder), environ=os.environ)
    slurm.require_slurm(Path("/run/user/1000/bigbatch-emulate/box-2"), environ=os.environ)


def test_slurm_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(EmulationError, match=naming("--slurm", "root")):
        slurm.require_slurm(Path("/run/box"), environ=os.environ)


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
def test_slurms_the_jobs_of_its_cluster_and_run_those_of_others(
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
    monkeypatch.setattr(slurm, "START_SECONDS", 0)
    monkeypatch.setattr(slurm, "ask_states", lambda cluster, environ: states)
    (tmp_path / "slurmd.n1.log").write_text("fatal: no clock\n")
    with pytest.raises(EmulationError, match=naming(*named)):
        slurm._wait_for_nodes(EmulatedCluster(UNEVEN, 0, 0, ""), folder=tmp_path, environ={})
