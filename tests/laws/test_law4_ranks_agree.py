"""Law 4: all ranks hold identical bits, and take the same decisions. Run on 3 ranks by ranks_agree.py."""

import sys
from pathlib import Path

import pytest

from .jobs import mpirun, run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_are_identical_after_each_step(precision: str) -> None:
    """Different data on each rank, an overflow on one rank only: the same bits everywhere after every step."""
    argv = mpirun([], ranks=3)
    argv = [*argv[: argv.index(sys.executable)], sys.executable, str(Path(__file__).with_name("ranks_agree.py"))]
    done = run([*argv, precision])
    assert done.stdout.count("agreed on 6 steps") == 3, done.stdout
