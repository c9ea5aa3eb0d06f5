"""Law 4: all ranks hold identical bits, and take the same decisions. Run on 3 ranks by ranks_agree.py."""

import pytest

from tests.laws.jobs import Forked, run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_autocast"])
def test_weights_are_identical_after_each_step(precision: str) -> None:
    """Different data on each rank, an overflow on one rank only: the same bits everywhere after every step."""
    done = run(Forked((precision,), ranks=3, target="tests.laws.ranks_agree:main"))
    assert done.stdout.count("agreed on 6 steps") == 3, done.stdout
