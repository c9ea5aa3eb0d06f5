"""Emulated clusters for tests, with a state folder of their own."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from bigbatch.errors import EmulationError
from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.namespaces import node_fd
from bigbatch.tools.emulate.plan import make_plan
from bigbatch.tools.emulate.state import EmulatedCluster, state_root

PROBE = str(Path(__file__).with_name("probe.py"))
Emulate = Callable[..., "subprocess.CompletedProcess[str]"]


def skip_unless_promised(reason: str) -> NoReturn:
    """Skip; fail where BIGBATCH_EXPECT_CLUSTER=1 says that clusters can be built here."""
    if os.environ.get("BIGBATCH_EXPECT_CLUSTER") == "1":
        pytest.fail(f"a cluster was promised, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[Path]:
    """Folder of these tests' clusters: a short path, since sockets lie in it. Skips if no cluster can be built."""
    folder = Path(tempfile.mkdtemp(prefix="bb"))
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    root = state_root(os.environ)
    try:
        clusters.up(
            make_plan(name="can-we", nodes=2, ranks_per_node="1", link="1mbit", delay="0"),
            root=root,
            environ=os.environ,
        )
    except EmulationError as error:
        shutil.rmtree(folder)
        skip_unless_promised(str(error))
    clusters.down("can-we", root=root)
    yield folder
    for name in clusters.names(root):
        clusters.down(name, root=root)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def emulate() -> Emulate:
    """`bigbatch launch emulate`, as typed."""

    def run(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-m", "bigbatch", "launch", "emulate", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=280, env=os.environ | variables)

    return run


@pytest.fixture(scope="module")
def uneven(runtime_folder: Path) -> Iterator[EmulatedCluster]:
    """Nodes with 3, 2, 2 and 1 ranks at 200 Mbit/s."""
    yield from _built("uneven", "3,2,2,1", "200mbit", "0")


@pytest.fixture(scope="module")
def even(runtime_folder: Path) -> Iterator[EmulatedCluster]:
    """Four nodes with two ranks at 200 Mbit/s."""
    yield from _built("even", "2,2,2,2", "200mbit", "0")


@pytest.fixture(scope="module")
def distant(runtime_folder: Path) -> Iterator[EmulatedCluster]:
    """Three nodes with one rank at 200 Mbit/s, one millisecond from each other."""
    yield from _built("distant", "1,1,1", "200mbit", "1ms")


def _built(name: str, ranks: str, link: str, delay: str) -> Iterator[EmulatedCluster]:
    root = state_root(os.environ)
    plan = make_plan(name=name, nodes=None, ranks_per_node=ranks, link=link, delay=delay)
    yield clusters.up(plan, root=root, environ=os.environ)
    clusters.down(name, root=root)


def networks_of(cluster: EmulatedCluster) -> list[int]:
    """The nodes' networks, as inodes."""
    return [
        os.stat(f"/proc/{cluster.keeper}/fd/{node_fd(node, 'net')}").st_ino for node in range(cluster.plan.num_nodes)
    ]


def processes_in(*namespaces: int) -> list[int]:
    """Every process that lives in one of these networks or process namespaces."""
    found = []
    for each in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it has ended, or is none of ours
            own = {os.stat(f"/proc/{each.pid}/ns/{kind}").st_ino for kind in ("net", "pid")}
            found += [each.pid] if own & {*namespaces} and each.status() != psutil.STATUS_ZOMBIE else []
    return found
