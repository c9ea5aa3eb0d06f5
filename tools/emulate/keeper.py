"""Init process (pid 1) of an emulated cluster; it keeps the nodes' namespaces open.

When it ends, for any reason, the kernel ends every process of the cluster and removes the network. `python -m
bigbatch.tools.emulate.keeper FOLDER PLAN [once]` prints one line when the cluster is up: ok, or an error. With `once`
the cluster and its folder are removed when standard input ends.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from bigbatch.boot import boot_id, start_ticks
from bigbatch.files import write_new
from bigbatch.tools.emulate import namespaces
from bigbatch.tools.emulate.plan import ClusterPlan, host, hosts_file
from bigbatch.tools.emulate.programs import build_commands, port
from bigbatch.tools.emulate.state import EmulatedCluster, save
from bigbatch.tools.emulate.switch import forward, open_port


def main(argv: Sequence[str]) -> None:
    """Fork the keeper, which builds the cluster and does not return; return in the parent, or print an error."""
    folder, facts = Path(argv[0]), json.loads(argv[1])
    plan = ClusterPlan(**facts | {"ranks_per_node": tuple(facts["ranks_per_node"])})
    try:
        if os.geteuid() != 0:
            namespaces.become_root()
        # applies to children only: the first one forked becomes process 1
        namespaces.unshare(namespaces.NEWPID)
        if os.fork() == 0:
            _keep(plan, folder, is_once=argv[2:] == ["once"])
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)}: {error.stderr.strip()}", flush=True)


def _keep(plan: ClusterPlan, folder: Path, *, is_once: bool) -> NoReturn:
    pid = int(os.readlink("/proc/self"))  # in the machine's numbering: /proc is still the machine's
    namespaces.unshare(namespaces.NEWNS | namespaces.NEWUTS | namespaces.NEWNET)  # its own, to return to
    # later mounts of the machine appear here, too; ours do not appear there
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SLAVE)
    # from here on /proc shows the cluster's processes
    namespaces.mount("proc", "/proc", kind="proc")
    own = {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in namespaces.KINDS}
    hosts = folder / "hosts"
    write_new(hosts, hosts_file(plan).encode())
    for node in range(plan.num_nodes):
        _make_node(node, hosts)
        for fd in own.values():
            namespaces.enter(f"/proc/self/fd/{fd}")
    _build(plan)
    ports = [open_port(port(node)) for node in range(plan.num_nodes)] if plan.delay_us else []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the cluster are reaped silently
    save(folder, EmulatedCluster(plan, pid, start_ticks("self") or 0, boot_id()))
    # if the starting process has gone, print raises and the cluster ends; with once the end of stdin ends it
    with suppress(BrokenPipeError) if is_once else nullcontext():
        print("ok", flush=True)
    # the starting process reads until all ends of the pipe are closed
    os.dup2(os.open("/dev/null", os.O_RDWR), sys.stdout.fileno())
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    if is_once:
        threading.Thread(target=_end_with_input, args=[folder], daemon=True).start()
    if ports:
        forward(ports, delay_us=plan.delay_us)
    while True:
        signal.pause()


def _end_with_input(folder: Path) -> None:
    """Wait until standard input is closed; then kill the cluster's processes and remove its folder."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(ProcessLookupError):  # before the job there is none
        os.kill(-1, signal.SIGKILL)  # all but this one, so that no process writes to the folder any more
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _make_node(node: int, hosts: Path) -> None:
    namespaces.unshare(namespaces.NEWNS | namespaces.NEWUTS | namespaces.NEWNET)
    socket.sethostname(host(node))
    namespaces.mount(str(hosts), "/etc/hosts", flags=namespaces.MS_BIND)
    # /sys/class/net shows the network of the process that mounted it; a new /sys comes without the control groups.
    # So a new /sys is built in /dev/shm, which the node's own /dev/shm hides later.
    namespaces.mount("sysfs", "/dev/shm", kind="sysfs")
    if os.path.ismount("/sys/fs/cgroup"):
        both = namespaces.MS_BIND | namespaces.MS_REC
        namespaces.mount("/sys/fs/cgroup", "/dev/shm/fs/cgroup", flags=both)
        namespaces.mount("/dev/shm", "/sys", flags=both)
    else:
        namespaces.mount("/dev/shm", "/sys", flags=namespaces.MS_BIND)
    namespaces.mount("shm", "/dev/shm", kind="tmpfs")
    for kind in namespaces.KINDS:
        fd = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
        # at a number that others can compute, to enter by /proc/KEEPER/fd
        os.dup2(fd, namespaces.node_fd(node, kind), inheritable=False)
        os.close(fd)


def _build(plan: ClusterPlan) -> None:
    """Run the commands that build the network, each in the network namespace of its node or of the switch."""
    nodes = {host(node): namespaces.node_fd(node, "net") for node in range(plan.num_nodes)}
    for place, argv in build_commands(plan):
        enter = partial(namespaces.enter, f"/proc/1/fd/{nodes[place]}") if place in nodes else None
        subprocess.run(argv, preexec_fn=enter, check=True, input="", capture_output=True, text=True)


if __name__ == "__main__":
    main(sys.argv[1:])
