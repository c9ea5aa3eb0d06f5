"""Trials of healing that are known."""

from typing import Any

import pytest

from benchmarks.faults.healing import KEPT, judge

STRIKE = {"rank": 2, "time": 5.2, "step": 10}
EXPECTED = {step: {key: f"{key} of {step}" for key in KEPT} for step in range(1, 15)}


def course(*, missing: tuple[int, ...] = (), healed_at: int = 10, last: int = 14) -> list[dict[str, Any]]:
    """A run of 14 steps of 0.5 s each; a rank is lost in step 11, which the others end at 6.5 s."""
    found: list[dict[str, Any]] = [{"kind": "hint", "time": 6.0, "step": healed_at, "hint": "lost: rank 2 on n2"}]
    for step in range(1, last + 1):
        when = 0.5 * step if step <= 10 else 6.5 + 0.5 * (step - 11)
        found.append({"kind": "digests", "time": when, "step": step, **EXPECTED[step]})
        found.append({"kind": "train", "time": when, "step": step})
    return sorted((each for each in found if each["step"] not in missing), key=lambda each: each["time"])


def test_time_of_a_loss_is_that_beyond_the_steps_own() -> None:
    (trial,) = judge([STRIKE], course(), EXPECTED)
    assert trial == {
        "rank": 2,
        "seconds": pytest.approx(6.5 - 5.2 - 0.5),
        "step_seconds": pytest.approx(0.5),
        "steps_lost": 0,
        "is_equal": True,
    }


def test_steps_that_were_missed_or_made_again_are_told() -> None:
    assert judge([STRIKE], course(missing=(11,)), EXPECTED)[0]["is_equal"]
    assert not judge([STRIKE], course(missing=(11, 12)), EXPECTED)[0]["is_equal"]
    assert not judge([STRIKE], course(last=13), EXPECTED)[0]["is_equal"]
    assert judge([STRIKE], course(healed_at=8), EXPECTED)[0]["steps_lost"] == 2
    assert judge([STRIKE], course(last=10)[:-1], EXPECTED)[0]["seconds"] is None, "the job ended"


@pytest.mark.parametrize("key", KEPT)
def test_images_or_bits_that_differ_are_seen(key: str) -> None:
    expected = EXPECTED | {13: EXPECTED[13] | {key: "other"}}
    assert not judge([STRIKE], course(), expected)[0]["is_equal"]
