"""Calls in the sources of the product, for the tests of its architecture."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bigbatch", "comm", "trainer", "launch", "tools", "experiments")


def calls(source: str, is_meant: Callable[[ast.Call], bool]) -> Iterator[str]:
    """Yield line and text of each call that is meant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_meant(node):
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def calls_by_file(find: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """Return what find yields of each file of the product, by its path; files without any are left out."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): list(find(path.read_text())) for path in paths}
    return {name: lines for name, lines in found.items() if lines}


def name_and_owner(call: ast.Call) -> tuple[str, str]:
    """Return the name of the called function, and that of the module or variable before its dot, or ""."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return getattr(function, "id", ""), ""
    return function.attr, function.value.id if isinstance(function.value, ast.Name) else ""
