"""Emulated clusters as they really run here: names, rates, counters, launchers, ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch import __version__
from bigbatch.errors import INTERRUPTED, EmulationError
from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import place_ranks
from bigbatch.tools.emulate.state import EmulatedCluster, load, state_root
from tests.cluster.conftest import PROBE, Emulate, networks_of, processes_in

ROOT = Path(__file__).resolve().parents[2]
GOODPUT = 1448 / 1514
"""What TCP delivers of the rate of an Ethernet with packets of 1500 bytes: without headers."""

NOBODY = 65534
PATIENCE_SECONDS = 120
"""What a slow machine may take for all processes of a job to start, or to end."""


def probe(
    emulate: Emulate, name: str, *words: str, launcher: str = "plain", place: str = "block", **variables: str
) -> list[dict]:
    """Run the probe on all ranks of a cluster; what they said, by rank."""
    options = ("--name", name, "--launcher", launcher, "--place", place, "--python")
    last = len(load(state_root(os.environ) / name).plan.ranks_per_node) - 1
    done = emulate("run", *options, "--", PROBE, *words, LAST_HOST=f"n{last}", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda each: each["rank"])


# --- nodes and launchers ---


@pytest.mark.parametrize("launcher", ["plain", "mpirun", "torchrun"])
def test_every_launcher_runs_every_rank_on_its_node(launcher: str, emulate: Emulate, uneven: EmulatedCluster) -> None:
    counts = uneven.plan.ranks_per_node
    said = probe(emulate, "uneven", "who", "a b", "$(id)", launcher=launcher)
    assert [each["rank"] for each in said] == list(range(8))
    for each, (node, local_rank) in zip(said, place_ranks(counts, order="block"), strict=True):
        assert each["world_size"] == 8
        assert (each["host"], each["local_rank"]) == (f"n{node}", local_rank)
        assert each["local_size"] == counts[node]
        assert each["address"] == f"10.77.0.{node + 1}"
        assert each["interfaces"] == ["eth0", "lo"]
        assert each["arguments"] == ["a b", "$(id)"]


@pytest.mark.parametrize("launcher", ["plain", "mpirun"])
def test_ranks_are_dealt_out_to_uneven_nodes_in_turn(launcher: str, emulate: Emulate, uneven: EmulatedCluster) -> None:
    said = probe(emulate, "uneven", "who", launcher=launcher, place="cyclic")
    assert [each["host"] for each in said] == ["n0", "n1", "n2", "n3", "n0", "n1", "n2", "n0"]
    assert [each["local_rank"] for each in said] == [0, 0, 0, 0, 1, 1, 1, 2]


def test_master_of_another_job_is_not_this_ones(emulate: Emulate, even: EmulatedCluster) -> None:
    """Neither on the node of mpirun, which inherits, nor on those to which it passes variables on."""
    said = probe(emulate, "even", "who", launcher="mpirun", MASTER_ADDR="10.0.0.99")
    assert [each["master"] for each in said] == [None] * 8


def test_failing_rank_ends_the_job_with_its_code(emulate: Emulate, even: EmulatedCluster) -> None:
    """Long before the others would end, ten minutes later, and within what a command may take here."""
    options = ("--name", "even", "--launcher", "mpirun", "--python")
    assert emulate("run", *options, "--", PROBE, "fail", "5", "7").returncode == 7


def test_bigbatch_command_runs_on_every_rank(emulate: Emulate, even: EmulatedCluster) -> None:
    done = emulate("run", "--name", "even", "--launcher", "plain", "--", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"bigbatch {__version__}") == 8


# --- links ---


def streamed(emulate: Emulate, name: str, num_bytes: int) -> tuple[float, int]:
    """Mbit/s of one TCP stream from the first node to the last, and bytes that it sent."""
    said = probe(emulate, name, "stream", str(num_bytes))[0]
    return said["mbit_per_s"], said["sent_bytes"]


def best_of_ten(measure: Callable[[], float], *, least: float) -> float:
    """Mbit/s of the first of ten streams that is fast enough: other work may slow one down, nothing speeds it up."""
    rates: list[float] = []
    while len(rates) < 10 and max(rates, default=0.0) <= least:
        rates.append(measure())
    return max(rates)


def best_rate(emulate: Emulate, name: str, num_bytes: int, *, least: float) -> float:
    """The same, from the first node of a cluster to the last."""
    return best_of_ten(lambda: streamed(emulate, name, num_bytes)[0], least=least)


@pytest.mark.alone
def test_stream_gets_what_the_link_can_carry(emulate: Emulate, distant: EmulatedCluster) -> None:
    least, most = 0.95 * GOODPUT * 200, 1.01 * GOODPUT * 200
    assert least < best_rate(emulate, "distant", 10_000_000, least=least) < most


@pytest.mark.alone
def test_links_can_be_given_another_rate(emulate: Emulate, uneven: EmulatedCluster) -> None:
    try:
        for link, least, most in (("50mbit", 0.9 * 50 * GOODPUT, 1.02 * 50 * GOODPUT), ("none", 500.0, 1e6)):
            assert emulate("shape", "--name", "uneven", "--link", link).returncode == 0
            num_bytes = 2_000_000 if link == "50mbit" else 50_000_000
            assert least < best_rate(emulate, "uneven", num_bytes, least=least) < most, link
    finally:
        assert emulate("shape", "--name", "uneven", "--link", "200mbit").returncode == 0
    assert "link 200mbit" in emulate("status").stdout


def test_shaping_that_fails_is_told(even: EmulatedCluster, tmp_path: Path) -> None:
    (tmp_path / "tc").write_text("#!/bin/sh\necho no such bucket >&2; exit 2\n")
    (tmp_path / "tc").chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    root = state_root(os.environ)
    try:
        with pytest.raises(EmulationError, match=naming("tc qdisc replace ", "no such bucket")):
            clusters.shape(even, rate=10**6, root=root, environ=environ)
    finally:  # what came before tc was done
        clusters.shape(even, rate=even.plan.rate, root=root, environ=os.environ)


def test_kernel_counts_the_bytes_of_a_stream(emulate: Emulate, even: EmulatedCluster, tmp_path: Path) -> None:
    """Beside the payload there are headers: 66 bytes for each packet that TCP hands on, the other way only those."""
    file = tmp_path / "counters.json"
    options = ("--name", "even", "--launcher", "plain", "--counters", str(file), "--python")
    done = emulate("run", *options, "--", PROBE, "stream", "8000000", LAST_HOST="n3")
    assert done.returncode == 0, done.stderr
    facts = json.loads(file.read_text())
    sent = json.loads(done.stdout)["sent_bytes"]
    nodes = {each["host"]: each for each in facts["nodes"]}
    assert sent < nodes["n0"]["sent_bytes"] < sent * 1514 / 1448 * 1.01
    assert nodes["n3"]["received_bytes"] == pytest.approx(nodes["n0"]["sent_bytes"], rel=0.02)
    assert nodes["n0"]["received_bytes"] < 0.05 * sent
    assert nodes["n1"]["sent_bytes"] + nodes["n2"]["sent_bytes"] < 10_000
    assert (facts["link"], facts["exit_code"]) == ("200mbit", 0)
    assert f"{nodes['n0']['sent_bytes'] / 1e6:.3f}" in done.stderr


def test_file_that_cannot_be_written_is_found_out_before_the_job(emulate: Emulate, even: EmulatedCluster) -> None:
    options = ("--name", "even", "--launcher", "plain", "--counters", "/no/such/folder/x.json", "--python")
    done = emulate("run", *options, "--", PROBE, "who")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "--counters /no/such/folder/x.json: No such file or directory; name a file that can be written\n"
    )
    assert len(done.stderr.splitlines()) == 1


def test_file_that_turns_out_full_does_not_hide_the_exit_code(emulate: Emulate, even: EmulatedCluster) -> None:
    options = ("--name", "even", "--launcher", "plain", "--counters", "/dev/full", "--python")
    done = emulate("run", *options, "--", PROBE, "fail", "5", "7")
    assert done.returncode == 7
    assert done.stderr.endswith("bigbatch: --counters /dev/full: No space left on device\n")


@pytest.mark.alone
def test_delay_counts_twice_in_a_round_trip(emulate: Emulate, even: EmulatedCluster, distant: EmulatedCluster) -> None:
    """Compares the fastest round trips: other work may slow one down, nothing speeds it up."""
    near, far = (probe(emulate, name, "round_trips", "200")[0]["us"] for name in ("even", "distant"))
    assert 1900 < far[0] - near[0] < 2600, (near[0], far[0])
    assert far[0] > 2000, "nothing is faster than the delay"


# --- ends ---


def namespaces_of(cluster: EmulatedCluster) -> set[int]:
    """The cluster's networks and its process namespace, as inodes."""
    return {*networks_of(cluster), *(os.stat(f"/proc/{cluster.keeper}/ns/{kind}").st_ino for kind in ("net", "pid"))}


