"""Lose nodes on purpose while a job runs: kill, stop or cut off a node at a stated step."""

import argparse
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import LaunchOptionError, tell
from bigbatch.tools.emulate import namespaces
from bigbatch.tools.emulate.cluster import run_inside, system_path
from bigbatch.tools.emulate.plan import host, parse_node
from bigbatch.tools.emulate.programs import cut_command, port
from bigbatch.tools.emulate.state import EmulatedCluster
from bigbatch.trainer.folder.folder import read_records_from

KINDS = {
    "kill": ("killed", "kill all processes of a node, like a power failure"),
    "stop": ("stopped", "stop all processes of a node (SIGSTOP), like a frozen host"),
    "cut": ("cut off", "drop all packets from and to a node, like a dead switch; `shape` fixes the link"),
}
"""Option -> what it does to the node, and its help."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Loss:
    """A node that is lost at the first report of that step or a later one."""

    kind: str
    node: int
    step: int

    def __str__(self) -> str:
        return f"--{self.kind} {host(self.node)}@step={self.step}"


def parse_losses(arguments: argparse.Namespace, *, num_nodes: int) -> tuple[Loss, ...]:
    """Return the losses that the command line states, in the order of their steps. Raises: LaunchOptionError."""
    stated = [(kind, text) for kind in KINDS for text in getattr(arguments, kind) or ()]
    losses = [_parse_loss(kind, text, num_nodes=num_nodes) for kind, text in stated]
    return tuple(sorted(losses, key=lambda loss: loss.step))


def _parse_loss(kind: str, text: str, *, num_nodes: int) -> Loss:
    match = re.fullmatch(r"(\w+)@step=([1-9]\d{0,8})", text, re.ASCII)
    if not match:
        raise LaunchOptionError(f"--{kind} {text!r}: name a node and a step, such as --{kind} n1@step=50")
    return Loss(kind, parse_node(match[1], num_nodes=num_nodes, option=f"--{kind}"), int(match[2]))


class FaultInjector:
    """Causes each loss once, after the report of its step: call it repeatedly. metrics: file of the run's reports."""

    def __init__(
        self, losses: tuple[Loss, ...], *, metrics: Path, cluster: EmulatedCluster, environ: Mapping[str, str]
    ) -> None:
        self._metrics, self._cluster, self._environ = metrics, cluster, environ
        self.left = list(losses)
        self._offset = _size(metrics)  # reports of an earlier start do not count

    def __call__(self) -> None:
        """Cause the losses that are due. Raises: EmulationError; RunFolderError; OSError."""
        for step in self._new_steps() if self.left else ():
            while self.left and self.left[0].step <= step:
                self._cause(self.left.pop(0), step=step)

    def _new_steps(self) -> Iterator[int]:
        self._offset = min(self._offset, _size(self._metrics))  # a resumed run removes the reports of lost steps
        # if the file has shrunk and grown again since the last call, it begins within a line, whose rest is no record
        for end, record in read_records_from(self._metrics, start=self._offset):
            self._offset = end
            if record["kind"] == "train" and isinstance(step := record.get("step"), int):
                yield step

    def _cause(self, loss: Loss, *, step: int) -> None:
        if loss.kind == "cut":
            environ = dict(self._environ) | {"PATH": system_path(self._environ)}
            for device, where in (("eth0", loss.node), (port(loss.node), None)):
                run_inside(self._cluster, cut_command(device), node=where, environ=environ, has_joined=True)
        else:
            _signal_node(self._cluster.keeper, loss.node, SIGNALS[loss.kind])
        tell(f"{loss}: {host(loss.node)} was {KINDS[loss.kind][0]} after the report of step {step}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _signal_node(keeper: int, node: int, number: signal.Signals) -> None:
    """Send a signal to all processes whose network is the node's."""
    own = os.stat(f"/proc/{keeper}/fd/{namespaces.node_fd(node, 'net')}").st_ino
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is not ours
            process = os.pidfd_open(int(name))
            try:
                if os.stat(f"/proc/{name}/ns/net").st_ino == own:  # of this process: its descriptor is open
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)
