"""Control channel of a job of one process: without a store's process, threads or a failure detector."""

import json
from collections.abc import Sequence
from threading import RLock
from typing import Any

from bigbatch.comm.rendezvous.environ import ProcessEnv


class OwnStore:
    """Keys and values of one process. Thread-safe; a signal handler may call it, too."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = RLock()

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, count: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + count
            self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = self._values.get(key, b"") + value.encode()


class NoOtherRanks:
    """Failure detector of a job of one process: no other rank can fail, or wait for this one."""

    heals = has_failed = False
    verdict = None

    def begin(self) -> None:
        """Do nothing."""

    publish_departure = begin

    def publish_success(self, *, within_seconds: float) -> None:
        """Do nothing."""

    def publish_crash(self, exit_code: int) -> None:
        self.has_failed = True


class AloneControl:
    """Control channel of rank 0 of 1: what it gathers is its own; see JobControl."""

    rank, world_size = 0, 1

    def __init__(self, env: ProcessEnv, *, timeout_seconds: float, warn_seconds: float) -> None:
        self.host, self.master = env.host, env.master
        self.timeout_seconds, self.warn_seconds = timeout_seconds, warn_seconds
        self.store, self.detector = OwnStore(), NoOtherRanks()
        self._num_keys = 0

    def gather_text(self, text: str, *, what: str = "", timeout_seconds: float | None = None) -> list[str]:
        return [text]

    def gather(self, value: Any, **how: Any) -> list[Any]:
        """Return the value as JSON has it: tuples become lists."""
        return [json.loads(json.dumps(value))]

    def agree(self, what: str, text: str, *, remedy: str = "") -> None:
        """Do nothing."""

    def collect_text(self, text: str, *, what: str) -> list[str]:
        return [text]

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str:
        return text

    def next_key(self) -> str:
        self._num_keys += 1
        return f"bigbatch/text/{self._num_keys}"

    def read(self, key: str, *, what: str, source: int | None = None) -> str:
        return self.store.get(key).decode()

    def host_of(self, rank: int) -> str:
        return self.host
