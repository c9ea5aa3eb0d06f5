"""What the environment says of the user: folders, site files, and settings of libraries."""

import contextlib
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from bigbatch.files import parse_json
from bigbatch.paths import PathError, as_path

COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Read by torch.compile. Its default is in /tmp, which a reboot or a container's end deletes."""
WORKERS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
"""Read by torch.compile. Its default is the number of cores, at most 32, for each rank."""
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Lets NCCL 2.30 connect ranks that share a GPU, also slices of it by MIG."""
LISTED_VARIABLE = "BIGBATCH_GPUS_LISTED"
"""Set by list_gpu_first() for this process; child processes choose by their own ranks."""
SITE_VARIABLE = "BIGBATCH_SITE"
"""Set by `bigbatch launch` for the ranks: settings from each bigbatch.toml, as JSON."""
SITE_FILE_VARIABLE = "BIGBATCH_SITE_FILE"
"""Set by users: the only bigbatch.toml to read; empty: none."""
SYSTEM_SITE_FILE = Path("/etc/bigbatch/bigbatch.toml")


def measured_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of that name for the user's measurements, or None if there is no home."""
    with contextlib.suppress(RuntimeError):
        return _own_folder(environ, "cache") / name
    return None


def runtime_folder(environ: Mapping[str, str] | None) -> str | None:
    """Return the user's folder for runtime files, or None. environ: None for the process's own."""
    return (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR") or None


def site_files(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the site's settings files, nearest first: the existing ones of the user and the system.

    If BIGBATCH_SITE_FILE names one, return only that, existing or not.
    """
    if (named := environ.get(SITE_FILE_VARIABLE)) is not None:
        return [as_path(named)] if named else []
    found = [SYSTEM_SITE_FILE]
    with contextlib.suppress(RuntimeError):  # the user has no home
        found.insert(0, _own_folder(environ, "config") / "bigbatch.toml")
    return [path for path in found if path.exists()]


def site_settings(environ: Mapping[str, str] = os.environ) -> Any:
    """Return the settings that `bigbatch launch` took from site files, by file and option; None if there are none."""
    text = environ.get(SITE_VARIABLE)
    try:
        return parse_json(text) if text else None
    except ValueError:  # not written by bigbatch
        return text


def set_compile_cache(environ: MutableMapping[str, str] = os.environ, *, torchs_own: str | None) -> None:
    """Set the folder in which torch.compile caches code between runs, unless the user has set one.

    torchs_own: torch's default, which it sets and makes at import; None before. It stays without room in the home.
    Ranks, runs and nodes may share the folder: entries are named by their inputs and written atomically.
    """
    if environ.get(COMPILED_VARIABLE, torchs_own) == torchs_own:
        with contextlib.suppress(OSError, RuntimeError, PathError):
            folder = _own_folder(environ, "cache") / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))  # only a write shows a quota
            environ[COMPILED_VARIABLE] = str(folder)


def set_compile_workers(count: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch.compile start at most count processes, unless the user has set a number. Call it before its import."""
    environ.setdefault(WORKERS_VARIABLE, str(count))


def stated_gpus(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES; None: all GPUs."""
    return environ.get("CUDA_VISIBLE_DEVICES")


def states_rdma_ports(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user names the RDMA ports that NCCL uses."""
    return bool(environ.get("NCCL_IB_HCA"))


def visible_gpus(count: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return values of CUDA_VISIBLE_DEVICES for each GPU, of at most count, that this process sees."""
    words = [*map(str, range(count))] if (named := stated_gpus(environ)) is None else named.split(",")
    return [*takewhile(lambda word: word not in ("", "-1"), words)][:count]  # CUDA ends its list there


def may_share_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user lets NCCL connect ranks that share a GPU."""
    return environ.get(SHARING_VARIABLE) == "1"


def list_gpu_first(index: int, *, num_ranks: int, count: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """List one of the first num_ranks of count visible GPUs first, as device 0. Call it before CUDA starts."""
    gpus = visible_gpus(count, environ)
    # only these: the driver's library may count GPUs that CUDA lacks, and CUDA ends its list at the first of those
    listed = ",".join(gpus[index:num_ranks] + gpus[:index] + gpus[num_ranks:])
    environ["CUDA_VISIBLE_DEVICES"] = listed
    environ[LISTED_VARIABLE] = f"{os.getpid()} {index}: {listed}"


def lists_gpu_first(index: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether list_gpu_first() has listed the GPU of this former index first in this process."""
    return environ.get(LISTED_VARIABLE) == f"{os.getpid()} {index}: {stated_gpus(environ)}"


def wandb_settings() -> dict[str, str]:
    """Return the project, name, group and mode for Weights & Biases that the environment states."""
    stated = _stated("WANDB", "project", "name", "mode", "run_group")
    return {name.removeprefix("run_"): value for name, value in stated.items()}


def mlflow_settings(*, default_store: Path, experiment: str) -> dict[str, str]:
    """Return MLflow's tracking_uri, experiment_name and, if set, run_name from the environment.

    Defaults are the folder default_store, and experiment. Newer releases need a variable that allows folders.
    """
    settings = {"experiment_name": experiment, **_stated("MLFLOW", "tracking_uri", "experiment_name", "run_name")}
    if "tracking_uri" not in settings:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        settings["tracking_uri"] = default_store.resolve().as_uri()
    return settings


def _stated(prefix: str, *names: str) -> dict[str, str]:
    """Return the variables PREFIX_NAME that are set and not empty, by name."""
    return {name: value for name in names if (value := os.environ.get(f"{prefix}_{name.upper()}"))}


def _own_folder(variables: Mapping[str, str], kind: str) -> Path:
    """Return the user's folder for config or cache. Raises: RuntimeError if there is no home; PathError."""
    return as_path(variables.get(f"XDG_{kind.upper()}_HOME") or f"{Path.home()}/.{kind}") / "bigbatch"
