"""Kernels that no run uses yet: their values by Triton's interpreter, and their machine code for an H200."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_process import fork_benchmark, fork_code
from torch import Tensor
from torch.utils._triton import has_triton_package

from benchmarks.gpu import day
from benchmarks.gpu.prototypes import common
from benchmarks.gpu.prototypes.common import Comparison, compare, roundings
from benchmarks.gpu.suite import parts, prototypes, report
from benchmarks.gpu.suite.context import FULL, SMALL, Context, Found
from benchmarks.gpu.suite.device import file_stem
from benchmarks.record import spread
from bigbatch.errors import UserError
from bigbatch.trainer.models.regions import compile_region

ROOT = Path(__file__).parents[3]
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


def run(name: str, option: str, folder: Path) -> list[dict[str, Any]]:
    code, told = fork_code(FRESH_TRITON.format(name=name, option=option), cwd=folder, timeout_seconds=200)
    assert code == 0, told
    head, *lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert head["name"] == name
    return lines


@needs_triton
@pytest.mark.parametrize(
    "name",
    # two_blocks has no kernel, and tracing takes most of its seconds
    [pytest.param(name, marks=[pytest.mark.weekly] * (name == "two_blocks")) for name in prototypes.names()],
)
def test_prototype_computes_what_fp64_does(name: str, tmp_path: Path) -> None:
    rows = run(name, "--small", tmp_path)
    assert rows
    assert not any(row["wrong"] for row in rows)
    assert all(row["roundings"].keys() == row["dtypes"].keys() for row in rows)


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "lars_table" else pytest.mark.weekly)
        for name in prototypes.names()
    ],
)
def test_kernels_compile_for_an_h200_without_spilled_registers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for each in run(name, "--cubins", tmp_path):
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


def test_bits_alone_are_compared_with_todays() -> None:
    ramp_N = torch.linspace(1, 2, 9).bfloat16()
    other_N = ramp_N.clone()
    other_N[3] += 2**-7
    for new_N, wrong, share in ((ramp_N, [], 1.0), (other_N, ["y has other bits than today"], 8 / 9)):
        row = compare(replace(comparison(new_N), exact=None, has_same_bits=True), CPU)
        assert (row["wrong"], row["equal"], row["roundings"]) == (wrong, {"y": share}, {})
        assert row["dtypes"] == {"y": "bfloat16"}


def test_values_come_from_deterministic_algorithms_and_times_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def see(*_: object) -> dict[str, Any]:
        seen.append(torch.backends.cudnn.deterministic)
        return {"y": torch.ones(1)}

    ones = replace(comparison(torch.ones(1)), today=see, new=see, exact=None)
    monkeypatch.setattr(common, "timed", see)
    compare(ones, torch.device("cuda"))
    compare(replace(ones, is_timed=False), torch.device("cuda"))
    assert seen == [True, True, True, False, True, True, True]


def test_one_function_is_compiled_for_more_settings_than_torch_allows() -> None:
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for number in range(4):
            # the test's own backends, each unlike the others to torch
            made = compile_region(torch.nn.functional.relu6, backend=lambda graph, _, number=number: graph.forward)
            assert made(torch.full((number + 1,), 9.0)).tolist() == [6.0] * (number + 1)


def test_roundings_are_those_of_the_dtype() -> None:
    exact_N = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert roundings(exact_N.bfloat16(), exact_N) == 0
    assert roundings(torch.tensor([1.0, -1 - 2**-7], dtype=torch.bfloat16), exact_N) == 2
    assert roundings(torch.tensor([1.0, -1 - 2**-23]), exact_N) == 2


def printed(name: str, *, today: float, new: float, item: int = 2, wrong: Sequence[str] = ()) -> dict[str, Any]:
    facts = {"launches": [4, 2], "bytes_per_element": [9, 8.125], "roundings": {"y": [2.0, 1.5]}, "equal": {"y": 0.5}}
    times = {"seconds": {"today": spread([today]), "new": spread([new])}, "ratio": spread([new / today])}
    shares = {"share_of_bound": {"today": 0.5, "new": 0.75}}
    return {"name": name, "item": item, "wrong": wrong, **facts, **times, **shares}


@pytest.mark.parametrize(
    ("name", "wrong", "ratio"), [("x", [], 1.0), ("settings", [], 2 / 3), ("x", ["y"], None), ("settings", ["y"], 1.0)]
)
def test_part_keeps_figures_of_all_and_one_ratio(
    name: str, wrong: list[str], ratio: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        printed("a", today=3, new=2, wrong=wrong),
        printed("b", today=1, new=1),
        printed("c", today=1, new=4, item=6),
    ]
    why = "wrong values" if wrong else ""
    monkeypatch.setattr(prototypes, "lines_of", lambda *_, **__: ([{"item": 2}, *rows], why))
    found = prototypes.measure(Context(size=FULL, device=CPU, scratch=tmp_path), name=name)
    medians = {name: found.median(name) for name in found.figures}
    first = "a, WRONG" if wrong else "a"
    assert medians.get(prototypes.RATIO) == ratio
    assert found.failure == why
    assert medians[f"{first}: y, new"] == 1.5
    assert medians[f"{first}: new"] == 2
    assert medians[f"{first}: new / today"] == pytest.approx(2 / 3)
    assert medians["b: y, equal to today's"] == 0.5
    assert medians["b: today, share of the bound"] == 0.5
    assert found.tables["kernels"][0]["bytes_per_element, new"] == 8.125


def test_failed_part_is_kept_and_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(figures={"ramp: new": {"unit": "s", **spread([2.0])}}, failure="prototypes/x: wrong values: ramp: y")
    monkeypatch.setattr(parts, "parts_of", lambda _: {"x": parts.Part(lambda _: found, 1, 2)})
    options = day.parse(["--out", str(tmp_path), "--logs", str(tmp_path), "--small"])
    path = tmp_path / f"{file_stem(CPU, size=SMALL.name)}.json"
    with pytest.raises(SystemExit, match="wrong values: ramp: y"):
        parts.run_part("x", options=options, device=CPU, size=SMALL, path=path)
    measured = day.Day(options, device=CPU, size=SMALL)
    assert measured.record["cases"]["x"]["figures"] == found.figures
    assert "Failed: prototypes/x: wrong values: ramp: y" in report.case("x", measured.record["cases"]["x"])
    assert not measured._has_result("x")


def test_record_and_page_have_values_and_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"y": [2.0, 1.5], "mean": [1.0, 3.25]}
    dtypes = {"y": "float16", "mean": "float32", "var": "float32"}
    counts = {"launches": [4, 2], "bytes_per_element": [9, 8.125], "roundings": errors, "dtypes": dtypes}
    compared = [{"name": name, "item": item, **counts} for name, item in (("ramp", 2), ("border", 6))]
    kernel = {"kernel": "sums", "ROWS": 64, "registers": 70, "shared_bytes": 2048, "spilled_bytes": 0}
    head = {"name": "x", "item": 2, "expected_ms": [0.5, 0.75]}
    lines = {"--small": compared, "--cubins": [kernel]}
    monkeypatch.setattr(prototypes, "names", lambda: ["x"])
    monkeypatch.setattr(prototypes, "lines_of", lambda _, option, **__: ([head, *lines[option]], ""))
    monkeypatch.setattr(sys, "argv", ["prototypes", "--out", str(tmp_path / "record.json")])
    prototypes.main()
    rows = json.loads((tmp_path / "record.json").read_text())["prototypes"]
    assert rows == [{**head, "comparisons": compared, "kernels": [kernel]}]
    page = (tmp_path / "record.md").read_text()
    assert "| 2 | x | ramp | float16, float32 | 4, 2 | 9, 8.125 | 2, 3.25 | 0.5 to 0.75 |" in page
    assert "| 6 | x | border | float16, float32 | 4, 2 | 9, 8.125 | 2, 3.25 |  |" in page
    assert "| x | sums | ROWS 64 | 70 | 2048 | 0 |" in page


PRINTS = "print('of a library'); print('{{}}'); print('{{\"name\": \"a\"}}', flush=True); {}"


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("", ""),
        ("import sys; sys.exit('Traceback\\n\\nwrong values: y')", "prototypes/x: wrong values: y"),
        ("print('{\"na', end='', flush=True); import time; time.sleep(60)", "prototypes/x: stopped after 2 s"),
    ],
)
def test_what_a_prototype_printed_is_kept_when_it_fails(then: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, code = subprocess.run, PRINTS.format(then)
    monkeypatch.setattr(subprocess, "run", lambda _, **options: started([sys.executable, "-c", code], **options))
    assert prototypes.lines_of("x", seconds=2) == ([{}, {"name": "a"}], why)


def test_prototype_that_prints_nothing_is_named_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, stdout=b"", stderr=b"Traceback\n\nno such module\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match="prototypes/block_end: no such module"):
        prototypes.lines_of("block_end", "--small", seconds=9)


def test_page_states_the_minutes_of_all() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    likely, most = map(sum, zip(*map(prototypes.seconds_of, prototypes.names()), strict=True))
    assert f"All take about {likely / 60:.0f} minutes, at most {most / 60:.0f}." in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_prototype_needs_a_gpu_or_small(tmp_path: Path) -> None:
    code, told = fork_benchmark("gpu.prototypes.block_end", cwd=tmp_path, timeout_seconds=60)
    assert (code, told.strip()) == (1, "block_end: there is no GPU; --small compares values on a CPU")
