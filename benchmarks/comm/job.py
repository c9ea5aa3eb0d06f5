"""The ranks of one measurement: their meeting, messages and end."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.rendezvous.exit_record import record_end
from bigbatch.errors import UserError

TIMEOUT_SECONDS = 300.0
"""A silent peer ends the job after this: the largest sums on the slowest link take tens of seconds."""


@dataclass(frozen=True)
class Job:
    """The ranks of one job, connected over tcp, and their common start."""

    communicator: Communicator
    meeting_N: Tensor
    interface: str | None
    """Interface with the counters to read; None: all but loopback."""
    others: list[Communicator] = field(default_factory=list)
    """Further connections, to close with the job's own."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.communicator.topology.num_nodes

    def meet(self) -> None:
        """Wait for all ranks; they leave within about a millisecond of each other. Collective."""
        self.communicator.sum_(self.meeting_N, label="meeting before a repetition")

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of every rank. Collective."""
        return [json.loads(text) for text in self.communicator.gather_text(json.dumps(value))]

    def say(self, text: str) -> None:
        """Print a line on rank 0's standard error."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def say_left_out(self, left_out: Mapping[str, str]) -> None:
        """Print the contestants that cannot take part, and why."""
        for name, reason in left_out.items():
            self.say(f"left out: {name}: {reason}")


def join(*, interface: str | None) -> Job:
    """Meet the other ranks. Raises: CommError."""
    torch.set_num_threads(1)
    communicator = connect(
        backend="tcp",
        algorithm="doubling",
        interface=interface,
        timeout_seconds=TIMEOUT_SECONDS,
        warn_seconds=TIMEOUT_SECONDS,
        device=torch.device("cpu"),
    )
    return Job(communicator, communicator.allocate(1, torch.float32), interface)


def run_rank(run: Callable[[], None]) -> None:
    """Run a rank's program and end the process: one line and 1 for a user's error.

    Skips the interpreter's teardown, in which threads of gloo and Horovod may abort; a failed rank waits for no other.
    """
    code = 0
    try:
        run()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    record_end(read_process_env(), code)
    os._exit(code)
