"""The process of a probe, from the doctor's side and from its own: orders and answers, lines of JSON in two files.

Files, since all ranks of a probe read the same orders, and no launcher passes its standard input on to all.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bigbatch.errors import DoctorError
from bigbatch.files import open_to_append, write_new
from bigbatch.interpreter import bigbatch_argv
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.child import ChildProcess

CONFIG, ORDERS, ANSWERS = "config.yaml", "orders", "answers"
"""Files in the folder of a probe: the complete experiment that it measures, and both directions."""
LOOK_SECONDS = 0.02
END_SECONDS = 10.0
"""Seconds for a probe to exit by itself: its ranks leave the job together."""


class Child:
    """Process of a probe of one config, from its start to close(); idle while another one measures."""

    def __init__(
        self, config: Config, folder: Path, *, num_ranks: int, start_seconds: float, command: str = "probe"
    ) -> None:
        """Start it. Raises: DoctorError if it fails or takes longer than start_seconds to its first answer.

        command: the doctor's own subcommand that answers.
        """
        folder.mkdir()
        self._is_job, self._folder, self._num_answers = num_ranks > 1, folder, 0
        write_new(folder / CONFIG, dump_config(config).encode())
        launch = ["launch", "local", "--ranks", str(num_ranks), "--"] if self._is_job else []
        argv = [*bigbatch_argv(), *launch, "doctor", command, str(folder), str(os.getpid())]
        self._process = ChildProcess(argv, log=folder / "output.txt", within=folder)
        try:
            self.facts: Mapping[str, Any] = self._answer(limit_seconds=start_seconds)
        except BaseException:
            self.kill()
            raise

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> dict[str, Any]:
        """Send an order and return the answer. Raises: DoctorError if it fails or takes longer than limit_seconds."""
        append(self._folder / ORDERS, {"what": what, **details})
        return self._answer(limit_seconds=limit_seconds)

    def close(self) -> None:
        """Ask it to exit; kill it if it does not."""
        append(self._folder / ORDERS, {"what": "end"})
        deadline = time.monotonic() + END_SECONDS
        while self._process.exit_code() is None:
            if time.monotonic() > deadline:
                self.kill()
                return
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        """End it, and the ranks that a failed launcher has left, at once."""
        # a launcher needs time to end its ranks; one process has nothing to lose, and may be in the midst of a step
        if self._is_job:
            self._process.end()
        else:
            self._process.kill()

    def _answer(self, *, limit_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_seconds
        while len(found := read_lines(self._folder / ANSWERS)) <= self._num_answers:
            if self._process.exit_code() is not None:
                raise DoctorError(self._process.reason())
            if time.monotonic() > deadline:
                raise DoctorError(f"took longer than {limit_seconds:.0f} s, and was ended")
            time.sleep(LOOK_SECONDS)
        self._num_answers += 1
        return found[self._num_answers - 1]


def orders(folder: Path, *, goes_on: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the doctor's orders as they arrive, until goes_on is false while none is waiting."""
    num_seen = 0
    while True:
        found = read_lines(folder / ORDERS)
        if num_seen < len(found):
            yield found[num_seen]
            num_seen += 1
        elif goes_on():
            time.sleep(LOOK_SECONDS)
        else:
            return


def append(path: Path, facts: dict[str, Any]) -> None:
    with open_to_append(path) as file:
        file.write((json.dumps(facts) + "\n").encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read whole lines: one may be half written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
