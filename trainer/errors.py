"""Errors of a training run: each message is one line that names the thing and what to do."""

from bigbatch.errors import UserError


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
    """The loss or a weight is no number any more; the message names the step."""


class TuneError(UserError, RuntimeError):
    """A search or a range test cannot start or go on; the message names its folder, or what happened."""


class DoctorError(UserError, RuntimeError):
    """A config could not be measured; the message says why."""
