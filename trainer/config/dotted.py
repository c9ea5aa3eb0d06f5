"""Classes of other packages, by import path."""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from bigbatch.errors import ConfigError, UserError, or_nearest
from bigbatch.paths import work_folder

CLASS = "class:"
"""Begins a data.root that names a class: class:IMPORT.PATH, or class:IMPORT.PATH:TEXT."""
LIBRARIES = ("bigbatch", "timm", "torch", "torchvision")
"""Packages with many callables besides models, losses and optimizers."""
FROM_SOURCES = {"apex": "apex on PyPI is another project; docs/compare.md#coming-from-apex has the command"}
"""Package that pip cannot install by its own name -> what to do."""


def is_import_path(name: str) -> bool:
    """Return whether name has the form of an import path, such as schedulefree.SGDScheduleFree; imports nothing."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def class_of_root(root: str) -> tuple[str, str] | None:
    """Return the import path and the text of a data.root that names a class; None for other roots."""
    if not root.startswith(CLASS):
        return None
    name, _, text = root.removeprefix(CLASS).partition(":")
    return name, text


def names_list(root: str) -> bool:
    """Return whether a data.root has the name of a list of images, rather than of a folder, an address or a class."""
    return root.endswith(".json") and "://" not in root and class_of_root(root) is None


def import_owner(name: str) -> tuple[ModuleType, str]:
    """Import the module of an import path, also from the work folder; return the module and the name within it.

    Raises: ValueError saying what is missing, and how to get it; UserError if the work folder was deleted.
    """
    module_name, _, own_name = name.rpartition(".")
    package = module_name.partition(".")[0]
    here = work_folder()
    try:
        is_known = package in LIBRARIES or package in sys.modules or here in sys.path
        is_unknown = not is_known and find_spec(package) is None
        if is_unknown and PathFinder.find_spec(package, [here]) is not None:
            sys.path.append(here)  # at the end: it cannot replace an installed package
        return import_module(module_name), own_name
    except ImportError as error:  # of this module, or of one that it imports in turn
        package = (error.name or package).partition(".")[0]
        source = FROM_SOURCES.get(package, "PyPI may know it by another name")
        raise ValueError(
            f"{error}: if it is your own, add its folder to PYTHONPATH; else install the package that has it ({source})"
        ) from error
    except SystemExit as error:
        raise ValueError(
            f"importing {module_name} ends Python: put its script code below if __name__ == '__main__'"
        ) from error
    except Exception as error:  # foreign code may raise anything
        raise ValueError(f"importing {module_name} fails: {as_line(error)}") from error


def import_path_of(value: object) -> str:
    """Return the import path of a class or function, such as __main__.Net in a notebook. Raises: ValueError."""
    module, name = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not value:
        raise ValueError("it has no import path: define it at the top level of a module, a script or a notebook")
    return f"{module}.{name}"


def make_own(
    name: str, *arguments: object, key: str, methods: Sequence[str], options: Mapping[str, object] = {}
) -> Any:
    """Find a class as own_class() does, and make an object of it by these arguments and options.

    Raises: ConfigError in one line, also if it cannot be made.
    """
    found = own_class(name, key=key, methods=methods)
    try:
        return found(*arguments, **options)
    except UserError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"{key}: cannot be made: {as_line(error)}") from error


def own_class(name: str, *, key: str, methods: Sequence[str]) -> type[Any]:
    """Import a class of another package by its import path.

    key: the config's key and value, for messages. methods: those that the class must have.
    Raises: ConfigError in one line if it is missing, or of another kind.
    """
    try:
        module, own_name = import_owner(name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    found = getattr(module, own_name, None)
    if found is None:
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"{key}: {module.__name__} has no {own_name}{or_nearest(own_name, classes)}")
    if not isinstance(found, type):
        raise ConfigError(f"{key}: must be a class with the methods {', '.join(methods)}, not a {type(found).__name__}")
    defined = {method for base in found.__mro__ for method, value in vars(base).items() if callable(value)}
    if lacks := [method for method in methods if method not in defined]:
        raise ConfigError(f"{key}: must be a class with the methods {', '.join(methods)}, and has no {lacks[0]}")
    if is_of_library(found, name=name):
        raise ConfigError(f"{key}: is of a library: name a class of your own package, which may use it")
    return found


def own_callable(name: str, *, key: str) -> Callable[..., Any]:
    """Import a class or function by its import path; key: as for own_class(). Raises: ConfigError in one line."""
    try:
        module, own_name = import_owner(name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    found: object = getattr(module, own_name, None)
    if not callable(found):
        callables = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"{key}: {module.__name__} has no such class or function{or_nearest(own_name, callables)}")
    return found


def is_of_library(found: object, *, name: str) -> bool:
    """Return whether an object belongs to a library or Python, by its import path or by where it was defined.

    Such an object may load files or start processes: callers call it only if they have checked its kind.
    """
    home = str(getattr(found, "__module__", None)) if inspect.isroutine(found) or inspect.isclass(found) else ""
    packages = {name.partition(".")[0], home.partition(".")[0]}
    return not packages.isdisjoint((*LIBRARIES, *sys.stdlib_module_names))


def as_line(error: Exception) -> str:
    """Return one line: the error that foreign code raised, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames and frames[-1].lineno else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
