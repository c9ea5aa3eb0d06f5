"""Start, query and end the process of a probe."""

import time
from collections.abc import Mapping
from os import getpid
from pathlib import Path
from typing import Any

from bigbatch.errors import DoctorError
from bigbatch.files import write_new
from bigbatch.interpreter import bigbatch_argv
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.doctor.exchange import LOOK_SECONDS, Exchange
from bigbatch.trainer.run.child import ChildProcess

END_SECONDS = 10.0
"""Seconds for a probe to exit by itself: its ranks leave the job together."""


class Child:
    """Process of a probe of one config, from its start to close(); idle while another one measures."""

    def __init__(self, config: Config, folder: Path, *, num_ranks: int, start_seconds: float) -> None:
        """Start it. Raises: DoctorError if it fails or takes longer than start_seconds to its first answer."""
        folder.mkdir()
        self._is_job = num_ranks > 1
        self._exchange = Exchange(folder)
        write_new(self._exchange.config, dump_config(config).encode())
        self._num_answers = 0
        argv = probe_argv(folder, num_ranks=num_ranks)
        self._process = ChildProcess(argv, log=folder / "output.txt", within=folder)
        try:
            self.facts: Mapping[str, Any] = self._answer(limit_seconds=start_seconds)
        except BaseException:
            self._end()
            raise

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> dict[str, Any]:
        """Send an order and return the answer. Raises: DoctorError if it fails or takes longer than limit_seconds."""
        self._exchange.order(what, **details)
        return self._answer(limit_seconds=limit_seconds)

    def close(self) -> None:
        """Let it exit; kill it if it does not."""
        self._exchange.order("end")
        deadline = time.monotonic() + END_SECONDS
        while self._process.exit_code() is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if self._process.exit_code() is None:
            self._end()

    def kill(self) -> None:
        """End it at once."""
        if self._process.exit_code() is None:
            self._end()

    def _end(self) -> None:
        # a launcher needs time to end its ranks; one process has nothing to lose, and may be in the midst of a step
        if self._is_job:
            self._process.end()
        else:
            self._process.kill()

    def _answer(self, *, limit_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_seconds
        while (found := self._exchange.find_answer(self._num_answers)) is None:
            if self._process.exit_code() is not None:
                raise DoctorError(self._process.reason())
            if time.monotonic() > deadline:
                raise DoctorError(f"took longer than {limit_seconds:.0f} s, and was ended")
            time.sleep(LOOK_SECONDS)
        self._num_answers += 1
        return found


def probe_argv(folder: Path, *, num_ranks: int) -> list[str]:
    """Return the argv of one process, or of `bigbatch launch local` for several ranks on this host."""
    launch = ["launch", "local", "--ranks", str(num_ranks), "--"] if num_ranks > 1 else []
    return [*bigbatch_argv(), *launch, "doctor", "probe", str(folder), str(getpid())]
