"""Launchers by name: a table of our own, and entry points of other packages. A launcher is loaded when it is named."""

import re
from importlib.metadata import entry_points

from bigbatch.errors import JobRefused, or_nearest
from bigbatch.launch.launchers.base import Launcher
from bigbatch.parts import load
from bigbatch.trainer.config.dotted import import_owner

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
GROUP = "bigbatch.launchers"
"""Group of the entry points by which other packages add launchers: NAME = "MODULE:LAUNCHER"."""


def find_launchers() -> dict[str, tuple[str, str]]:
    """Return LAUNCHERS with the launchers of other packages, of which none is imported.

    Raises: JobRefused if a package adds a name that is taken, or is no word.
    """
    found = dict(LAUNCHERS)
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else "another package"
        if entry.name in (*found, *ACTIONS) or not re.fullmatch(r"[a-z][a-z0-9_-]*", entry.name):
            taken = ", ".join((*found, *ACTIONS))
            raise JobRefused(
                [
                    f"package {package} adds a launcher by the name {entry.name!r}: rename its entry point to a word "
                    f"of a-z, 0-9, _ and - other than {taken}, or uninstall the package"
                ]
            )
        found[entry.name] = (entry.value.replace(":", "."), f"launcher of the package {package}")
    return found


def load_launcher(name: str) -> Launcher:
    """Import a launcher. Raises: UserError if there is none of this name, or it is no Launcher."""
    if name in LAUNCHERS:
        launcher: Launcher = load(LAUNCHERS[name][0])
        return launcher
    others = find_launchers()
    if name not in others:
        raise JobRefused([f"{name} is not one of {', '.join((*others, *ACTIONS))}{or_nearest(name, others)}"])
    path, source = others[name]
    try:
        module, own_name = import_owner(path)
    except ValueError as error:
        raise JobRefused([f"{name} ({source}): {error}"]) from error
    found = getattr(module, own_name, None)
    if not isinstance(found, Launcher):
        raise JobRefused([f"{name} ({source}): {path} must be a bigbatch.launch.launchers.base.Launcher"])
    return found