def traces() -> dict[str, object]:
    """What a cluster might leave on a machine, beside its processes, its namespaces and its state."""
    return {
        "mounts": sorted(line.split(" - ")[0].split()[4] for line in Path("/proc/self/mountinfo").open()),
        "devices": sorted(os.listdir("/sys/class/net")),
        "host": os.uname().nodename,
        "hosts": Path("/etc/hosts").read_text(),
    }


def start_lingering(
    name: str, folder: Path, *options: str, count: int, mode: str = "linger"
) -> "subprocess.Popen[str]":
    """A job whose ranks stay; returns once all of them are there."""
    folder.mkdir()
    argv = ["run", "--name", name, *options, "--python", "--", PROBE, mode, str(folder)]
    job = subprocess.Popen(
        [sys.executable, "-m", "bigbatch", "launch", "emulate", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    return job


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll; the test fails when time runs out."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("launcher", "victim"), [("mpirun", "run"), ("torchrun", "run"), ("plain", "keeper")])
@pytest.mark.alone  # mounts of others would come and go
def test_nothing_is_left_behind_after_kill_9(
    launcher: str, victim: str, emulate: Emulate, runtime_folder: Path, tmp_path: Path
) -> None:
    before = traces()
    root = state_root(os.environ)
    assert emulate("up", "--name", "doomed", "--nodes", "3", "--ranks-per-node", "2", "--link", "1gbit").returncode == 0
    cluster = load(root / "doomed")
    assert cluster is not None
    job = start_lingering("doomed", tmp_path / "here", "--launcher", launcher, count=6)
    namespaces = namespaces_of(cluster)
    inside = processes_in(*namespaces)
    assert len(inside) >= 1 + 6 * 2, "keeper, ranks and their children"
    os.kill(job.pid if victim == "run" else cluster.keeper, signal.SIGKILL)
    code = job.wait(timeout=PATIENCE_SECONDS)
    if victim == "keeper":
        assert code == 1
        assert job.stdout is not None
        assert "doomed was taken down under the job" in job.stdout.read()
    else:
        assert code == -signal.SIGKILL
        wait_until(lambda: processes_in(*namespaces) == [cluster.keeper])
        assert "doomed: nodes 3" in emulate("status").stdout, "only the job has ended"
    assert emulate("down", "--name", "doomed").stdout == "doomed: removed\n"
    assert processes_in(*namespaces) == []
    assert not namespaces & {each.stat().st_ino for each in Path("/run/netns").glob("*")}, "kept by a name"
    assert not (root / "doomed").exists()
    assert traces() == before
    assert emulate("down", "--name", "doomed").stdout == "doomed: there is no such cluster\n"


@pytest.mark.parametrize("seen", ["hosts", "cluster.json"])
@pytest.mark.alone  # mounts of others would come and go
def test_nothing_is_left_of_a_cluster_for_one_job_whose_start_is_killed(seen: str, runtime_folder: Path) -> None:
    """Before it is up, when no process waits for its answer any more, and after, when no rank has started yet."""
    root, before = state_root(os.environ), traces()
    options = ("--nodes", "2", "--launcher", "plain", "--", "comm", "bench")
    job = subprocess.Popen([sys.executable, "-m", "bigbatch", "launch", "emulate", "run", *options])
    wait_until(lambda: any(root.glob(f"run-*/{seen}")))
    job.kill()
    job.wait()
    wait_until(lambda: not any(root.glob("run-*")) and traces() == before)


def test_daemon_does_not_outlive_its_job(emulate: Emulate, even: EmulatedCluster, tmp_path: Path) -> None:
    job = start_lingering("even", tmp_path / "here", "--launcher", "plain", count=8)
    assert len(processes_in(*namespaces_of(even))) == 2 + 8 * 2, "keeper, watcher, ranks and their children"
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=PATIENCE_SECONDS) == INTERRUPTED
    assert processes_in(*namespaces_of(even)) == [even.keeper]


@pytest.mark.parametrize(("launcher", "asked_by"), [("plain", "SIGTERM"), ("mpirun", "SIGUSR1")])
def test_ctrl_c_reaches_every_node_and_gives_time(
    launcher: str, asked_by: str, emulate: Emulate, even: EmulatedCluster, tmp_path: Path
) -> None:
    job = start_lingering("even", tmp_path / "here", "--launcher", launcher, count=8, mode="heed")
    job.send_signal(signal.SIGINT)
    said = job.communicate(timeout=PATIENCE_SECONDS)[0]
    assert job.returncode == 0, said
    assert said.count(f'"signal": "{asked_by}"') == 8


def test_one_job_at_a_time(emulate: Emulate, even: EmulatedCluster, tmp_path: Path) -> None:
    job = start_lingering("even", tmp_path / "here", "--launcher", "plain", count=8)
    done = emulate("run", "--name", "even", "--launcher", "plain", "--python", "--", PROBE, "who")
    assert done.returncode == 1
    assert "a job is running in even" in done.stderr
    job.kill()
    job.wait()
    assert len(probe(emulate, "even", "who")) == 8, "what an abandoned job left is cleared away first"


def test_process_that_does_not_end_is_told(runtime_folder: Path, tmp_path: Path, emulate: Emulate) -> None:
    """The kernel keeps dead children of a stopped process, and with them their namespace."""
    assert emulate("up", "--name", "held", "--nodes", "2").returncode == 0
    job = start_lingering("held", tmp_path / "here", "--launcher", "plain", count=2)
    job.send_signal(signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "END_SECONDS", 0.5)
        with pytest.raises(EmulationError, match=naming("held", "kill -9")):
            clusters.down("held", root=state_root(os.environ))
    job.kill()
    job.wait()
    assert emulate("down", "--name", "held").stdout == "held: removed\n"


def test_cluster_for_one_job_goes_with_it(tmp_path: Path, emulate: Emulate) -> None:
    size = ("--ranks-per-node", "1,2", "--link", "100mbit", "--launcher", "plain")
    job = start_lingering("once", tmp_path / "here", *size, count=3)
    assert "once: nodes 2, ranks 1,2, link 100mbit, delay 0us" in emulate("status").stdout
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=PATIENCE_SECONDS) == INTERRUPTED
    assert "once" not in emulate("status").stdout
    done = emulate("run", *size, "--python", "--", PROBE, "fail", "2", "9")
    assert done.returncode == 9
    assert "run-" not in emulate("status").stdout


