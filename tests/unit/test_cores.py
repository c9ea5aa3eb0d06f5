"""Waiting OpenMP threads are bounded before torch is loaded, in the command and in what it starts."""

import os
import subprocess
import sys

import pytest

from bigbatch import cores

UNBOUNDED = {name: value for name, value in os.environ.items() if name not in cores.STATED}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, ("10000", None)),
        ({"OMP_WAIT_POLICY": "passive"}, (None, "passive")),
        ({"GOMP_SPINCOUNT": "7"}, ("7", None)),
    ],
)
def test_command_bounds_spinning_before_torch_is_loaded_unless_it_is_stated(
    stated: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    script = (
        "import os, sys; from bigbatch import cli; assert 'torch' not in sys.modules\n"
        "def find(arguments): assert 'torch' not in sys.modules; print([os.environ.get(name) for name in "
        f"{cores.STATED}]); return 0\n"
        "cli._find_command = find; cli.main(['train'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=UNBOUNDED | stated, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{list(expected)}\n"


def test_library_reads_the_bound() -> None:
    """GNU OpenMP says what it has read."""
    script = "from bigbatch.cores import bound_spinning; bound_spinning(); import torch"
    environ = UNBOUNDED | {"OMP_DISPLAY_ENV": "verbose"}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT = '10000'" in run.stderr


@pytest.mark.parametrize(
    ("stated", "threads", "load", "is_told"),
    [
        ({}, 2, 13.1, True),
        ({}, 2, 2.9, False),
        ({}, 1, 13.1, False),
        ({"OMP_WAIT_POLICY": "passive"}, 2, 13.1, False),
        ({"GOMP_SPINCOUNT": "10000"}, 2, 13.1, False),
    ],
)
def test_busy_host_is_told_where_threads_spin_without_a_bound(
    stated: dict[str, str], threads: int, load: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cores.STATED:
        monkeypatch.delenv(name, raising=False)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    line = cores.describe_spinning(threads)
    assert (line is not None) == is_told
    assert line is None or ("load average 13.1 on 2 cores" in line and "export GOMP_SPINCOUNT=10000" in line)
