"""Preflight across emulated nodes: healthy ones pass, a slow node, a slow link and a silent node are named in time."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from slowed_node import slowed

from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import make_plan
from bigbatch.tools.emulate.state import EmulatedCluster, state_root
from tests.cluster.conftest import Emulate

pytestmark = pytest.mark.alone

MAX_SECONDS = 30.0


@pytest.fixture(scope="module")
def four(runtime_folder: Path) -> Iterator[EmulatedCluster]:
    """Four nodes with one rank at 1 Gbit/s."""
    root = state_root(os.environ)
    plan = make_plan(name="four", nodes=4, ranks_per_node="1", link="1gbit", delay="0")
    yield clusters.up(plan, root=root, environ=os.environ)
    clusters.down("four", root=root)


def look(emulate: Emulate, tmp_path: Path, *, launcher: str = "mpirun") -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the findings, and the output."""
    facts = tmp_path / "facts.json"
    done = emulate("run", "--name", "four", "--launcher", launcher, "--", "preflight", "--json", str(facts))
    assert facts.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(facts.read_text()), done.stdout


def blamed(found: dict[str, Any]) -> list[str]:
    return sorted({host for finding in found["findings"] for host in finding["hosts"]})


@pytest.mark.parametrize(("fault", "text"), [(nullcontext, None), (lambda: slowed("n2"), "n2: multiplies matrices at")])
def test_node_at_half_speed_is_named_and_equal_ones_are_not(
    fault: Callable[[], AbstractContextManager[None]],
    text: str | None,
    four: EmulatedCluster,
    emulate: Emulate,
    tmp_path: Path,
) -> None:
    with fault():
        code, found, printed = look(emulate, tmp_path)
    assert found["seconds"] < MAX_SECONDS
    assert [node["host"] for node in found["nodes"]] == ["n0", "n1", "n2", "n3"]
    assert (code, blamed(found)) == ((4, ["n2"]) if text else (0, [])), found["findings"]
    assert f"bigbatch: {text}" in printed if text else "nodes: 4, all fit" in printed


def test_link_at_a_tenth_is_named(four: EmulatedCluster, emulate: Emulate, tmp_path: Path) -> None:
    assert emulate("shape", "--name", "four", "--node", "n3", "--link", "100mbit").returncode == 0
    try:
        code, found, printed = look(emulate, tmp_path)
    finally:
        assert emulate("shape", "--name", "four", "--node", "n3", "--link", "1gbit").returncode == 0
    assert (code, blamed(found)) == (4, ["n3"]), found["findings"]
    assert "n3: its link carries 0." in printed
    assert emulate("shape", "--name", "four", "--node", "n4", "--link", "1gbit").stderr == (
        "bigbatch: --node 'n4': there is no such node; there are n0 to n3\n"
    )


def test_nodes_that_do_not_reach_each_other_are_named(four: EmulatedCluster, emulate: Emulate, tmp_path: Path) -> None:
    """n1 has no way to n3, though both reach the node where the ranks meet."""
    route = ["ip", "route", "add", "blackhole", "10.77.0.4/32"]
    with clusters.reporting_lost_cluster(four):
        clusters.run_inside(four, route, node=1, environ=os.environ)
    try:
        code, found, _ = look(emulate, tmp_path, launcher="plain")  # mpirun's own daemons would give up before
    finally:
        with clusters.reporting_lost_cluster(four):
            clusters.run_inside(four, [*route[:2], "del", *route[3:]], node=1, environ=os.environ)
    assert code == 4
    texts = [finding["text"] for finding in found["findings"]]
    assert "n1 cannot connect to n3: a firewall or a route between them" in texts
    assert found["seconds"] < MAX_SECONDS


SILENT = """
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "2":
    time.sleep(600)
import torch, bigbatch.tools.preflight.meeting
from bigbatch.cli import main
Path("here-" + os.environ["RANK"]).touch()  # all others begin at once, however long these imports take each of them
while len(list(Path().glob("here-*"))) < 3:
    time.sleep(0.02)
os.environ["SLURM_STEP_NODELIST"] = "n[0-3]"  # by which preflight knows the expected nodes
sys.exit(main(["preflight", "--bad-nodes", "bad"]))
"""


def test_silent_node_is_named_in_time(
    four: EmulatedCluster, emulate: Emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silent.py").write_text(SILENT)
    argv = ("run", "--name", "four", "--launcher", "plain", "--python", "--", str(tmp_path / "silent.py"))
    done = emulate(*argv)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "bigbatch: no answer from rank 2, on n2 within 12 s" in done.stdout, done.stdout + done.stderr
    assert "preflight: nothing measured, findings: 1, unfit: n2; " in done.stdout
    assert (tmp_path / "bad").read_text() == "n2\n"
