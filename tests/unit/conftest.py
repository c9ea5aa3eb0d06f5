"""Shared by the unit tests: no seconds are counted by hypothesis, no figures rendered that no test looks at, and no
YAML parsed twice.
"""

import io
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from hypothesis import settings
from matplotlib.figure import Figure

from bigbatch.trainer.config import strict_yaml

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


PARSE = strict_yaml._Loader.get_single_node
"""Takes half of the CPU time of loading a config, of which the tests load thousands from a few files."""
PARSED: dict[str, yaml.Node | None] = {}


def parse_once(loader: strict_yaml._Loader) -> yaml.Node | None:
    """Return the nodes of a text, which its values are made from at each call."""
    text = loader.buffer
    if text not in PARSED:
        PARSED[text] = PARSE(loader)
    return PARSED[text]


strict_yaml._Loader.get_single_node = parse_once  # type: ignore[method-assign]


@pytest.fixture
def rendered_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render figures in this test."""
    monkeypatch.setattr(Figure, "savefig", RENDER)
