"""The files, functions and lines that a run on one rank enters: until its first forward, and in two steps after it.

python tests/support/traced_run.py DATA RUN trains the quick start on the images in DATA, ends in its fifth step, and
prints the figures as JSON.
"""

import ast
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST, END = 9, 17
"""Forwards between which functions count as a step's: two steps of four microbatches. The steps before them learn the
order of gradients, and look at the first images."""


@cache
def own_file(name: str) -> str | None:
    """The path of a source of ours in the checkout, through the package's links; None for any other code."""
    path = Path(os.path.realpath(name))
    is_own = path.is_relative_to(ROOT) and not {".venv", "tests"}.intersection(path.parts) and name[0] != "<"
    return str(path) if is_own else None


def figures_of(entered: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Files, functions and lines of the functions that begin at these places: file and line."""
    first_lines: dict[str, set[int]] = {}
    for file, line in entered:
        first_lines.setdefault(file, set()).add(line)
    lines, num_functions, files = set[tuple[str, int]](), 0, set[str]()
    for file, firsts in first_lines.items():
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.FunctionDef) and firsts & {node.lineno, *(d.lineno for d in node.decorator_list)}:
                num_functions += 1
                files.add(file)
                lines |= {(file, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return {"files": len(files), "functions": num_functions, "lines": len(lines)}


def loaded() -> dict[str, int]:
    """Files of ours that this process has imported, also those of tables, and their lines."""
    names = {own_file(str(each.__file__)) for name, each in sys.modules.items() if name.startswith("bigbatch")}
    lines = [Path(name).read_text().count("\n") for name in names if name]
    return {"files": sum(each > 1 for each in lines), "lines": sum(lines)}


def trace(argv: list[str]) -> None:
    """Run bigbatch with these words; end the process within a step, after the figures are printed."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from bigbatch.cli import main
    from bigbatch.trainer.models.resnet9 import ResNet9

    entered: dict[str, set[tuple[str, int]]] = {"start": set(), "between": set(), "step": set()}
    phase, num_forwards, num_frames = "start", 0, 0

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := own_file(frame.f_code.co_filename)):
            entered[phase].add((file, frame.f_code.co_firstlineno))

    def before(module: Any, _: object) -> None:
        nonlocal phase, num_forwards, num_frames
        if not isinstance(module, ResNet9) or not module.training:
            return
        num_forwards += 1
        phase = "step" if FIRST <= num_forwards < END else "between"
        if num_forwards == END:
            sys.setprofile(None)
            stack = (own_file(frame.f_code.co_filename) for frame, _ in traceback.walk_stack(sys._getframe(0)))
            num_frames = sum(file is not None for file in stack)
            figures = {name: figures_of(entered[name]) for name in ("start", "step")}
            print(json.dumps({**figures, "frames": num_frames, "loaded": loaded()}), flush=True)
            os._exit(0)

    register_module_forward_pre_hook(before)
    threading.setprofile(note)
    sys.setprofile(note)
    main(argv)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    data, run = sys.argv[1:]
    one_node = ["--data.bind_numa", "false"]  # as on a host with one NUMA node: the same figures on every host
    trace(["train", "--config", "quickstart", "--data.root", data, "--run.directory", run, *one_node])
