"""A node of an emulated cluster that computes at half of its speed."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SLICE_SECONDS = 0.005


@contextmanager
def slowed(node: str) -> Iterator[None]:
    """Stop the preflight's rank on a node, once there is one, for half of the time."""
    end = threading.Event()
    thread = threading.Thread(target=_stop_and_go, args=(node, end))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _stop_and_go(node: str, end: threading.Event) -> None:
    process = None
    while process is None and not end.wait(0.05):
        process = find_rank(node)
    while process is not None and not end.is_set():
        try:
            os.kill(process, signal.SIGSTOP)
            time.sleep(SLICE_SECONDS)
            os.kill(process, signal.SIGCONT)
            time.sleep(SLICE_SECONDS)
        except ProcessLookupError:
            return


def find_rank(node: str) -> int | None:
    """Find the preflight on the emulated node of that name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_launcher = b"mpirun" in words[0] or b"srun" in words[0] or b"launch" in words
            if b"preflight" in words and not is_launcher:
                variables = (folder / "environ").read_bytes().split(b"\0")
                number = node.removeprefix("n")
                if {f"OMPI_COMM_WORLD_RANK={number}".encode(), f"SLURMD_NODENAME={node}".encode()} & set(variables):
                    return int(folder.name)
    return None
