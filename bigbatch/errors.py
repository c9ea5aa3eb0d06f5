"""The root of all errors whose one-line message is for the user, not for a developer; what they suggest."""

import difflib
import errno
import re
import reprlib
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from bigbatch.exit_codes import CRASHED, DIFFERENT, FAILED, LOST, REFUSED


class UserError(Exception):
    """A user can mend this; the message names the thing and what to do. Each argument is a line of it."""

    exit_code = FAILED
    """Exit code of a process that this error ends."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that this error ends; CRASHED for one that is not for a user."""
    return error.exit_code if isinstance(error, UserError) else CRASHED


class ConfigError(UserError, ValueError):
    """Settings are wrong; each argument is a line that names the key, the value and a legal one."""


class DataError(UserError, RuntimeError):
    """An image, folder or data set is unusable; the message names the path."""


class StorageError(DataError):
    """The storage of a data set is at fault, and not one image: no policy skips it."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read, written or used here; the message names the path."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was written: cut off, changed, or without one of its files."""


class ExportError(UserError, RuntimeError):
    """A model cannot be exported so, or what was exported computes something else."""


class ComputeError(UserError, RuntimeError):
    """This machine cannot compute the model as asked for; the message tells why, and what to do."""


class OutOfMemory(UserError, RuntimeError):
    """A run does not fit into memory; the message says what does."""


class RunFolderError(UserError, RuntimeError):
    """The run folder cannot be written, or does not hold what is asked of it; the message names the path."""


class TrainingDiverged(UserError, RuntimeError):
    """The loss or a weight is not finite any more; the message names the step."""


class ReplicasDiffer(UserError, RuntimeError):
    """The ranks do not hold the same weights any more; the message names step, ranks and tensor."""

    exit_code = DIFFERENT


class TuneError(UserError, RuntimeError):
    """A search or a range test cannot start or go on; the message names its folder, or what happened."""


class DoctorError(UserError, RuntimeError):
    """A config could not be measured; the message says why."""


class CommError(UserError, RuntimeError):
    """Communication could not be set up or carried out; the message says what to do."""


class PeerLostError(CommError):
    """A peer died or stalled; the message names operation, seconds waited and the missing ranks."""

    exit_code = LOST


class LaunchError(UserError, ValueError):
    """The environment describes no rank of a job; the message names the variable and its value."""


class TunedError(UserError, ValueError):
    """A tuned file is unreadable, or of another cluster or model; the message names the file and what to do."""


class EmulationError(UserError, RuntimeError):
    """The cluster cannot be built, found or left; the message says what to do."""


class FaultError(UserError, ValueError):
    """A campaign of faults or one of its trials cannot be as asked for; the message says what can."""

    exit_code = REFUSED


class SimulationError(UserError, ValueError):
    """A cluster, a profile or a table of rows cannot be simulated; the message names it and what is wrong."""


class LaunchOptionError(UserError, ValueError):
    """An option of launch, sweep or report is wrong, or a folder is another one's; the message tells how."""


class JobRefused(LaunchOptionError):
    """All that is wrong with a job, found before anything starts: a line for each finding."""

    exit_code = REFUSED

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        first = [f"nothing was started, for {len(findings)} reasons:"] if len(findings) > 1 else []
        super().__init__(*(f"{'  ' * (number > 0)}{line}" for number, line in enumerate([*first, *findings])))


class SchedulerError(UserError, RuntimeError):
    """A scheduler refused, or its programs are not here; the message holds its words."""


LEAST_LIKENESS = 0.6
"""Least similarity for difflib: less similar names are not suggested."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like a misspelt one; empty where none is like it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=LEAST_LIKENESS)), "")


def or_nearest(word: str, known: Iterable[str], *, words: str = "the nearest is") -> str:
    """Return the end of a message's clause, such as '; the nearest is sweep'; empty where none is like it."""
    near = nearest(word, known)
    return f"; {words} {near}" if near else ""


def printable(text: str) -> str:
    """Return text in one line that no terminal obeys: a file name may hold line ends, escapes and what is no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return text that no terminal obeys, with its line ends: for text in which names are printable already."""
    return "\n".join(map(printable, text.split("\n")))


def print_line(text: str, *, file: TextIO | None = None) -> None:
    """Print one line, on stdout where file is None, whatever names it holds, and flush."""
    print(printable(text), file=file, flush=True)


def print_lines(text: str, *, file: TextIO | None = None) -> None:
    """Print lines that no terminal obeys, on stdout where file is None, and flush."""
    print(printable_lines(text), file=file, flush=True)


def tell(*lines: object) -> None:
    """Say something to the user on stderr in one write, so that no other process's words come between.

    Where nobody can read it, it is not said: what happens next does not depend on that.
    """
    if sys.stderr is not None:  # as where the process was started without one
        with suppress(OSError, ValueError):
            sys.stderr.write("bigbatch: " + "\n".join(printable(str(line)) for line in lines) + "\n")
            sys.stderr.flush()


FOLLOWS = re.compile(r" ended with exit code \d+(; ending the others)?$")
"""What a launcher tells of a rank that has said itself why it ended: no reason, where there is another line."""


def shortened(value: object) -> str:
    """Return a value's repr for a message: of a long text or list the ends alone."""
    return _SHORTENED.repr(value)


_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring, _SHORTENED.maxother = 80, 200


def first_line(error: BaseException) -> str:
    """Cut an error's text to its first line, without the place in the C++ sources where it was raised."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\.\w+:\d+\]\s*", "", text.splitlines()[0])


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk, or of a user's share of it, that is full."""


def find_os_error(error: BaseException) -> OSError | None:
    """Return the system's error behind that of a library which writes; None if there is none."""
    if isinstance(error, OSError) or error.__context__ is None:
        return error if isinstance(error, OSError) else None
    return find_os_error(error.__context__)


def why_unwritten(path: Path, error: Exception) -> str:
    """Return the reason why path was not written, the system's if there is one, and the free space of a full disk."""
    system = find_os_error(error)
    reason = first_line(error) if system is None else system.strerror or str(system)
    if system is not None and system.errno in FULL:
        with suppress(OSError):
            reason += f", {shutil.disk_usage(path.parent).free / 1e6:.3g} MB are free there"
    return reason
