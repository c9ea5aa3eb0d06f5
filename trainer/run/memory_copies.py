"""Copies of a run's state in node memory: after the loss of a node a run resumes from one without reading a disk.

All ranks hold the same state, so the first rank of each node keeps a copy, and one remaining node is enough.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import broadcast_object
from bigbatch.errors import CheckpointError, tell
from bigbatch.files import make_folder, mode_of_own, read_plain, write_whole
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.remedies import MEMORY
from bigbatch.trainer.machine.cgroup import free_memory
from bigbatch.trainer.run.background import BackgroundWrite
from bigbatch.trainer.run.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_intact,
    read_manifest,
    save_checkpoint,
    write_on_first,
)
from bigbatch.trainer.run.folder import RunDir, writing

KEY = "run.memory_every_steps"
NAME = re.compile(r"bigbatch-[0-9a-f]{16}-[0-9a-f]{16}")
WRITE_SECONDS = 60.0
"""Time limit of a copy to memory."""
LEAVE_SECONDS = 5.0
"""How long a rank that ends waits for a copy."""
PRIVATE = 0o700
COPIES_IN_MEMORY = 3
"""Copies in memory at the same time: the newest, the next one, and its source."""


@dataclass(frozen=True)
class FoundCopy:
    """The state of a copy that a node kept."""

    path: Path
    host: str
    sha256: str
    state: dict[str, Any]


class MemoryCopies:
    """Keeps a run's newest state in node memory; only the first rank of each node does so.

    folder: of this run in node memory. Each host has a folder in it, since several hosts may share a memory.
    """

    def __init__(self, folder: Path, communicator: Communicator) -> None:
        self._folder, self._communicator = folder, communicator
        self._is_keeper = communicator.rank in communicator.topology.leaders
        self._write: BackgroundWrite | None = None
        self._has_failed = False
        self._num_bytes = 0

    def find(self, *, above: int) -> FoundCopy | None:
        """Return on all ranks the newest intact copy after step `above` that a node has. Collective."""
        communicator, control = self._communicator, self._communicator.control
        held = self._held() if self._is_keeper else []
        while True:
            # ranks may list different checkpoints but must decide alike
            told = control.gather_text(f"{held[-1].step if held else 0} {above}", what="copies in memory")
            steps, least = ([int(word) for word in words] for words in zip(*map(str.split, told), strict=True))
            if max(steps) <= max(least):
                return None
            holder = steps.index(max(steps))
            said, state = "", {}
            if communicator.rank == holder:
                path = held.pop().path
                try:
                    state = load_intact(path)
                    said = json.dumps([str(path), communicator.env.host, read_manifest(path)["sha256"]])
                except (CheckpointError, OSError) as error:
                    tell(f"a copy of the run in memory is not used: {error}")
            word = control.gather_text(said, what="copy in a node's memory")[holder]
            if word:
                path_text, host, sha256 = json.loads(word)
                return FoundCopy(Path(path_text), host, sha256, broadcast_object(state, communicator, root_rank=holder))

    def require_room(self, *, num_bytes: int) -> None:
        """Check that every node has memory for the state. Collective. Raises: CheckpointError on all ranks."""
        self._num_bytes = num_bytes
        lacks = self._lack(num_bytes * COPIES_IN_MEMORY) if self._is_keeper else ""
        for text in self._communicator.control.gather_text(lacks, what="room for copies in memory"):
            if text:
                raise CheckpointError(text)

    def keep(self, state: dict[str, Any], *, step: int, is_agreed: bool) -> None:
        """Start a copy of the state after so many steps; it replaces the previous one. Not collective.

        A failure is printed once: the run still has its checkpoints on disk.
        """
        if not self._is_keeper or self._has_failed:
            return
        started = awake_seconds()
        if self._write is not None and not self._write.ends_within(0.0):
            # skip this copy: no step waits for slow memory
            if started - self._write.started > WRITE_SECONDS:
                self._write.abandon()
                self._fail(TimeoutError(f"a copy takes more than {WRITE_SECONDS:g} s"))
            return
        self.settle()
        if self._has_failed:
            return
        left, needed = free_memory(), self._num_bytes * (COPIES_IN_MEMORY - 1)
        if left is not None and left < needed:  # others used the memory: writing beyond it would kill the process
            self._fail(MemoryError(f"{left / 1e6:.0f} MB are left, and the next copy takes {needed / 1e6:.0f} MB"))
            return

        def write(copied: Any, require_wanted: Callable[[], None]) -> None:
            self._folder.mkdir(mode=PRIVATE, exist_ok=True)  # there may be room again
            if not _is_own(self._folder):
                raise CheckpointError(f"{self._folder} is not this user's alone")
            save_checkpoint(
                self._own,
                copied,
                step=step,
                top1=None,
                keep=1,
                is_agreed=is_agreed,
                before_naming=require_wanted,
            )

        self._write = BackgroundWrite(state, write, name=f"copy of step {step} in memory", started=started)

    def drop(self) -> None:
        """Free the memory after all is on disk. Not collective."""
        self.settle()
        if self._is_keeper:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _own(self) -> Path:
        return self._folder / self._communicator.env.host

    def settle(self) -> None:
        """Wait at most LEAVE_SECONDS for a copy under way. Not collective."""
        if self._write is not None:
            if not self._write.ends_within(LEAVE_SECONDS):
                self._write.abandon()
            elif self._write.error is not None:
                self._fail(self._write.error)
            self._write = None

    def _fail(self, error: BaseException) -> None:
        self._has_failed = True
        reason = str(error) or type(error).__name__
        tell(f"{self._communicator.env.host} keeps no copy of the run in memory any more: {reason}")

    def _held(self) -> list[Checkpoint]:
        """Return the copies in this node's memory, oldest first; none if another user could have written them."""
        if not _is_own(self._folder):
            return []
        found = [each for host in self._folder.iterdir() for each in list_checkpoints(host)]
        return sorted(found, key=lambda each: each.step)

    def _lack(self, num_bytes: int) -> str:
        """Return what this node lacks, or ""; create the folder and delete copies of earlier runs in it."""
        host = self._communicator.env.host
        try:
            for other in self._folder.parent.glob(f"{self._folder.name.rpartition('-')[0]}-*"):
                if other != self._folder and _is_own(other):
                    shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(mode=PRIVATE, exist_ok=True)
            room = shutil.disk_usage(self._folder).free
            held = sum(path.stat().st_size for path in self._folder.glob("*/*/*"))
        except OSError as error:
            return f"{KEY}: {self._folder} of {host} cannot be used ({error.strerror}); set it to 0"
        if not _is_own(self._folder):
            return f"{KEY}: {self._folder} of {host} is not this user's alone; remove it, or set it to 0"
        left = free_memory()
        free = held + (room if left is None else min(room, left))
        if free < num_bytes:
            return (
                f"{KEY}: {host} has {free / 1e6:.0f} MB of memory left for files, and {COPIES_IN_MEMORY} copies of the "
                f"state take {num_bytes / 1e6:.0f} MB: give the job more, or set it to 0"
            )
        return ""


