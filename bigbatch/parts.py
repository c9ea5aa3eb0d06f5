"""Parts by table: a table maps a name to an import path, which is imported when a run names it."""

from importlib import import_module
from typing import Any


def load(path: str) -> Any:
    """Import what a table's entry names, such as "bigbatch.trainer.optim.lars.LARS"."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
