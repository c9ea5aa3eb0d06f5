"""What source files import, read without importing them, and what a run therefore loads."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One import: of what, and whether it happens when the module itself is imported."""

    name: str
    at_import: bool


@dataclass(frozen=True)
class Module:
    """What the rules look at in one source file."""

    imports: tuple[Import, ...]
    reads_environment: bool
    num_lines: int


def read_module(source: str) -> Module:
    """Parse one file. 'from a import b' counts as a.b, which may be a module or a name in one."""
    tree = ast.parse(source)
    imports = tuple(_imports(tree, at_import=True))
    os_names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    reads = any(i.name in {f"os.{name}" for name in os_names} for i in imports) or any(
        isinstance(node, ast.Attribute) and node.attr in os_names and _is_name(node.value, "os")
        for node in ast.walk(tree)
    )
    return Module(imports, reads, source.count("\n"))


def _imports(node: ast.AST, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute, from bigbatch"
            yield from (Import(f"{child.module}.{alias.name}", at_import) for alias in child.names)
        else:
            is_late = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_types(child)
            yield from _imports(child, at_import=at_import and not is_late)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _is_name(node.test, "TYPE_CHECKING")


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@cache
def house() -> dict[str, Module]:
    """All modules of the package by name; the rooms are read where they lie, not through the links."""
    files = [*(ROOT / "bigbatch").glob("*.py")]
    files += [
        path for room in ("comm", "trainer", "launch", "tools", "experiments") for path in (ROOT / room).rglob("*.py")
    ]
    return {name if is_within(name, "bigbatch") else f"bigbatch.{name}": m for name, m in read_files(files).items()}


def read_files(files: Iterable[Path]) -> dict[str, Module]:
    """Modules by their names from the repository's root."""
    modules = {}
    for path in files:
        words = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(words[:-1] if words[-1] == "__init__" else words)] = read_module(path.read_text())
    return modules


def is_within(name: str, room: str) -> bool:
    """name is room or lies inside it."""
    return name == room or name.startswith(f"{room}.")


def imported_with(start: str, modules: Mapping[str, Module]) -> dict[str, str]:
    """All modules that importing start loads, own and foreign, with parent packages -> the module that imports each."""
    asked_by: dict[str, str] = {}
    todo = [(start, "the test")]
    while todo:
        name, asker = todo.pop()
        parts = name.split(".")
        for prefix in (".".join(parts[:i]) for i in range(1, len(parts) + 1)):
            if prefix not in asked_by:
                asked_by[prefix] = asker
                imports = modules[prefix].imports if prefix in modules else ()
                todo += [(each.name, prefix) for each in imports if each.at_import]
    return asked_by


def loaded_with(start: str) -> tuple[int, int]:
    """The files of ours, and their lines, that importing a module loads; without those that hold a docstring alone."""
    own = [house()[name].num_lines for name in imported_with(start, house()) if name in house()]
    return sum(lines > 1 for lines in own), sum(lines for lines in own if lines > 1)


if __name__ == "__main__":
    for module in map("bigbatch.{}".format, sys.argv[1:]):
        print("{}: {} files, {:,} lines".format(module, *loaded_with(module)))
