"""Parts by table: a table maps a name to an import path, which is imported when a run names it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from bigbatch.errors import UserError

REMEDY = "install bigbatch again, or choose another setting"


def missing(module: str) -> UserError:
    """Return the error for a module of ours without a file."""
    return UserError(f"{module} is missing from this installation: {REMEDY}")


def load(path: str) -> Any:
    """Import what a table's entry names, such as "bigbatch.trainer.optim.lars.LARS".

    Raises: UserError if its file is missing from this installation.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise missing(error.name) from error


def load_named(table: Mapping[str, str], name: str, *, key: str) -> Any:
    """Load the entry of a table that a key of the config names. Raises: UserError, also for a name without an entry."""
    if name not in table:
        raise UserError(f"{key}={name} is missing from this installation, which has {', '.join(table)}: {REMEDY}")
    return load(table[name])