def open_copies(config: Config, communicator: Communicator, *, memory: Path = Path(MEMORY)) -> MemoryCopies | None:
    """Return the copies of this run; None if it keeps none. Collective.

    A run that does not start from its own newest state uses no earlier copy.
    """
    if config.run.memory_every_steps == 0:
        return None
    rundir = RunDir(Path(config.run.directory))

    def name() -> str:
        path = rundir.memory_name
        if config.run.resume == "auto":
            with suppress(OSError, ValueError):  # none yet, or not a copy
                if NAME.fullmatch(known := read_plain(path).decode().strip()):
                    return known
        # random, since checkpoints may be deleted and written again while a node still has old copies; the
        # digest is of the folder's path, which may belong to another run elsewhere
        with writing(path):
            make_folder(path.parent, within=rundir.path)
            found = rundir.path.stat()
            facts = (os.fsencode(rundir.path.resolve()), str(found.st_dev).encode(), str(found.st_ino).encode())
            digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
            drawn = f"bigbatch-{digest}-{secrets.token_hex(8)}"
            write_whole(path, f"{drawn}\n".encode())
        return drawn

    told = write_on_first(
        name,
        communicator.control,
        what="name of the copies in memory",
        timeout_seconds=config.run.checkpoint_timeout_seconds,
    )
    return MemoryCopies(memory / told, communicator)


def _is_own(folder: Path) -> bool:
    """Return whether a folder exists that no other user can write to."""
    try:
        return mode_of_own(folder) == PRIVATE
    except OSError:
        return False
