"""The folder of a search: whose it is, who works in it, what came out."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bigbatch.errors import TuneError
from bigbatch.files import parse_json, read_plain
from bigbatch.locks import open_lock, try_lock
from bigbatch.trainer.run.folder import RunDir, writing
from bigbatch.trainer.run.resume import changes


@dataclass(frozen=True)
class StudyFolder:
    """Names the paths in a search's folder."""

    path: Path

    @property
    def identity(self) -> Path:
        """Return where it lies what the search is about: its experiment and all that decides which trials there are."""
        return self.path / "search.json"

    @property
    def base(self) -> Path:
        """Return where the whole experiment lies, as trials start from it."""
        return self.path / "base.yaml"

    @property
    def journal(self) -> Path:
        """Return where Optuna's journal lies."""
        return self.path / "journal.log"

    @property
    def best(self) -> Path:
        """Return where the experiment with the best values lies."""
        return self.path / "best.yaml"

    @property
    def plot(self) -> Path:
        """Return where results over values are plotted."""
        return self.path / "search.png"

    @property
    def trials(self) -> Path:
        """Return where all trials lie, one JSON object a line."""
        return self.path / "trials.jsonl"

    def trial(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.path / f"trial-{number:04d}"

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file of the folder in one step. Raises: RunFolderError."""
        RunDir(self.path).write_text(path, text)


def enter(folder: StudyFolder, identity: dict[str, Any]) -> None:
    """Begin a search, or go on with the same one. Raises: TuneError where the folder holds something else."""
    require_own(folder, identity)
    # of a search that goes on, too: what trials import is what this command names
    folder.write_text(folder.base, identity["config"])
    if not folder.identity.exists():
        # last: where it is there, the base is, too
        folder.write_text(folder.identity, json.dumps(identity, indent=1) + "\n")


def require_own(folder: StudyFolder, identity: dict[str, Any]) -> None:
    """Look only. Raises: TuneError where the folder holds another search, or other things."""
    if not folder.identity.exists():
        if not _is_unused(folder):
            raise TuneError(f"{folder.path} is not empty and holds no search: choose another --study")
        return
    try:
        old = parse_json(read_plain(folder.identity))
        odd = _differences(old, identity)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise TuneError(f"{folder.identity} is not readable ({error}): choose another --study") from error
    if odd:
        raise TuneError(
            f"{folder.path} holds another search: {odd[0]}. Repeat its command to go on with it, or choose another "
            "--study"
        )


def _is_unused(folder: StudyFolder) -> bool:
    """Tell whether it holds nothing, or what a search leaves that was killed as it began: its locks come first."""
    if not folder.path.is_dir():
        return True
    names = {path.name for path in folder.path.iterdir()}
    asides = tuple(f".{path.name}." for path in (folder.base, folder.identity))
    if names.issuperset(LOCKS):
        names = {name for name in names if name != folder.base.name and not name.startswith(asides)}
    return names.issubset(LOCKS)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = [f"{key}={value}" for key, value in changes(old["config"], new["config"]).items()]
    for name, value in new.items():
        if name != "config" and value != old[name]:
            found.append(f"--{name} {json.dumps(value)} (was {json.dumps(old[name])})")
    return found


LOCKS = (".search.lock", ".trials.lock")
ORPHAN_SECONDS = 600.0
"""How long trials of a killed search are waited for: assumed, some epochs of a short run."""
ORPHAN_POLL_SECONDS = 0.2


@contextmanager
def alone_in(folder: StudyFolder, *, say: Any) -> Iterator[IO[bytes]]:
    """Keep other searches out meanwhile; yield the file that trials inherit, which stays locked while they live.

    Where a search was killed, its trials may still run: they are waited for a while, since they write where their
    successors would. Raises: TuneError; RunFolderError.
    """
    with ExitStack() as stack:
        with writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            search, trials = (stack.enter_context(open_lock(folder.path / name)) for name in LOCKS)
        if not try_lock(search):
            raise TuneError(f"another search works in {folder.path}: wait for its end, or choose another --study")
        if not try_lock(trials):
            _wait_for_orphans(folder, trials, say=say)
        yield trials


def _wait_for_orphans(folder: StudyFolder, lock: IO[bytes], *, say: Any) -> None:
    path = folder.path / LOCKS[1]
    left = f"trials that a killed search left behind still run in {folder.path}"
    say(f"{left}: waiting up to {ORPHAN_SECONDS:g} s for their end")
    until = time.monotonic() + ORPHAN_SECONDS
    while not try_lock(lock):
        if time.monotonic() > until:
            raise TuneError(
                f"{left} after {ORPHAN_SECONDS:g} s: repeat the command when they have ended, or end them first, they "
                f"are the processes that hold {path} (fuser -v {path})"
            )
        time.sleep(ORPHAN_POLL_SECONDS)
