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


class RunFolderError(UserError, RuntimeError):
    """The run folder cannot be written; the message names the path."""


class TrainingDiverged(UserError, RuntimeError):
    """The loss or a weight is no number any more; the message names the step."""
