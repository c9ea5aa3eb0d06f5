"""How far the work on a data set is: bars on a terminal, lines elsewhere, always on the error stream."""

import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from bigbatch.trainer.datasets import show_progress as module
from bigbatch.trainer.datasets.show_progress import show_each, show_progress


def test_show_progress_a_line_at_every_tenth_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("checking") as advance:
        for done in (50, 120, 199, 1000, 1000):
            advance(done, 1000)
    lines = ["checking: 120 of 1,000 images", "checking: 1,000 of 1,000 images"]
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_show_progress_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rate leaves out what was done before the first call: by an earlier process."""
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=iter([100.0, 102.0]).__next__))
    with show_progress("verifying", unit="shards") as advance:
        advance(500, 1000)
        advance(508, 1000)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"verifying .* 508/1,000 4 shards/s", err)


def test_show_each_has_a_bar_for_each_kind(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    with show_each() as report:
        report("checking x.tar", 5, 5)
        report("writing train", 1, 4)
    screen = capsys.readouterr().err
    assert re.search(r"checking x\.tar.*100%", screen)
    assert re.search(r"writing train.*25%", screen)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_show_progress_names_of_files_are_shown_as_they_are(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks like rich's markup, and what would drive a terminal."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    with show_progress("looking at [/red][bold]a\x1b]0;b\x07") as on_progress:
        on_progress(1, 1)
    said = capsys.readouterr().err
    assert "[/red][bold]a" in said
    assert "\x1b]0;b" not in said
