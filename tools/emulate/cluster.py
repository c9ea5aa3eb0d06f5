"""Build, find, change and remove emulated clusters."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bigbatch.errors import EmulationError
from bigbatch.interpreter import python_argv
from bigbatch.locks import try_lock
from bigbatch.tools.emulate import namespaces
from bigbatch.tools.emulate.plan import ClusterPlan, host
from bigbatch.tools.emulate.programs import port, shape_commands
from bigbatch.tools.emulate.state import EmulatedCluster, is_alive, load, save

SYSTEM_PATH = "/usr/sbin:/sbin"
"""Folders of ip and tc on Debian, which a plain user's PATH lacks."""

END_SECONDS = 60
"""Time limit to end all processes of a cluster on a busy machine; usually it takes a moment."""

NAMESPACES_HINT = (
    "needs root or unprivileged user namespaces: in a container, start it with --privileged; else allow them by sysctl "
    "(user.max_user_namespaces; Debian: kernel.unprivileged_userns_clone=1; Ubuntu: "
    "kernel.apparmor_restrict_unprivileged_userns=0)"
)


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a node sent and received over its link, with Ethernet and IP headers of TCP's large packets."""

    host: str
    sent_bytes: int
    received_bytes: int


def parse_counters(text: str, *, num_nodes: int) -> tuple[LinkBytes, ...]:
    """Parse /proc/net/dev of the switch: its port receives what the node sends. Raises: KeyError without a port."""
    rows = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in text.splitlines())}
    ports = [rows[port(node)] for node in range(num_nodes)]
    return tuple(LinkBytes(host(node), int(row[0]), int(row[8])) for node, row in enumerate(ports))


