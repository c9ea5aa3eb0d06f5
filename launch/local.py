"""Run a launcher in the foreground: its output, its exit code, and Ctrl-C as a checkpoint."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType

from bigbatch.trainer.errors import ConfigError


def run_in_foreground(argv: list[str], *, environ: Mapping[str, str]) -> int:
    """Start argv and wait; its exit code, 128 + signal where one ended it.

    The job gets a session of its own, so that Ctrl-C reaches only this process: the first one becomes SIGUSR1
    for the launcher, which passes it on (the ranks save a checkpoint and stop), the second one SIGTERM.
    Raises: ConfigError when the launcher is not installed.
    """
    try:
        process = subprocess.Popen(argv, env=dict(environ), start_new_session=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{argv[0]} is not installed: pip install 'bigbatch[mpi]', or use bigbatch launch torchrun"
        ) from error
    asked = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            print("\nbigbatch: asking all ranks to save a checkpoint and stop", file=sys.stderr, flush=True)
        process.send_signal(signal.SIGUSR1 if asked == 1 else signal.SIGTERM)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
