"""Functions that ranks run are named by strings, "module:function", which no type checker follows: each exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PLACES = (TESTS.parent, TESTS / "support", TESTS / "parallel")
"""Where a rank finds modules: pythonpath in pyproject.toml."""
STARTS = ("start_rank", "fork_job")
"""Functions whose first argument is such a string; others have it as their argument target."""
TARGET = re.compile(r"[\w.]+:\w+")


@cache
def functions_of(module: str) -> set[str]:
    """Names of a module's functions; none if there is no such module."""
    files = [place / f"{module.replace('.', '/')}.py" for place in PLACES]
    trees = [ast.parse(path.read_text()) for path in files if path.exists()]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def targets_in(tree: ast.AST) -> Iterator[str]:
    """Strings that name what a rank runs: arguments, their defaults, and values of fields and names."""
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            values += [each.value for each in node.keywords if each.arg == "target"]
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            values += node.args[: name in STARTS]
        elif isinstance(node, ast.arguments):
            named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            values += [value for argument, value in named if argument.arg == "target"]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            values += [node.value for each in names if isinstance(each, ast.Name) and each.id == "target"]
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and TARGET.fullmatch(value.value):
                yield value.value


def test_every_function_that_a_rank_is_to_run_exists() -> None:
    found = {
        (str(path.relative_to(TESTS)), *target.split(":"))
        for path in sorted(TESTS.rglob("*.py"))
        if any(word in (text := path.read_text()) for word in ("target", *STARTS))
        for target in targets_in(ast.parse(text))
    }
    assert {function for _, _, function in found} >= {"main", "bigbatch", "sum_over_tcp", "choose"}
    assert [each for each in sorted(found) if each[2] not in functions_of(each[1])] == []
