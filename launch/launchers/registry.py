"""Launchers by name: a table of our own, and entry points of other packages. A launcher is loaded when it is named."""

import re
from collections import Counter
from importlib.metadata import EntryPoint, entry_points

from bigbatch.errors import JobRefused, first_line, or_nearest, printable
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
GROUP = "bigbatch.launchers"
"""Group of the entry points by which other packages add launchers: NAME = "MODULE:LAUNCHER"."""


def find_launchers() -> tuple[dict[str, str], dict[str, EntryPoint], list[str]]:
    """Return lines of the help by name, entry points of other packages by name, and what is wrong with others.

    Imports none of them. Our own names win; a name that two packages add is not used.
    """
    helps = {name: text for name, (_, text) in LAUNCHERS.items()}
    others: dict[str, EntryPoint] = {}
    wrong = []
    try:
        found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    except Exception as error:  # files of other packages may hold anything
        return helps, {}, [f"the entry points of installed packages cannot be read: {first_line(error)}"]
    counts = Counter(entry.name for entry in found)
    for entry in found:
        package = printable(entry.dist.name if entry.dist else "another package")
        is_taken = entry.name in (*LAUNCHERS, *ACTIONS) or counts[entry.name] > 1
        if is_taken or not re.fullmatch(r"[a-z][a-z0-9_-]*", entry.name):
            wrong.append(
                f"package {package} adds a launcher by the name {entry.name!r}, which is not used: rename its entry "
                "point to a word of a-z, 0-9, _ and - that no other launcher has, or uninstall the package"
            )
        else:
            helps[entry.name], others[entry.name] = f"launcher of the package {package}", entry
    return helps, others, wrong


def load_launcher(name: str) -> Launcher:
    """Import a launcher. Raises: UserError if there is none of this name, or it is no Launcher."""
    if name in LAUNCHERS:
        launcher: Launcher = load(LAUNCHERS[name][0])
        return launcher
    helps, others, wrong = find_launchers()
    if name not in others:
        known = ", ".join((*helps, *ACTIONS))
        raise JobRefused([f"bigbatch launch {name}: {name} is not one of {known}{or_nearest(name, helps)}", *wrong])
    entry = others[name]
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise JobRefused([f"{name} ({helps[name]}): loading {printable(entry.value)} fails: {reason}"]) from error
    if not isinstance(found, Launcher):
        raise JobRefused(
            [f"{name} ({helps[name]}): {printable(entry.value)} must be a bigbatch.launch.launchers.base.Launcher"]
        )
    return found
