"""Atomic checkpoints: written to a temporary folder, hashed and renamed; loaded without executing code."""

import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigbatch.errors import CheckpointError, DamagedCheckpoint, UserError, first_line, write_failure
from bigbatch.files import (
    WEIGHTS_BYTES,
    as_json,
    create_file,
    flush,
    make_folder,
    open_plain,
    parse_json,
    read_plain,
    sha256_of,
    write_new,
)

FORMAT = 1
STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
REPLACED = ".replaced"
"""Suffix of the hidden name of a checkpoint while another one of the same step replaces it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, as its manifest describes it. top1: None if it was not evaluated."""

    path: Path
    step: int
    top1: float | None
    is_agreed: bool = False
    """Whether all ranks held equal bits when it was saved."""
    val_samples: str | None = None
    """Digest of the validation images that gave top1, if known."""


def checkpoint_path(directory: Path, *, step: int) -> Path:
    return directory / f"step-{step:08d}"


def save_checkpoint(
    directory: Path,
    state: dict[str, Any],
    *,
    step: int,
    top1: float | None,
    keep: int,
    is_agreed: bool = False,
    within: Path | None = None,
    before_naming: Callable[[], None] = lambda: None,
) -> Path:
    """Write directory/step-XXXXXXXX; then delete all but the keep newest and the best, and leftovers of killed writes.

    One rename makes the folder visible after its bytes are on disk. After an interruption at any point the new
    checkpoint or the one that it replaces is listed, with all older ones. within: folder below which no folder may be a
    link (default: directory's parent). before_naming: called before the rename; if it raises, nothing is renamed.
    Raises: CheckpointError naming the path, for example on a full disk; a UserError of before_naming.
    """
    path = checkpoint_path(directory, step=step)
    aside = directory / f".{path.name}.{os.getpid()}"
    try:
        make_folder(directory, within=within or directory.parent)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        with create_file(aside / STATE_FILE) as file:  # given a path, torch would not say why it cannot write
            torch.save(state, file)
        manifest = {
            "format": FORMAT,
            "step": step,
            "top1": top1,
            "is_agreed": is_agreed,
            "val_samples": samples if isinstance(samples := state.get("val_samples"), str) else None,
            "bytes": (aside / STATE_FILE).stat().st_size,
            "sha256": sha256_of(aside / STATE_FILE),
        }
        write_new(aside / MANIFEST_FILE, (as_json(manifest, indent=1) + "\n").encode())
        # before the rename: otherwise a crash could leave the name with empty files
        for part in (aside / STATE_FILE, aside / MANIFEST_FILE, aside):
            flush(part)
        before_naming()
        _put_in_place(aside, path)
    except UserError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    except (OSError, RuntimeError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {path}: {write_failure(path, error)}; correct this and start again"
        ) from error
    _drop_old(directory, keep=keep)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state of an intact checkpoint.

    Raises: CheckpointError naming the path and, if it is damaged, the newest intact checkpoint beside it.
    """
    try:
        return load_intact(path)
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{error}{_other(path)}") from error


def load_intact(path: Path) -> dict[str, Any]:
    """Check size and hash against the manifest, and return the state.

    Raises: DamagedCheckpoint naming the path; CheckpointError if it cannot be read although it may be intact.
    """
    try:
        try:
            manifest = read_manifest(path)
            manifest["format"], manifest["bytes"], manifest["sha256"]
            size = (path / STATE_FILE).stat().st_size
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(f"checkpoint {path} is not readable: {first_line(error)}") from error
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {manifest['format']}, not {FORMAT}")
        if size != manifest["bytes"]:
            raise DamagedCheckpoint(f"checkpoint {path} is truncated: {size} of {manifest['bytes']} bytes")
        if sha256_of(path / STATE_FILE) != manifest["sha256"]:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: its checksum differs")
        return dict(load_tensors(path / STATE_FILE))
    except (OSError, ValueError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} is not readable: {first_line(error)}") from error


def load_tensors(path: Path) -> Any:
    """Load a file of torch.save without executing code. Raises: RuntimeError for a zip bomb; errors of torch.load."""
    with open_plain(path, most=WEIGHTS_BYTES) as file:
        if file.read(4) == b"PK\x03\x04":  # by which torch.load knows an archive
            try:
                with zipfile.ZipFile(file) as archive:
                    num_bytes = sum(entry.file_size for entry in archive.infolist())
            except zipfile.BadZipFile as error:
                raise RuntimeError("it is a damaged zip archive, or ends too soon") from error
            if num_bytes > path.stat().st_size:
                raise RuntimeError(
                    f"its entries are compressed or overlap, {num_bytes} bytes, unlike those of torch.save"
                )
    return torch.load(path, map_location="cpu", weights_only=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises: OSError; ValueError."""
    return dict(parse_json(read_plain(path / MANIFEST_FILE)))


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Guard code that loads a state into a model or optimizer. Raises: CheckpointError if it does not fit."""
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"checkpoint {path} is of another model or optimizer: {reason}") from error


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return all finished checkpoints, oldest first; those without a readable manifest have only a step."""
    found = []
    for path, step in _folders(directory).items():
        try:
            manifest = read_manifest(path)
            top1 = None if manifest["top1"] is None else float(manifest["top1"])
            more = manifest.get("is_agreed", False), manifest.get("val_samples")
            found.append(Checkpoint(path, int(manifest["step"]), top1, *more))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            found.append(Checkpoint(path, step, None))
    return sorted(found, key=lambda c: c.step)


