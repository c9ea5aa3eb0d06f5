"""Stores of torch's with a holder that is gone or stopped."""

from threading import Event

from torch.distributed import HashStore


class GoneStore(HashStore):
    """A store with a holder that has died."""

    def check(self, *_: object) -> bool:
        raise RuntimeError("connection reset")

    set = get = append = check  # type: ignore[assignment]


class StoppedStore(HashStore):
    """A store with a holder that is stopped until it continues."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = Event()

    def check(self, keys: list[str]) -> bool:
        assert self.goes_on.wait(timeout=60)
        return super().check(keys)

    def append(self, key: str, value: str) -> None:
        assert self.goes_on.wait(timeout=60)
        super().append(key, value)
