"""Shared by the tests of the simulator: no rate that a doctor has measured on this machine is used."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_kept_rates(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "no-rates"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
