"""Classes of other packages, by their dotted names."""

from importlib import import_module
from types import ModuleType


def is_dotted(name: str) -> bool:
    """Tell whether name has the form of a dotted name, such as schedulefree.SGDScheduleFree; nothing is imported."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_owner(name: str) -> tuple[ModuleType, str]:
    """Import the module of a dotted name; return it, and the name within it.

    Raises: ValueError saying what is missing, and how to get it.
    """
    module_name, _, own_name = name.rpartition(".")
    package = module_name.partition(".")[0]
    try:
        return import_module(module_name), own_name
    except ImportError as error:  # of this module, or of one that it imports in turn
        package = (error.name or package).partition(".")[0]
        raise ValueError(f"{error}: install its package, as by pip install {package}") from error
    except SystemExit as error:
        raise ValueError(
            f"importing {module_name} ends Python: put what is to run there below if __name__ == '__main__'"
        ) from error
