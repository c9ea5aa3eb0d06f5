"""Shared by the tests of the input."""

import pytest

from bigbatch.trainer.input import retry


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no read for stuck because the machine stood still; who tests what becomes of those says how long one may."""
    monkeypatch.setattr(retry, "GRACE_SECONDS", 60.0)
