"""A trial's process: what it has evaluated so far, how it is stopped, how it ended."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bigbatch.comm.rendezvous.environ import without_identity
from bigbatch.errors import FOLLOWS, printable
from bigbatch.files import make_folder, open_to_append
from bigbatch.trainer.run.folder import RunDir, read_records, writing

OUTPUT = "output.txt"
"""In a trial's folder: all that its processes printed."""
PATIENCE_SECONDS = (60.0, 15.0)
"""After the request to stop, which a run answers by a checkpoint after the step under way, a second one follows, by
which `bigbatch launch` ends its ranks; then the process is killed."""
END_SECONDS = 5.0
"""mpirun takes about one to kill its ranks."""
REASON_CHARS = 300


class RunningTrial:
    """Runs one process (or launcher) in a session of its own, so that a Ctrl-C is the search's to pass on."""

    def __init__(self, argv: Sequence[str], folder: Path, *, inherits: IO[Any]) -> None:
        """Start it. inherits: a locked file; as long as the process lives, the lock is held. Raises: RunFolderError."""
        self.folder = folder
        self.argv = list(argv)
        self._started = time.monotonic()
        self._last_epoch = 0.0
        self._requests: list[float] = []
        self._evaluated: list[dict[str, Any]] = []
        self._evaluated_bytes = 0
        with writing(folder / OUTPUT):
            make_folder(folder, within=folder.parent)
            with open_to_append(folder / OUTPUT) as output:
                # a trial that goes on appends: its reason is looked for in its own words only
                self._output_start = output.tell()
                self._process = subprocess.Popen(
                    self.argv,
                    env=without_identity(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(inherits.fileno(),),
                )

    @property
    def seconds(self) -> float:
        """Return the seconds since its start."""
        return time.monotonic() - self._started

    @property
    def was_asked(self) -> bool:
        """Tell whether we asked it to stop."""
        return bool(self._requests)

    def new_evaluations(self) -> list[dict[str, Any]]:
        """Read the records of evaluations that no earlier call gave, in order."""
        found = [record for record in self._evaluations() if record["epoch"] > self._last_epoch]
        if found:
            self._last_epoch = found[-1]["epoch"]
        return found

    def last_evaluation(self) -> dict[str, Any] | None:
        """Return the newest, or None."""
        found = self._evaluations()
        return found[-1] if found else None

    def _evaluations(self) -> list[dict[str, Any]]:
        """Read the evaluations of the whole file, which is read again only when it has grown."""
        path = RunDir(self.folder).metrics
        num_bytes = path.stat().st_size if path.exists() else 0
        if num_bytes != self._evaluated_bytes:
            self._evaluated = [record for record in read_records(path) if record["kind"] == "eval"]
            self._evaluated_bytes = num_bytes
        return self._evaluated

    def ask_to_stop(self) -> None:
        """Save a checkpoint and end: what SIGTERM says to `bigbatch train` and `bigbatch launch` alike."""
        self._requests.append(time.monotonic())
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int | None:
        """Return None while it runs; one that was asked to stop is pressed harder as its time runs out."""
        code = self._process.poll()
        if code is None and self._requests:
            first, second = PATIENCE_SECONDS
            waited = time.monotonic() - self._requests[-1]
            if len(self._requests) == 1 and waited > first:
                self.ask_to_stop()
            elif len(self._requests) == 2 and waited > second:
                self.kill()
        return code

    def end(self) -> None:
        """End it without a checkpoint; `bigbatch launch` gets time to end its ranks, which it does when asked twice."""
        while len(self._requests) < 2:
            self.ask_to_stop()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it and the processes of its session at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def reason(self) -> str:
        """Say why it failed, in a line: the last of its words that an error of bigbatch begins, else its last words."""
        with writing(self.folder / OUTPUT), (self.folder / OUTPUT).open("rb") as output:
            output.seek(self._output_start)
            text = output.read().decode(errors="backslashreplace")
        return find_reason(text) or f"it ended with exit code {self._process.returncode} and without a word"


def find_reason(text: str) -> str:
    """Find the last line that begins as errors of bigbatch do, without that; else the last line; nothing in no text.

    What a terminal would obey is escaped.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.partition("bigbatch: ")[2] for line in lines if re.match(r"(\[[^]]*\]:?\s*)?bigbatch: ", line)]
    causes = [line for line in ours if not FOLLOWS.search(line)]
    return printable((causes or ours or lines or [""])[-1][:REASON_CHARS])
