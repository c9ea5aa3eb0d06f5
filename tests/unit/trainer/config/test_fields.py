"""What fields state of their keys is consistent, and types are those of the fields."""

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from bigbatch.trainer.config.fields import conform
from bigbatch.trainer.config.file import flatten
from bigbatch.trainer.config.kinds import check_ranges
from bigbatch.trainer.config.schema import KEYS, typed, with_defaults

DEFAULTS = Path(__file__).resolve().parents[3] / "golden/defaults.yaml"


def test_defaults_are_all_legal():
    for name, key in KEYS.items():
        value = typed(name, key.default)
        assert (value, type(value)) == (key.default, type(key.default)), name
        assert not [*check_ranges(name, value, key)]


def test_defaults_stay_what_they_are():
    """Run folders from before a key existed load by its default, and recipes leave out what has it.

    A key gets its line in the file once a release has it. One without a line is new, and not a mistake.
    """
    kept = flatten(yaml.safe_load(DEFAULTS.read_text()))
    defaults = with_defaults({})
    assert {key: typed(key, value) for key, value in kept.items()} == {key: defaults[key] for key in kept}


def test_deciders_are_themselves_for_every_choice():
    for key in KEYS.values():
        if key.only_for is not None:
            assert KEYS[key.decider].only_for is None
            assert typed(str(key), key.off) == key.off
            for value in key.only_for.values:
                assert typed(key.decider, value) == value


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (None, float | None, None),
        ([1, 2.5], tuple[float, ...], (1.0, 2.5)),
        ([[0, 16]], tuple[tuple[int, int], ...] | None, ((0, 16),)),
        ("a", Literal["a", "b"] | None, "a"),
        ({"a": 1}, dict[str, Any] | None, {"a": 1}),
    ],
)
def test_values_are_held_as_their_types_say(value, kind, expected):
    found = conform(value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, int),
        (1, bool),
        (2.0, int),
        ("1", float),
        (10**400, float),
        (None, str),
        ([1.0], tuple[float, float]),
        ("ab", tuple[str, str]),
        ([1, True], tuple[int, ...]),
        ("c", Literal["a", "b"]),
        ([], dict[str, Any]),
    ],
)
def test_values_of_other_types_are_refused(value, kind):
    with pytest.raises(TypeError):
        conform(value, kind)
