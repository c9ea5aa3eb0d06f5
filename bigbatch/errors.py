"""The root of all errors whose one-line message is for the user, not for a developer; what they suggest."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A user can mend this; the message names the thing and what to do."""


class ConfigError(UserError, ValueError):
    """A setting is wrong; the message names the key, the value and a legal one."""


class DataError(UserError, RuntimeError):
    """A picture, folder or data set is unusable; the message names the path."""


class StorageError(DataError):
    """The storage of a data set is at fault, and not one picture: no policy skips it."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read, written or used here; the message names the path."""


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


class TuneError(UserError, RuntimeError):
    """A search or a range test cannot start or go on; the message names its folder, or what happened."""


class DoctorError(UserError, RuntimeError):
    """A config could not be measured; the message says why."""


class CommError(UserError, RuntimeError):
    """Communication could not be set up or carried out; the message says what to do."""


class PeerLostError(CommError):
    """A peer died or stalled; the message names operation, seconds waited and the missing ranks."""


class LaunchError(UserError, ValueError):
    """The environment describes no rank of a job; the message names the variable and its value."""


class TunedError(UserError, ValueError):
    """A tuned file is unreadable, or of another cluster or model; the message names the file and what to do."""


class EmulationError(UserError, RuntimeError):
    """The cluster cannot be built, found or left; the message says what to do."""


class LaunchOptionError(UserError, ValueError):
    """An option of launch, sweep, ablate or report, or a key of their files, is wrong; the message tells how."""


class SchedulerError(UserError, RuntimeError):
    """A scheduler refused, or its programs are not here; the message holds its words."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like a misspelt one, for its message; empty where none is known."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)), "")
