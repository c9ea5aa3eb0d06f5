"""What the records of benchmarks have in common: spreads and conditions."""

import argparse
from pathlib import Path

import pytest

from benchmarks import record


def test_spread_and_its_line():
    values = record.spread([4.0, 1.0, 2.0, 3.0, 10.0])
    assert values == {"n": 5, "median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 10.0}
    assert record.spread([7.0]) == {"n": 1, "median": 7.0, "min": 7.0, "q1": 7.0, "q3": 7.0, "max": 7.0}
    assert "3 images/s" in record.show("ours", values, unit="images/s")
    assert "(1 to 10, n = 5)" in record.show("ours", values, unit="images/s")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Path("/far/away/set"), "set"),
        (Path("../data/set"), "set"),
        (Path("data/../../set"), "set"),
        (Path("data/set"), "data/set"),
        ("/far/away/set", "set"),
        ("1/2", "1/2"),
        (None, "None"),
        (3, "3"),
        (["/far/a.yaml", "--data.root=/far/a=b", "--run.epochs=1"], "['a.yaml', '--data.root=a=b', '--run.epochs=1']"),
        (("a", "b"), "('a', 'b')"),
    ],
)
def test_conditions_tell_no_place_of_this_machine(value, shown):
    options = argparse.Namespace(option=value, out=Path("/far/out.json"))
    assert record.conditions(options)["options"] == {"option": shown}