def _folders(directory: Path) -> dict[Path, int]:
    """Return folder -> step of all finished checkpoints. After an interrupted replacement the replaced one counts."""
    named = {int(n): p for p in directory.glob("step-*") if (n := p.name.removeprefix("step-")).isdecimal()}
    for path in directory.glob(f".step-*{REPLACED}"):
        step = path.name.removeprefix(".step-").removesuffix(REPLACED)
        if step.isdecimal():
            named.setdefault(int(step), path)
    return {path: step for step, path in named.items()}


def set_aside_after(directory: Path, *, step: int) -> list[Path]:
    """Rename the checkpoints after a step, since a run that restarts from it will differ; return their new paths."""
    aside = []
    _drop_unfinished(directory)
    for checkpoint in list_checkpoints(directory):
        if checkpoint.step > step:
            # not "step-*", so that it is not listed, resumed or deleted
            aside.append(checkpoint.path.with_name(f"abandoned-{checkpoint.path.name}-{time.time_ns()}"))
            checkpoint.path.rename(aside[-1])
    return aside


def set_damaged_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run resumes from it; return its new path."""
    aside = path.with_name(f"damaged-{path.name.strip('.')}-{time.time_ns()}")
    path.rename(aside)
    return aside


def best_checkpoint(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the highest top-1 on the validation images of the newest evaluated one; of equal ones the newest.

    checkpoints: oldest first.
    """
    evaluated = [c for c in checkpoints if c.top1 is not None]
    comparable = [c for c in evaluated if c.val_samples in (None, evaluated[-1].val_samples)]
    return max(comparable, key=lambda c: (c.top1, c.step), default=None)


def best_or_newest(directory: Path, *, remedy: str) -> Path:
    """Return the path of the best checkpoint; of the newest if none was evaluated.

    Raises: CheckpointError with the remedy if there is none.
    """
    found = list_checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint: train the run first, or {remedy}")
    return (best_checkpoint(found) or found[-1]).path


def require_free_disk(directory: Path, *, num_bytes: int) -> None:
    """Refuse to start a run whose checkpoints cannot fit. Raises: CheckpointError with both sizes."""
    try:
        make_folder(directory, within=directory.parent)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise CheckpointError(f"cannot create {directory}: {error.strerror}; choose another run.directory") from error
    if free < num_bytes:
        raise CheckpointError(
            f"{directory} has {free / 1e6:.0f} MB free and checkpoints need {num_bytes / 1e6:.0f} MB: free some disk, "
            "or choose another run.directory"
        )


def _put_in_place(aside: Path, path: Path) -> None:
    """Rename aside to path; a checkpoint of the same step (saved before its evaluation) first becomes REPLACED."""
    if path.exists():
        replaced = path.with_name(f".{path.name}{REPLACED}")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    aside.rename(path)
    # a rename is on disk after its folder is synchronized
    flush(path.parent)


def _drop_old(directory: Path, *, keep: int) -> None:
    checkpoints = list_checkpoints(directory)
    kept = {c.path for c in checkpoints[-keep:]}
    for each in checkpoints:
        if best := best_checkpoint([c for c in checkpoints if c.val_samples == each.val_samples]):
            kept.add(best.path)
    _drop_unfinished(directory)
    for checkpoint in checkpoints:
        if checkpoint.path not in kept:
            shutil.rmtree(checkpoint.path, ignore_errors=True)


def _drop_unfinished(directory: Path) -> None:
    """Delete leftovers of killed writes, before any rename: they could be listed afterwards."""
    listed = _folders(directory)
    for unfinished in directory.glob(".step-*"):
        if unfinished not in listed:
            shutil.rmtree(unfinished, ignore_errors=True)


def _other(path: Path) -> str:
    """Name the newest other checkpoint whose size fits its manifest."""
    for other in (each.path for each in reversed(list_checkpoints(path.parent)) if each.path != path):
        try:
            manifest = read_manifest(other)
            # by size only: hashing every checkpoint for an error message would take long
            if (other / STATE_FILE).stat().st_size == manifest["bytes"]:
                return f"; another one is {other}"
        except (OSError, ValueError, KeyError):
            continue
    return "; there is no other one"
