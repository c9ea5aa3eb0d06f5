"""Collect all errors of an experiment, without those that only follow from another one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from bigbatch.errors import ConfigError


class Refusals:
    """Collects errors while an experiment is read, to raise them together."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._doubtful: set[str] = set()

    @contextmanager
    def collect(self, key: str) -> Iterator[None]:
        """Keep a ConfigError that the block raises; the value of key, if any, is then doubtful."""
        try:
            yield
        except ConfigError as error:
            self._lines += map(str, error.args)
            if key:
                self._doubtful.add(key)

    @contextmanager
    def raise_all(self) -> Iterator[None]:
        """Raise all kept errors, and the lines of the block's ConfigError that name no doubtful key."""
        try:
            yield
        except ConfigError as error:
            doubtful = [re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w)") for key in self._doubtful]
            self._lines += [line for line in map(str, error.args) if not any(key.search(line) for key in doubtful)]
        if self._lines:
            raise ConfigError(*self._lines) from None
