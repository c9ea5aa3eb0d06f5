"""Cases of the benchmarks and their commands."""

import json
from pathlib import Path

import pytest

from benchmarks.comm import (
    cases,
    entries,
    exchange,
    gradients,
    reducer_overhead,
    scaling,
    step,
    ways,
)


def test_command_of_a_case(tmp_path: Path) -> None:
    case = cases.Case("c", "step", ("--pace", "1"), "3,2", "1gbit", place="cyclic")
    words = case.command(tmp_path / "c.json")
    before, after = words[: words.index("--")], words[words.index("--") + 1 :]
    assert before[1:6] == ["-m", "bigbatch", "launch", "emulate", "run"]
    options = dict(zip(before[6:-1:2], before[7::2], strict=False))
    assert options["--ranks-per-node"] == "3,2"
    assert options["--place"] == "cyclic"
    assert after[:2] == ["-m", "benchmarks.comm.step"]
    parsed = step.parse(after[2:])
    assert parsed.case == "c"
    assert json.loads(parsed.setting) == {"ranks_per_node": "3,2", "link": "1gbit", "delay": "0", "place": "cyclic"}


@pytest.mark.parametrize("group", [cases.CASES, cases.QUICK])
def test_programs_take_the_options_of_every_case(group: tuple[cases.Case, ...]) -> None:
    parsers = {
        "exchange": exchange.parse,
        "gradients": gradients.parse,
        "step": step.parse,
        "scaling": scaling.parse,
        "reducer_overhead": reducer_overhead.parse,
        "ways": ways.parse,
    }
    known = {*entries.CONTESTANTS, *gradients.CONTESTANTS, *step.CONTESTANTS, *ways.WAYS["paper"]}
    for case in group:
        options = parsers[case.module](["--out", "x.json", *case.options])
        assert set((getattr(options, "contestants", None) or "hybrid").split(",")) <= known
