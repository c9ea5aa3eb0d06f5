"""Import a command's module, also if a package beneath it is broken, absent or too large for this machine."""

import traceback
from importlib import import_module
from types import ModuleType

from bigbatch.errors import UserError


def load_command(module: str) -> ModuleType:
    """Import a command. Raises: UserError if a package that it needs is missing or does not load."""
    try:
        return import_module(module)
    except BrokenPipeError:
        raise
    except (ImportError, OSError) as error:
        package = _package_of(error)
        if package in (None, "bigbatch"):
            raise
        advice = "install it anew in this environment, or give it more memory (ulimit -v, --mem of the job)"
        raise UserError(f"{package} cannot be loaded here: {str(error).strip()}; {advice}") from error


def _package_of(error: ImportError | OSError) -> str | None:
    """Return the package that raised the error, or else the one that was imported."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in names]
    others = [package for package in packages if package not in ("bigbatch", "importlib", "_frozen_importlib")]
    asked = (getattr(error, "name", None) or "").partition(".")[0]
    return others[0] if others else asked or None
