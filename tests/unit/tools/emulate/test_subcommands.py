"""The emulated cluster's state and command line, without a cluster."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.boot import boot_id, start_ticks
from bigbatch.errors import EmulationError, LaunchOptionError
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.start import main
from bigbatch.tools.emulate import cluster, subcommands
from bigbatch.tools.emulate.plan import ClusterPlan
from bigbatch.tools.emulate.state import EmulatedCluster, is_alive, load, save, state_root

UNEVEN = ClusterPlan("box", (3, 2, 2, 1), 200_000_000)


def alive() -> EmulatedCluster:
    """A cluster whose keeper is this process."""
    return EmulatedCluster(UNEVEN, os.getpid(), start_ticks(os.getpid()) or 0, boot_id())


# --- state ---


def test_emulate_state_goes_to_the_users_own_runtime_folder(tmp_path: Path) -> None:
    root = state_root({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert root == tmp_path / "bigbatch-emulate"
    assert root.stat().st_mode & 0o777 == 0o700
    assert state_root({"XDG_RUNTIME_DIR": str(tmp_path)}) == root, "found again"


def test_emulate_state_without_one_goes_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for environ in ({}, {"XDG_RUNTIME_DIR": str(tmp_path / "missing")}):
        assert state_root(environ) == tmp_path / f"bigbatch-emulate-{os.geteuid()}"


@pytest.mark.parametrize(("trap", "told"), [("open", "chmod 700"), ("link", "chmod 700"), ("file", "File exists")])
def test_emulate_state_folder_that_others_can_reach_is_not_trusted(trap: str, told: str, tmp_path: Path) -> None:
    folder = tmp_path / "bigbatch-emulate"
    if trap == "open":
        folder.mkdir(mode=0o755)
    elif trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to("elsewhere")
    else:
        folder.touch()
    with pytest.raises(EmulationError, match=naming(folder, told)):
        state_root({"XDG_RUNTIME_DIR": str(tmp_path)})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"plan": {}}', '{"plan": {"ranks_per_node": [1]}, "keeper": 1}'])
def test_emulate_state_that_is_no_cluster_is_none(text: str, tmp_path: Path) -> None:
    assert load(tmp_path) is None
    (tmp_path / "cluster.json").write_text(text)
    assert load(tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_keeper_is_no_other_process_with_the_same_number() -> None:
    found = alive()
    assert is_alive(found)
    assert not is_alive(replace(found, start_ticks=found.start_ticks - 1))
    assert not is_alive(replace(found, boot_id="another boot")), "ticks count from boot"
    child = subprocess.Popen(["true"])
    while start_ticks(child.pid) is not None:  # ended, but not waited for
        time.sleep(0.01)
    child.wait()


# --- command line ---


def emulate(*words: str) -> int:
    return main(["emulate", *words])


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_emulate_run_does_not_pass_on_the_master_of_another_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.99")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert emulate("run", "--nodes", "2", "--dry-run", "--", "comm", "bench") == 0
    line = capsys.readouterr().out
    assert "-x NCCL_DEBUG" in line
    assert "MASTER" not in line
    given: dict[str, str] = {}
    monkeypatch.setattr(cluster, "find", lambda name, root: alive())
    monkeypatch.setattr(
        subcommands, "run_job", lambda starts, environ, **_: given.update(environ) or Ended(0, was_asked=False)
    )
    assert emulate("run", "--", "comm", "bench") == 0
    assert given["NCCL_DEBUG"] == "INFO"
    assert "MASTER_ADDR" not in given


@pytest.mark.parametrize(("launcher", "has_file"), [("plain", False), ("torchrun", False), ("mpirun", True)])
def test_emulate_run_ends_with_the_code_of_a_stopped_rank(
    launcher: str, has_file: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a file for its code, as under mpirun, a rank that was asked to stop exits with 0."""
    given: list[object] = []
    monkeypatch.setattr(cluster, "find", lambda name, root: alive())
    monkeypatch.setattr(subcommands, "state_root", lambda environ: tmp_path)
    monkeypatch.setattr(subcommands, "run_job", lambda starts, **_: given.append(starts) or Ended(130, was_asked=True))
    (tmp_path / UNEVEN.name).mkdir()
    assert emulate("run", "--launcher", launcher, "--", "comm", "bench") == 130
    assert ("BIGBATCH_STOPPED" in str(given)) == has_file


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        (("run", "--nodes", "2", "--"), LaunchOptionError, "-- train"),
        (("run", "--link", "1gbit", "--", "train"), LaunchOptionError, "bigbatch launch emulate shape"),
        (("run", "--", "train"), EmulationError, "bigbatch launch emulate up --nodes"),
        (("shape", "--link", "1gbit"), EmulationError, "bigbatch launch emulate up --nodes"),
    ],
)
def test_emulate_says_what_to_do_instead(words: tuple[str, ...], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        emulate(*words)


def test_emulate_down_and_status_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert [emulate("down"), emulate("down", "--all"), emulate("status")] == [0, 0, 0]
    assert re.fullmatch("box: .*\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["../elsewhere", "..", "a/b", ""])
def test_emulate_down_of_a_path_removes_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for words in (("down",), ("shape", "--link", "none"), ("run", "--", "train")):
        split = words.index("--") if "--" in words else len(words)
        with pytest.raises(LaunchOptionError, match="--name"):
            emulate(*words[:split], "--name", name, *words[split:])
    assert (tmp_path / "elsewhere").exists()


def test_emulate_shows_and_removes_what_a_crash_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = state_root({"XDG_RUNTIME_DIR": str(tmp_path)}) / "box"
    folder.mkdir()
    save(
        folder, EmulatedCluster(UNEVEN, os.getpid(), 0, boot_id())
    )  # another process has its number now, and must not be hurt
    assert emulate("status") == 0
    assert "box: ended" in capsys.readouterr().out
    assert emulate("down") == 0
    assert not folder.exists()


@pytest.fixture
def vanished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedCluster:
    """Taken down at the worst moment: the keeper was there a moment ago, but its number is that of this process now."""
    if sys.platform != "linux":
        pytest.skip("clusters need Linux")
    folder = state_root({"XDG_RUNTIME_DIR": str(tmp_path)}) / "box"
    folder.mkdir()
    found = alive()
    save(folder, found)
    monkeypatch.setattr(cluster, "_require_tools", lambda environ: os.defpath)
    return found


def test_emulate_says_in_one_line_that_a_cluster_vanished(
    vanished: EmulatedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate("status") == 0
    assert capsys.readouterr().out.startswith("box: ended")
    with pytest.raises(EmulationError, match=naming("box", "job")):
        emulate("run", "--", "comm", "bench")
    with pytest.raises(EmulationError, match=naming("box", "node", "bigbatch launch emulate status")):
        emulate("shape", "--link", "1gbit")
    with pytest.raises(EmulationError, match=r"^box: .*(keeper|setns).*bigbatch launch emulate status"):
        cluster.join(vanished)


@pytest.mark.skipif(sys.platform != "linux", reason="clusters need Linux")
def test_emulate_up_names_a_start_that_was_cut_short(tmp_path: Path) -> None:
    (state_root({"XDG_RUNTIME_DIR": str(tmp_path)}) / "box").mkdir()
    with pytest.raises(EmulationError, match="bigbatch launch emulate down --name box"):
        emulate("up", "--nodes", "2")


def test_emulate_up_names_the_package_of_a_missing_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(cluster, "SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulationError, match=r"^ip .*apt-get install iproute2$"):
        emulate("up", "--nodes", "2")


def test_emulate_refuses_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(EmulationError, match=naming("Linux", "darwin")):
        emulate("up", "--nodes", "2")
