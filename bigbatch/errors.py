"""Errors with a one-line message for the user, their exit codes, collection and suggestions; printing of messages."""

import difflib
import errno
import re
import reprlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import format_exception, walk_tb
from types import TracebackType
from typing import Any, TextIO

# The command's exit codes other than 0; docs/failure-model.md explains them.
FAILED = 1
"""An error that one line explains, or a check found something wrong."""
REFUSED = 2
"""The command line or a job was refused before it started: nothing was done."""
SOME_FAILED = 3
"""Some points of a sweep or trials of faults failed, or some images of `predict` cannot be read."""
UNFIT = 4
"""Something is wrong with a node, or between nodes."""
DIFFERENT = 5
"""Ranks hold different weights at the start, or again after a rollback; or diff or replay found a difference."""
LOST = 6
"""Another rank was lost: the same command resumes from the newest checkpoint."""
CRASHED = 7
"""Unexpected error: a defect of bigbatch, a driver or a device. A traceback shows where."""
INTERRUPTED = 130
"""Stopped by request, as by Ctrl-C; the shell's own code for it."""
PIPE_CLOSED = 141
"""The reader of the output has ended; the shell's own code for SIGPIPE."""


class UserError(Exception):
    """An error that a user can fix; the message names the cause and what to do. Each argument is one line."""

    exit_code = FAILED
    """Exit code of a process that ends by this error."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))

    def __reduce__(self) -> tuple[Any, ...]:  # without __init__, whose arguments may be others than args
        return type(self).__new__, (type(self), *self.args), self.__dict__


def pip_install(extra: str) -> str:
    """Return the command that installs an extra: from the sources, since bigbatch is on no package index yet."""
    return f"pip install -e '.[{extra}]' in bigbatch's checkout"


def notes_of(error: BaseException) -> list[str]:
    """Return the lines that are printed below an error; Python prints them itself below a traceback, from 3.11 on."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes


def add_note(error: BaseException, *notes: str) -> None:
    """Add lines to those below an error, like the error's method add_note, which Python 3.10 lacks."""
    error.__notes__ = [*notes_of(error), *notes]  # type: ignore[attr-defined]


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that this error ends; CRASHED if it is not a UserError."""
    return error.exit_code if isinstance(error, UserError) else CRASHED


class ArgumentError(UserError, TypeError):
    """An argument of a function has a wrong type; the message names it, and a legal value."""


class ConfigError(UserError, ValueError):
    """Settings are wrong; each argument is a line that names the key, the value and a legal one."""


class DataError(UserError, RuntimeError):
    """An image, folder or data set is unusable; the message names the path."""


class StorageError(DataError):
    """The storage of a data set fails, not a single image: no policy of skipping images applies."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read, written or used here; the message names the path."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint differs from what was written: cut off, changed, or without one of its files."""


class ExportError(UserError, RuntimeError):
    """A model cannot be exported in this form, or the exported one computes something else."""


class ComputeError(UserError, RuntimeError):
    """This machine cannot compute the model as asked for; the message says why, and what to do."""


class CaptureFailed(ComputeError):
    """A rank could not capture its step as a CUDA graph; raised on all ranks alike, before the step."""


class OutOfMemory(UserError, RuntimeError):
    """A run does not fit into memory; the message says which settings do."""


class RunFolderError(UserError, RuntimeError):
    """The run folder cannot be written, or lacks what the command needs; the message names the path."""


class TrainingDiverged(UserError, RuntimeError):
    """The loss or a weight is no longer finite; the message names the step."""


class GoingBack(UserError, RuntimeError):
    """A job goes back to its newest checkpoint, and ends with this error if that does not help."""

    check_until = 0
    """Step up to which the job then checks which rank's gradients are not finite."""


class NotFinite(GoingBack, TrainingDiverged):
    """Losses, gradients or weights are not finite: by the learning rate, or by the device of a rank."""


class ReplicasDiffer(GoingBack):
    """Ranks hold different weights, or computed different gradients from the same images; names step and ranks."""

    exit_code = DIFFERENT


class TuneError(UserError, RuntimeError):
    """A search or a range test cannot start or continue; the message names its folder, or what happened."""


class DoctorError(UserError, RuntimeError):
    """A config could not be measured; the message says why."""


class CommError(UserError, RuntimeError):
    """Communication could not be set up or carried out; the message says what to do."""


class PeerLostError(CommError):
    """A peer died or stalled; the message names operation, seconds waited and the missing ranks."""

    exit_code = LOST
    lost_ranks: frozenset[int] = frozenset()


class LaunchError(UserError, ValueError):
    """The environment does not describe a rank of a job; the message names the variable and its value."""


class TunedError(UserError, ValueError):
    """A tuned file is unreadable, or belongs to another cluster or model; the message names the file and what to do."""


class EmulationError(UserError, RuntimeError):
    """An emulated cluster cannot be built, found, entered or removed; the message says what to do."""


class FaultError(UserError, ValueError):
    """Flight recorders' dumps cannot be read, or a trial of faults is impossible; the message says what is possible."""

    exit_code = REFUSED


class SimulationError(UserError, ValueError):
    """A cluster, a profile or a table of rows cannot be simulated; the message names it and what is wrong."""


