"""Whether a stop fits into the seconds between its request and the end of the job."""

from unittest.mock import MagicMock

from bigbatch.trainer.observe.notice import Notice


def test_notice_that_is_too_short_for_a_step_and_a_checkpoint_is_said_once() -> None:
    watch = Notice(MagicMock(), seconds=120)
    assert watch.see("step", 100.0) is None
    assert watch.see("evaluation", 20.0) is None
    assert watch.see("checkpoint", 10.0) is None, "100 s and 20 s just do: another one may be under way"
    text = watch.see("checkpoint", 10.5)
    assert text is not None
    for words in ("up to 121 s", "100 s until a step", "21 s to save", "asks 120 s before", "--stop-seconds 300"):
        assert words in text
    assert watch.see("step", 1000.0) is None


def test_notice_that_is_too_short_for_an_evaluation_is_said() -> None:
    watch = Notice(MagicMock(), seconds=60)
    assert watch.see("step", 1.0) is None
    assert "61 s until an evaluation's next exchange" in (watch.see("evaluation", 61.0) or "")
