"""Records of running clusters: a folder for each, which only its user can read."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bigbatch.boot import boot_id, start_ticks
from bigbatch.errors import EmulationError
from bigbatch.files import mode_of_own, parse_json, read_plain, write_whole
from bigbatch.tools.emulate.plan import ClusterPlan
from bigbatch.user_settings import runtime_folder


@dataclass(frozen=True)
class EmulatedCluster:
    """A cluster that was built. keeper: number of the process that holds it; the cluster ends with that process."""

    plan: ClusterPlan
    keeper: int
    start_ticks: int
    """When the keeper started: another process may get its number later."""
    boot_id: str
    """Boot ID of the kernel that ran it: ticks count from boot."""


def state_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of this user's clusters, which is made if needed.

    Raises: EmulationError if other users own it or can write to it: they could then name processes to end.
    """
    runtime = runtime_folder(environ)
    if runtime and _owner(Path(runtime)) == os.geteuid():
        root = Path(runtime) / "bigbatch-emulate"
    else:
        root = Path(tempfile.gettempdir()) / f"bigbatch-emulate-{os.geteuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EmulationError(f"{root} cannot be made a folder: {error.strerror}; move it away") from error
    mode = mode_of_own(root)
    if mode is None or mode & 0o077:
        raise EmulationError(f"{root} is not a folder of this user alone; move it away, or chmod 700 what is yours")
    return root


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def save(folder: Path, cluster: EmulatedCluster) -> None:
    write_whole(folder / "cluster.json", json.dumps(asdict(cluster)).encode())


def load(folder: Path) -> EmulatedCluster | None:
    """Return the cluster's record; None if there is no readable one."""
    try:
        facts = parse_json(read_plain(folder / "cluster.json"))
        plan = facts["plan"] | {"ranks_per_node": tuple(facts["plan"]["ranks_per_node"])}
        return EmulatedCluster(
            ClusterPlan(**plan), int(facts["keeper"]), int(facts["start_ticks"]), str(facts["boot_id"])
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def is_alive(cluster: EmulatedCluster) -> bool:
    return cluster.boot_id == boot_id() and start_ticks(cluster.keeper) == cluster.start_ticks
