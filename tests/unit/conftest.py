"""Shared by the unit tests: no seconds are counted by hypothesis, and no figures rendered that no test looks at."""

import io
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings
from matplotlib.figure import Figure

# a busy machine has too few seconds
settings.register_profile("bigbatch", parent=settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("bigbatch")

RENDER = Figure.savefig
"""Takes half a CPU second, as often as a run or a report ends."""


def save_blank(figure: Figure, file: str | Path | IO[Any], **options: Any) -> None:
    """Write the first bytes of a PNG, or an empty SVG, instead of the figure."""
    if isinstance(file, str | Path):
        with Path(file).open("wb") as opened:
            save_blank(figure, opened, format=Path(file).suffix[1:])
    elif isinstance(file, io.TextIOBase):
        file.write("<svg></svg>")
    else:
        file.write(b"<svg></svg>" if options.get("format") == "svg" else b"\x89PNG\r\n\x1a\n")


Figure.savefig = save_blank  # type: ignore[method-assign]


@pytest.fixture
def rendered_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render figures in this test."""
    monkeypatch.setattr(Figure, "savefig", RENDER)