@pytest.mark.alone  # mounts of others would come and go
def test_cluster_for_one_job_goes_with_it_even_by_kill_9(
    emulate: Emulate, runtime_folder: Path, tmp_path: Path
) -> None:
    before = traces()
    root = state_root(os.environ)
    size = ("--nodes", "3", "--delay", "1ms", "--launcher", "plain")
    job = start_lingering("once", tmp_path / "here", *size, count=3)
    cluster = load(root / "once")
    assert cluster is not None
    namespaces = namespaces_of(cluster)
    assert len(processes_in(*namespaces)) == 2 + 3 * 2, "keeper, watcher, ranks and their children"
    job.kill()
    job.wait()
    wait_until(lambda: processes_in(*namespaces) == [] and not (root / "once").exists())
    assert traces() == before
    assert "once" not in emulate("status").stdout


def test_cluster_that_is_up_is_not_built_again(emulate: Emulate, even: EmulatedCluster) -> None:
    for words in (("up",), ("run", "--python", "--", PROBE, "who")):
        split = words.index("--") if "--" in words else len(words)
        done = emulate(*words[:split], "--name", "even", "--nodes", "2", *words[split:])
        assert done.returncode == 1
        assert "even already runs: end it by bigbatch launch emulate down --name even" in done.stderr
    assert "even: nodes 4" in emulate("status").stdout, "and a refused second start does not remove it"