def up(plan: ClusterPlan, *, root: Path, environ: Mapping[str, str], lifeline: int | None = None) -> EmulatedCluster:
    """Build a cluster and leave it running; with a lifeline, a file descriptor, until its other end is closed.

    Raises: EmulationError if one of that name runs, a tool is missing, or the kernel does not allow it to this user.
    """
    path = _require_tools(environ)
    folder = root / plan.name
    found = load(folder)
    if found and is_alive(found):
        raise EmulationError(
            f"{plan.name} already runs: end it by bigbatch launch emulate down --name {plan.name}, or name another"
        )
    if found:
        shutil.rmtree(folder)  # its keeper has ended, after a crash or a reboot
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise EmulationError(
            f"{plan.name} is being started, or its start was cut short: bigbatch launch emulate down --name {plan.name}"
        ) from None
    try:
        answer = _start_keeper(plan, folder=folder, environ=dict(environ) | {"PATH": path}, lifeline=lifeline)
        cluster = load(folder)
        if answer != "ok" or cluster is None:
            raise EmulationError(f"this machine cannot emulate a cluster ({answer}); it {NAMESPACES_HINT}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # `down` may have been faster
        raise
    return cluster


def _start_keeper(plan: ClusterPlan, *, folder: Path, environ: Mapping[str, str], lifeline: int | None) -> str:
    argv = [*python_argv(), "-m", "bigbatch.tools.emulate.keeper", str(folder), json.dumps(asdict(plan))]
    keeper = subprocess.Popen(
        [*argv, "once"] if lifeline is not None else argv,
        env=environ,
        stdin=subprocess.DEVNULL if lifeline is None else lifeline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    answer = ""
    try:
        answer = keeper.stdout.read().strip()
    finally:
        if answer != "ok":
            with suppress(ProcessLookupError):
                os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
    return answer.splitlines()[-1] if answer else "no answer"


def _require_tools(environ: Mapping[str, str]) -> str:
    if sys.platform != "linux":
        raise EmulationError(f"emulate needs Linux, and this is {sys.platform}: run it in a Linux container or machine")
    path = system_path(environ)
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=path) is None:
            raise EmulationError(f"{tool} is not installed: apt-get install iproute2")
    return path


def system_path(environ: Mapping[str, str]) -> str:
    return f"{environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"


def find(name: str, *, root: Path) -> EmulatedCluster:
    """Return the running cluster of that name. Raises: EmulationError if there is none."""
    cluster = load(root / name)
    if cluster is None or not is_alive(cluster):
        raise EmulationError(
            f"no cluster {name} runs: start one by bigbatch launch emulate up --nodes 4 --ranks-per-node 2 "
            "--link 200mbit"
        )
    return cluster


def names(root: Path) -> list[str]:
    """Return the names of all clusters that were started and not removed, running or not."""
    return sorted(folder.name for folder in root.iterdir())


def down(name: str, *, root: Path) -> bool:
    """Remove a cluster and all that runs in it; return False if there was none.

    Raises: EmulationError if the kernel does not end it within END_SECONDS.
    """
    folder = root / name
    cluster = load(folder)
    if cluster and is_alive(cluster):
        end(cluster)
    if not folder.exists():
        return False
    with suppress(FileNotFoundError):  # another `down`, or the keeper of a cluster for one job, was faster
        shutil.rmtree(folder)
    return True


def end(cluster: EmulatedCluster) -> None:
    """End all processes of a cluster, and keep its folder. Raises: EmulationError as `down` does."""
    with suppress(ProcessLookupError):
        keeper = os.pidfd_open(cluster.keeper)
        try:
            if is_alive(cluster):  # the number still belongs to our process, and from here on cannot belong to another
                signal.pidfd_send_signal(keeper, signal.SIGKILL)
            poll = select.poll()  # select takes no descriptor above 1023
            poll.register(keeper, select.POLLIN)
            if not poll.poll(END_SECONDS * 1000):
                raise EmulationError(
                    f"{cluster.plan.name} does not end: a stopped process waits outside; kill -9 what `bigbatch "
                    f"launch emulate run` runs, and repeat this command"
                )
        finally:
            os.close(keeper)


def count(cluster: EmulatedCluster) -> tuple[LinkBytes, ...] | None:
    """Count the bytes on each link so far; None if the cluster has ended."""
    with suppress(OSError, KeyError):  # it may end meanwhile, its ports before its keeper
        if is_alive(cluster):
            # the keeper is in the switch's network
            text = Path(f"/proc/{cluster.keeper}/net/dev").read_text()
            return parse_counters(text, num_nodes=cluster.plan.num_nodes)
    return None


def format_table(counted: Sequence[LinkBytes]) -> str:
    """Return the counts as a text table; MB is 1e6 bytes."""
    rows = [f"{each.host:6}{each.sent_bytes / 1e6:15.3f}{each.received_bytes / 1e6:15.3f}" for each in counted]
    return "\n".join([f"{'node':6}{'sent MB':>15}{'received MB':>15}", *rows])


@contextmanager
def reporting_lost_cluster(cluster: EmulatedCluster) -> Iterator[None]:
    """Raise EmulationError for any system error inside, such as after the cluster was removed."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        what = error if isinstance(error, OSError) else "a process could not enter its node"
        raise EmulationError(
            f"{cluster.plan.name}: {what}; was it taken down, or the working directory removed? "
            "bigbatch launch emulate status"
        ) from error


def join(cluster: EmulatedCluster) -> None:
    """Put later children of this single-threaded process into the cluster. Raises: EmulationError."""
    with reporting_lost_cluster(cluster):
        namespaces.enter_cluster(cluster.keeper)
    if not is_alive(cluster):  # the process number may have been reused before we entered
        raise EmulationError(
            f"{cluster.plan.name} was taken down meanwhile: bigbatch launch emulate status shows what is up"
        )


def shape(
    cluster: EmulatedCluster, *, rate: int | None, root: Path, environ: Mapping[str, str], node: int | None = None
) -> EmulatedCluster:
    """Change the rate of all links, or of one node's, at once, also under a running job. Raises: EmulationError."""
    path = _require_tools(environ)
    changed = replace(cluster, plan=replace(cluster.plan, rate=rate)) if node is None else cluster
    with reporting_lost_cluster(cluster):
        for each in range(cluster.plan.num_nodes) if node is None else (node,):
            for device, where in (("eth0", each), (port(each), None)):
                for argv in shape_commands(device, rate):
                    run_inside(cluster, argv, node=where, environ=dict(environ) | {"PATH": path})
        save(root / cluster.plan.name, changed)
    return changed


def run_inside(
    cluster: EmulatedCluster, argv: list[str], *, node: int | None, environ: Mapping[str, str], has_joined: bool = False
) -> None:
    """Run a tool in the network of a node, or of the switch. has_joined: this process has called join."""

    def enter() -> None:
        if not has_joined:
            namespaces.enter_cluster(cluster.keeper)
        fd = f"fd/{namespaces.node_fd(node, 'net')}" if node is not None else "ns/net"
        namespaces.enter(f"/proc/{cluster.keeper}/{fd}")

    done = subprocess.run(argv, preexec_fn=enter, env=environ, input="", capture_output=True, text=True)
    if done.returncode != 0:
        raise EmulationError(f"{' '.join(argv)}: {done.stderr.strip()}")


@contextmanager
def exclusive_job(cluster: EmulatedCluster, *, root: Path) -> Iterator[None]:
    """Let one job run at a time: two would share the links, and neither figure would be valid.

    Raises: EmulationError if another job runs, or the cluster has ended.
    """
    with reporting_lost_cluster(cluster):
        fd = os.open(root / cluster.plan.name, os.O_RDONLY)
    try:
        if not try_lock(fd):
            raise EmulationError(f"a job is running in {cluster.plan.name}: wait for it, or use another --name")
        yield
    finally:
        os.close(fd)
