"""Shared by the tests of tools: no rates of this user."""

from functools import cache

import pytest

from bigbatch.tools.simulate import cluster


@pytest.fixture(autouse=True)
def _no_kept_rates(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the rates that a doctor measured for this user, and keep none; other caches save time and stay."""
    place = cache(lambda: tmp_path_factory.mktemp("rates"))
    monkeypatch.setattr(cluster, "measured_folder", lambda name: place() / name)