# --- which users may ---


def test_without_namespaces_one_line_says_what_is_needed(runtime_folder: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs util-linux's unshare")
    line = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    command = [sys.executable, "-m", "bigbatch", "launch", "emulate", "up", "--name", "denied", "--nodes", "2"]
    done = subprocess.run(
        [unshare, "--user", "--map-root-user", "sh", "-c", line, "sh", *command], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "unshare: No space left on device" in done.stderr
    assert "user.max_user_namespaces" in done.stderr
    assert not (state_root(os.environ) / "denied").exists()


@pytest.fixture
def nobodys_python(tmp_path: Path) -> list[str]:
    """A Python that an unprivileged user may run, with bigbatch in it."""
    if os.geteuid() != 0:
        pytest.skip("all of these tests run as an unprivileged user already")
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import bigbatch.launch.start"
    found = []
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            if subprocess.run([python, "-c", script], capture_output=True, cwd="/", **as_nobody()).returncode == 0:
                found.append(python)
    if not found:
        pytest.skip("an unprivileged user cannot read a Python with bigbatch here")
    return [found[0], "-m", "bigbatch"]


def as_nobody() -> dict[str, int | list[int]]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def test_unprivileged_user_has_clusters_too(nobodys_python: list[str], runtime_folder: Path) -> None:
    folder = runtime_folder.parent / f"{runtime_folder.name}-nobody"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    environ = os.environ | {"XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT), "HOME": str(folder)}

    def run(*words: str) -> str:
        argv = [*nobodys_python, "launch", "emulate", *words]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            env=environ | {"LAST_HOST": "n1"},
            cwd="/",
            timeout=PATIENCE_SECONDS,
            **as_nobody(),
        )
        if "user.max_user_namespaces" in done.stderr:
            pytest.skip(f"user {NOBODY} gets none: {done.stderr}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = ("run", "--launcher", "plain", "--python", "--", PROBE)

    def share_of(mbit: int, *, num_bytes: int) -> float:
        """Return the measured share of what TCP delivers at this rate."""
        goodput = mbit * GOODPUT
        return best_of_ten(
            lambda: float(json.loads(run(*job, "stream", str(num_bytes)))["mbit_per_s"]) / goodput, least=0.8
        )

    try:
        run("up", "--ranks-per-node", "2,1", "--link", "200mbit", "--delay", "1ms")
        said = [json.loads(line) for line in run(*job, "who").splitlines()]
        assert sorted(each["host"] for each in said) == ["n0", "n0", "n1"]
        assert 0.8 < share_of(200, num_bytes=10_000_000) < 1.01
        run("shape", "--link", "50mbit")
        assert 0.8 < share_of(50, num_bytes=2_000_000) < 1.02
        assert run("down") == "box: removed\n"
        assert list(folder.rglob("*")) == [folder / "bigbatch-emulate"]
    finally:
        subprocess.run([*nobodys_python, "launch", "emulate", "down", "--all"], env=environ, cwd="/", **as_nobody())
        shutil.rmtree(folder)
