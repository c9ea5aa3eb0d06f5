"""Record the first rank's exit code in a file, because mpirun itself exits with 0 after it lost a node's daemon.

The file holds the exit code; before that "begun", and "begun 3" once the rank that was launched as rank 3 is the first.
"""

import atexit
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import INTERRUPTED
from bigbatch.files import read_plain, write_whole

BEGUN = "begun"


def record_begin(env: ProcessEnv) -> None:
    """Record that rank 0 has started; record exit code 0 when the interpreter ends without an exception.

    The first rank of a later group replaces what a former first rank recorded, because that one has left the job. Does
    nothing on other ranks, and on a host that cannot read the launcher's file.
    """
    if env.rank == 0 and (_write(env, _begun(env)) if env.launched_as else _write(env, BEGUN, over=("",))):
        atexit.register(_record_good_end, env, os.getpid())


def record_end(env: ProcessEnv, code: int) -> None:
    """Record the first rank's exit code, unless one is recorded already."""
    _write(env, str(code), over=("", BEGUN) if env.launched_as == 0 else (_begun(env),))


def _begun(env: ProcessEnv) -> str:
    return f"{BEGUN} {env.launched_as}"


def read_record(path: Path) -> int | str | None:
    """Return the first rank's exit code, or the text recorded before its end; None if there is no file."""
    with suppress(OSError):
        text = read_plain(path).decode()
        return int(text) if text.isdecimal() else text
    return None


def has_recorded_failure(path: Path) -> bool:
    """Return whether the first rank failed, other than by a request to stop."""
    code = read_record(path)
    return isinstance(code, int) and code not in (0, INTERRUPTED)


def _write(env: ProcessEnv, text: str, *, over: Collection[str] | None = None) -> bool:
    with suppress(OSError):
        if env.stopped_file is not None:
            known = read_plain(env.stopped_file).decode()  # an error if this host does not see it
            if over is None or known in over:
                write_whole(env.stopped_file, text.encode())
                return True
    return False


def _record_good_end(env: ProcessEnv, pid: int) -> None:
    # a forked process inherits the registered functions
    if os.getpid() == pid and getattr(sys, "last_value", None) is None:
        record_end(env, 0)
