"""Kernels that no run uses yet: their values by Triton's interpreter, and their machine code for an H200."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_process import fork_benchmark, fork_code
from torch import Tensor
from torch.utils._triton import has_triton_package

from benchmarks.gpu.prototypes.common import Comparison, compare, roundings
from benchmarks.gpu.suite import prototypes
from benchmarks.gpu.suite.context import FULL, SMALL, Context
from benchmarks.record import spread
from bigbatch.errors import UserError

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")


FRESH_TRITON = """
import runpy, sys
for name in [name for name in sys.modules if name.startswith("triton") and not name.startswith("triton._C")]:
    del sys.modules[name]
sys.argv = ["-m", {option!r}]
runpy.run_module("benchmarks.gpu.prototypes.{name}", run_name="__main__", alter_sys=True)
"""
"""A forked process has imported Triton, which then reads no more whether to interpret."""


def run(name: str, option: str, folder: Path) -> dict[str, Any]:
    code, told = fork_code(FRESH_TRITON.format(name=name, option=option), cwd=folder, timeout_seconds=200)
    assert code == 0, told
    line: dict[str, Any] = json.loads(told.splitlines()[-1])
    return line


@needs_triton
@pytest.mark.parametrize(
    "name",
    # two_blocks has no kernel, and tracing takes most of its seconds
    [pytest.param(name, marks=[pytest.mark.long] * (name == "two_blocks")) for name in prototypes.names()],
)
def test_prototype_computes_what_fp64_does(name: str, tmp_path: Path) -> None:
    line = run(name, "--small", tmp_path)
    assert line["prototype"] == name
    assert line["comparisons"]
    assert not any(row["wrong"] for row in line["comparisons"])


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("name", prototypes.names())
def test_kernels_compile_for_an_h200_without_spilled_registers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = run(name, "--cubins", tmp_path)["kernels"]
    for each in kernels:
        assert each["spilled_bytes"] == 0, each
        assert each["shared_bytes"] <= 232448, "of a block on an H200"


def comparison(new_N: Tensor, *, again_N: Tensor | None = None) -> Comparison:
    answers = iter([new_N, new_N if again_N is None else again_N])
    exact_N = torch.linspace(1, 2, 9, dtype=torch.float64)
    return Comparison(
        name="ramp",
        today=lambda: {"y": exact_N.bfloat16()},
        new=lambda: {"y": next(answers)},
        exact=lambda: {"y": exact_N},
        elements=9,
        today_bytes=4,
        new_bytes=2,
        today_launches=2,
        new_launches=1,
    )


def test_wrong_values_and_values_that_change_are_found() -> None:
    ramp_N = torch.linspace(1, 2, 9).bfloat16()
    assert compare(comparison(ramp_N), CPU)["wrong"] == []
    for place, damage in ((0, 2**-6), (8, float("nan"))):
        damaged_N = ramp_N.clone()
        damaged_N[place] += damage
        assert compare(comparison(damaged_N, again_N=damaged_N.nan_to_num()), CPU)["wrong"][0] == "y"
    found = compare(comparison(ramp_N, again_N=ramp_N + 2**-7), CPU)
    assert found["wrong"] == ["y differs when repeated"]


def test_roundings_are_those_of_the_dtype() -> None:
    exact_N = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert roundings(exact_N.bfloat16(), exact_N) == 0
    assert roundings(torch.tensor([1.0, -1 - 2**-7], dtype=torch.bfloat16), exact_N) == 2
    assert roundings(torch.tensor([1.0, -1 - 2**-23]), exact_N) == 2


def test_part_keeps_errors_times_and_the_ratio_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"launches": [4, 2], "bytes_per_element": [9, 8.125], "roundings": {"y": [2.0, 1.5]}}
    rows = [
        {"name": name, **facts, "seconds": {"today": spread([today]), "new": spread([new])}, "share_of_bound": shares}
        for name, today, new in (("a", 3.0, 2.0), ("b", 1.0, 1.0))
        for shares in [{"today": 0.5, "new": 0.75}]
    ]
    monkeypatch.setattr(prototypes, "line_of", lambda *words: {"comparisons": rows if words == ("x",) else []})
    found = prototypes.measure(Context(size=FULL, device=CPU, scratch=tmp_path), name="x")
    medians = {name: found.median(name) for name in found.figures}
    assert medians[prototypes.RATIO] == 0.75, "3 of 4 seconds"
    assert medians["a: y, new"] == 1.5
    assert medians["a: new"] == 2
    assert medians["b: today, share of the bound"] == 0.5
    assert found.tables["kernels"][0]["bytes_per_element, new"] == 8.125
    assert prototypes.measure(Context(size=SMALL, device=CPU, scratch=tmp_path), name="x").figures == {}


def test_record_and_page_have_values_and_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"y": [2.0, 1.5], "mean": [1.0, 3.25]}
    compared = {"name": "ramp", "launches": [4, 2], "bytes_per_element": [9, 8.125], "roundings": errors}
    kernel = {"kernel": "sums", "ROWS": 64, "registers": 70, "shared_bytes": 2048, "spilled_bytes": 0}
    lines = {
        "--small": {"prototype": "x", "expected_ms": [0.5, 0.75], "comparisons": [compared]},
        "--cubins": {"prototype": "x", "kernels": [kernel]},
    }
    monkeypatch.setattr(prototypes, "names", lambda: ["x"])
    monkeypatch.setattr(prototypes, "line_of", lambda name, option: lines[option])
    monkeypatch.setattr(sys, "argv", ["prototypes", "--out", str(tmp_path / "record.json")])
    prototypes.main()
    rows = json.loads((tmp_path / "record.json").read_text())["prototypes"]
    assert rows == [lines["--small"] | lines["--cubins"]]
    page = (tmp_path / "record.md").read_text()
    assert "| x | ramp | 4, 2 | 9, 8.125 | 2, 3.25 | 0.5 to 0.75 |" in page
    assert "| x | sums | ROWS 64 | 70 | 2048 | 0 |" in page


def test_prototype_that_fails_is_named_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\n\nwrong values: y\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match="prototypes/block_end: wrong values: y"):
        prototypes.line_of("block_end", "--small")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_prototype_needs_a_gpu_or_small(tmp_path: Path) -> None:
    code, told = fork_benchmark("gpu.prototypes.block_end", cwd=tmp_path, timeout_seconds=60)
    assert (code, told.strip()) == (1, "block_end: there is no GPU; --small compares values on a CPU")
