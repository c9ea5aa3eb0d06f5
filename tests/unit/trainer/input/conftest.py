"""Shared by the tests of the input."""

from collections.abc import Callable, Iterator

import pytest
from image_loaders import made_loaders

from bigbatch.trainer.input import retry
from bigbatch.trainer.input.loaders.encoded import ImageLoader


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give reads enough time on a slow machine; tests of stuck reads set their own limit."""
    monkeypatch.setattr(retry, "GRACE_SECONDS", 60.0)


@pytest.fixture(params=["torchvision", "dali"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., ImageLoader]]:
    """A maker of each loader of images, with the SETTINGS of the test's file."""
    with made_loaders(request.param, request.module.SETTINGS) as make:
        yield make
