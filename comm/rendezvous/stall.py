"""Who keeps the others waiting: named on every rank before the time limit ends the job."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread

from torch._C._distributed_c10d import Store

from bigbatch.comm.rendezvous.control import Control
from bigbatch.errors import CommError

_FLAG = "bigbatch/stall/operation"


@dataclass(frozen=True)
class Pending:
    """Describes an operation under way: its number in order of submission, and since when (time.monotonic())."""

    number: int
    label: str
    since: float
    ranks: tuple[int, ...] | None = None
    """Who takes part; None for all ranks."""


class StallInspector:
    """Watches this rank's operations from a thread of its own, and says which ranks are late for one.

    A rank that has waited warn_seconds in an operation raises a flag in the control's store; the others, which look
    at it a few times per warn_seconds, write down whether they wait in the same operation; who has not is late. Each
    waiting rank names the late ones, and a late one that still runs says that it is waited for. Costs one small
    request per look. ends_job: also end this process after the control's timeout, for transports that only enqueue
    (NCCL), where no thread of ours waits that could give up.
    """

    def __init__(
        self,
        control: Control,
        oldest: Callable[[], Pending | None],
        *,
        warn_seconds: float,
        ends_job: bool = False,
        say: Callable[[str], None] = lambda text: print(f"bigbatch: {text}", file=sys.stderr, flush=True),
    ) -> None:
        self._control, self._oldest = control, oldest
        self._warn_seconds, self._ends_job, self._say = warn_seconds, ends_job, say
        # a few per warn_seconds: the others' answers come at most a quarter of it late
        self._look_seconds = min(1.0, warn_seconds / 4)
        self._noted: Pending | None = None
        self._noted_at = 0.0
        self._said: set[int] = set()
        self._closed = Event()
        self._thread = Thread(target=self._watch, name="bigbatch-stall", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._look_seconds):
            try:
                self.look()
            except RuntimeError:
                return  # the store is gone: the operation itself fails, and knows more

    def look(self) -> None:
        """Take one look at this rank's operation and at the flags."""
        self._control.answer_roll_call()
        pending = self._oldest()
        waited = time.monotonic() - pending.since if pending else 0.0
        flagged = _flagged(self._control.store)
        if pending and waited > self._warn_seconds and flagged != pending.number:
            self._control.store.set(f"bigbatch/stall/{pending.number}/label", pending.label)
            self._control.store.set(f"bigbatch/stall/{pending.number}/of", " ".join(map(str, self._ranks_of(pending))))
            self._control.store.set(_FLAG, str(pending.number))
            flagged = pending.number
        if flagged is None:
            return
        if pending and pending.number == flagged:
            self._note(pending)
            # two looks: by then every rank that waits in it has written so
            if pending.number not in self._said and time.monotonic() - self._noted_at > 2 * self._look_seconds:
                self._said.add(pending.number)
                self._say(self._name_the_late(pending, waited))
            if self._ends_job and waited > self._control.timeout_seconds:
                self._end(pending, waited)
        elif (
            flagged not in self._said
            and (pending is None or pending.number < flagged)
            # the flag stays after the operation has ended
            and not self._has_passed(flagged)
            and self._is_for(flagged, self._control.rank)
        ):
            self._said.add(flagged)
            label = self._control.store.get(f"bigbatch/stall/{flagged}/label").decode()
            self._say(f"rank {self._control.rank} on {self._control.host} is late: other ranks wait for it in {label}")

    def _ranks_of(self, pending: Pending) -> Sequence[int]:
        return range(self._control.world_size) if pending.ranks is None else pending.ranks

    def _has_passed(self, number: int) -> bool:
        return self._noted is not None and self._noted.number >= number

    def _note(self, pending: Pending) -> None:
        """Write down, once, that this rank waits in the operation."""
        if self._noted is None or self._noted.number != pending.number:
            self._noted, self._noted_at = pending, time.monotonic()
            key = f"bigbatch/stall/{pending.number}"
            self._control.store.append(f"{key}/ranks", f"{self._control.rank} ")  # type: ignore[attr-defined]
            # another group may have raised the flag: each counts its operations, and they have the same numbers
            if not self._is_for(pending.number, self._control.rank):
                of = "".join(f" {rank}" for rank in self._ranks_of(pending))
                self._control.store.append(f"{key}/of", of)  # type: ignore[attr-defined]

    def _is_for(self, number: int, rank: int) -> bool:
        """Tell whether the flagged operation has that rank, as far as it is known."""
        return str(rank) in self._control.store.get(f"bigbatch/stall/{number}/of").decode().split()

    def _name_the_late(self, pending: Pending, seconds: float) -> str:
        here = {int(rank) for rank in self._control.store.get(f"bigbatch/stall/{pending.number}/ranks").split()}
        late = [rank for rank in self._ranks_of(pending) if rank not in here]
        names = ", ".join(f"rank {rank} on {self._control.host_of(rank)}" for rank in late)
        verdict = f"{names} {'has' if len(late) == 1 else 'have'} not come to it" if late else "all ranks are in it"
        return (
            f"rank {self._control.rank} on {self._control.host} has waited {seconds:.1f} s in {pending.label}: "
            f"{verdict} (the job ends after {self._control.timeout_seconds:g} s)"
        )

    def _end(self, pending: Pending, seconds: float) -> None:
        error: CommError = self._control.explain(pending.label, seconds, TimeoutError("some rank has not come to it"))
        self._say(str(error))
        os._exit(1)  # the main thread waits for the device, where nothing can reach it


def _flagged(store: Store) -> int | None:
    return int(store.get(_FLAG)) if store.check([_FLAG]) else None
