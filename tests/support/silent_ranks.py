"""Jobs whose other ranks never answer."""

import pytest

from bigbatch.comm.rendezvous import control, limits


def hurry_count(monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.2) -> None:
    """Do not wait long for ranks that will not answer; the store may still take its time, as on a busy machine."""
    monkeypatch.setattr(limits, "ROLL_CALL_SECONDS", seconds)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.0)
    for module, limit in ((limits, "REQUESTS_SECONDS"), (control, "SILENCE_SECONDS")):
        monkeypatch.setattr(module, limit, 60.0)
