"""Record how the first rank ended, for `bigbatch launch mpirun`: mpirun ends with 0 after it lost a node's daemon."""

import atexit
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.exit_codes import INTERRUPTED
from bigbatch.files import write_whole

BEGUN = "begun"


def record_begin(env: ProcessEnv) -> None:
    """Record that rank 0 has started; record exit code 0 when the interpreter ends without an exception.

    Does nothing on other ranks, and on a host that cannot read the launcher's file.
    """
    if _write(env, BEGUN, over=("",)):
        atexit.register(_record_good_end, env, os.getpid())


def record_end(env: ProcessEnv, code: int) -> None:
    """Record rank 0's exit code, unless one is recorded already."""
    _write(env, str(code), over=("", BEGUN))


def read_record(path: Path) -> int | str | None:
    """Return rank 0's exit code; BEGUN or "" if it recorded none; None if there is no file."""
    with suppress(OSError):
        text = path.read_text()
        return int(text) if text.isdecimal() else text
    return None


def has_recorded_failure(path: Path) -> bool:
    """Return whether rank 0 failed, other than by a request to stop."""
    code = read_record(path)
    return isinstance(code, int) and code not in (0, INTERRUPTED)


def _write(env: ProcessEnv, text: str, *, over: Collection[str]) -> bool:
    with suppress(OSError):
        if env.rank == 0 and env.stopped_file is not None and env.stopped_file.read_text() in over:
            write_whole(env.stopped_file, text.encode())
            return True
    return False


def _record_good_end(env: ProcessEnv, pid: int) -> None:
    # a forked process inherits the registered functions
    if os.getpid() == pid and getattr(sys, "last_value", None) is None:
        record_end(env, 0)