class LaunchOptionError(UserError, ValueError):
    """An option of launch, sweep or report is wrong, or a folder holds something else; the message says what to do."""


class JobRefused(LaunchOptionError):
    """All errors of a job, found before anything starts: a line for each."""

    exit_code = REFUSED

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        first = [f"nothing was started, for {len(findings)} reasons:"] if len(findings) > 1 else []
        super().__init__(*(f"{'  ' * (number > 0)}{line}" for number, line in enumerate([*first, *findings])))


class SchedulerError(UserError, RuntimeError):
    """A scheduler refused, or its programs are not installed; the message quotes it."""


MIN_LIKENESS = 0.6
"""Least similarity for difflib; less similar names are not suggested."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like a misspelt one; empty if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=MIN_LIKENESS)), "")


def or_nearest(word: str, known: Iterable[str], *, words: str = "the nearest is") -> str:
    """Return the end of a message, such as '; the nearest is sweep'; empty if no known word is similar."""
    near = nearest(word, known)
    return f"; {words} {near}" if near else ""


def printable(text: str) -> str:
    """Return text as one line without control characters: file names may hold line ends, escapes, undecodable bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return text without control characters but its line ends: for text in which names are printable already."""
    return "\n".join(map(printable, text.split("\n")))


def print_line(text: str, *, file: TextIO | None = None) -> None:
    """Print one line without control characters, on stdout if file is None, and flush."""
    print(printable(text), file=file, flush=True)


def print_lines(text: str, *, file: TextIO | None = None) -> None:
    """Print lines without control characters, on stdout if file is None, and flush."""
    print(printable_lines(text), file=file, flush=True)


def tell(*lines: object) -> None:
    """Print lines on stderr in one write, without lines of other processes between; lost if it cannot be written."""
    if sys.stderr is not None:  # None if the process was started without one
        with suppress(OSError, ValueError):
            sys.stderr.write("bigbatch: " + "\n".join(printable(str(line)) for line in lines) + "\n")
            sys.stderr.flush()


def show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a UserError in one line, with the script's own line; any other error with its traceback. A sys.excepthook.

    For scripts of several ranks, whose tracebacks would hide the message.
    """
    if not isinstance(error, UserError):
        print_traceback(error)
        return
    own = [(frame, line) for frame, line in walk_tb(trace) if frame.f_globals.get("__name__") == "__main__"]
    where = f"{own[-1][0].f_code.co_filename}:{own[-1][1]}: " if own else ""
    first, *others = str(error).split("\n")
    tell(f"{where}{kind.__name__}: {first}", *others, *notes_of(error))


def print_traceback(error: BaseException) -> None:
    """Print an error's traceback on stderr; its message may hold escapes of a file's author."""
    text = "".join(format_exception(error)).rstrip("\n")
    with suppress(OSError, ValueError):
        print_lines(text, file=sys.stderr)


LAUNCHER_LINE = re.compile(r" ended with exit code \d+(; ending the others)?$")
"""Matches a launcher's line about a failed rank; any other line of the log, such as the rank's own, says more."""


def shortened(value: object) -> str:
    """Return a value's repr for a message; a long text or list is shortened to its two ends."""
    return _SHORTENED.repr(value)


_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring, _SHORTENED.maxother = 80, 200


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without the place in the C++ sources."""
    text = str(error).strip()
    if not re.search(r"[^\W\d_]", text):  # such as SystemExit(3)
        text = f"{type(error).__name__} {text}".strip()
    return re.sub(r"^\[[^\]]*\.\w+:\d+\]\s*", "", text.splitlines()[0])


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a user's full quota."""


def find_os_error(error: BaseException) -> OSError | None:
    """Return the OSError among an error and its contexts, such as behind a library's own error; None without one."""
    if isinstance(error, OSError) or error.__context__ is None:
        return error if isinstance(error, OSError) else None
    return find_os_error(error.__context__)


def write_failure(path: Path, error: Exception) -> str:
    """Return why path was not written: the system's reason if there is one; for a full disk also its free space."""
    system = find_os_error(error)
    reason = first_line(error) if system is None else system.strerror or str(system)
    if system is not None and system.errno in DISK_FULL:
        with suppress(OSError):
            reason += f", {shutil.disk_usage(path.parent).free / 1e6:.3g} MB are free there"
    return reason


class Refusals:
    """Collects errors while an experiment is read, to raise them together."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._doubtful: set[str] = set()

    @contextmanager
    def collect(self, key: str) -> Iterator[None]:
        """Keep a ConfigError that the block raises; the value of key, if any, is then doubtful."""
        try:
            yield
        except ConfigError as error:
            self._lines += map(str, error.args)
            if key:
                self._doubtful.add(key)

    @contextmanager
    def raise_all(self) -> Iterator[None]:
        """Raise all kept errors, and the lines of the block's ConfigError that name no doubtful key."""
        try:
            yield
        except ConfigError as error:
            doubtful = [re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w)") for key in self._doubtful]
            self._lines += [line for line in map(str, error.args) if not any(key.search(line) for key in doubtful)]
        if self._lines:
            raise ConfigError(*self._lines) from None
