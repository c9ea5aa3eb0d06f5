"""Every child process states its standard input: an inherited one would consume the list of the caller's loop."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bigbatch", "comm", "trainer", "launch", "tools", "experiments")
STARTS = ("Popen", "run", "call", "check_call", "check_output")


def without_input(source: str) -> Iterator[str]:
    """Yield each call of subprocess, also within partial(), that states neither stdin nor input."""
    if "subprocess" not in source:
        return
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    for call in (each for each in calls if any(_starts(word) for word in (each.func, *each.args))):
        if not {"stdin", "input"} & {keyword.arg for keyword in call.keywords}:
            yield f"line {call.lineno}: {ast.unparse(call)[:80]}"


def _starts(word: ast.expr) -> bool:
    is_named = isinstance(word, ast.Attribute) and isinstance(word.value, ast.Name)
    return is_named and (word.value.id, word.attr) in {("subprocess", start) for start in STARTS}


@pytest.mark.parametrize("room", ROOMS)
def test_every_child_process_states_its_input(room: str) -> None:
    paths = (ROOT / room).glob("*.py") if room == "bigbatch" else (ROOT / room).rglob("*.py")
    found = {path.name: list(without_input(path.read_text())) for path in paths}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("subprocess.run(['ls'])", 1),
        ("partial(subprocess.run, check=True)", 1),
        ("subprocess.Popen(['ls'], stdin=subprocess.DEVNULL); subprocess.run(['ls'], input='')", 0),
    ],
)
def test_calls_without_input_are_found(source: str, number: int) -> None:
    assert len(list(without_input(source))) == number
