"""Launchers by name; a launcher is loaded when it is named."""

from bigbatch.errors import JobRefused, or_nearest
from bigbatch.launch.launchers.base import Launcher
from bigbatch.parts import load

LAUNCHERS = {
    "local": (
        "bigbatch.launch.launchers.local.LAUNCHER",
        "start ranks on this host, without MPI; with --nodes, on each host",
    ),
    "mpirun": ("bigbatch.launch.launchers.mpirun.LAUNCHER", "start ranks by Open MPI's mpirun"),
    "torchrun": (
        "bigbatch.launch.launchers.torchrun.LAUNCHER",
        "start this host's ranks by torchrun; with --nodes, on each host",
    ),
    "slurm": (
        "bigbatch.launch.launchers.slurm.LAUNCHER",
        "submit a job, which saves a checkpoint before its time limit, requeues itself and resumes",
    ),
    "flux": ("bigbatch.launch.launchers.flux.LAUNCHER", "start ranks by flux run"),
    "k8s": ("bigbatch.launch.launchers.k8s.LAUNCHER", "submit a JobSet to Kubernetes"),
}
"""Name -> import path, and its line of the help, in the order of the help."""
ACTIONS = ("preflight", "status", "cancel", "emulate")
"""Other subcommands of `bigbatch launch`."""


def load_launcher(name: str) -> Launcher:
    """Import a launcher. Raises: UserError if there is none of this name."""
    if name not in LAUNCHERS:
        raise JobRefused([f"{name} is not one of {', '.join((*LAUNCHERS, *ACTIONS))}{or_nearest(name, LAUNCHERS)}"])
    launcher: Launcher = load(LAUNCHERS[name][0])
    return launcher
