"""Agree on the step at which all ranks stop, through the store and without a collective."""

from threading import Lock

from bigbatch.comm.rendezvous.control import Control


class Departure:
    """Agrees on the boundary at which all ranks stop, after any rank has asked for it.

    All ranks pass the same boundaries, such as the ends of steps, in the same order, at different times. A rank that
    sees the request writes how many boundaries it has passed, goes on working, and waits at its next boundary for the
    answer: the first boundary that no rank had passed. So no rank can pass that boundary before it knows the answer.
    Does not synchronize with the device. Collective to construct.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._key = control.next_key()
        self._lock = Lock()
        self._num_passed = 0
        self._has_told = False
        self._answer: int | None = None

    def ask(self) -> None:
        """Ask all ranks to stop. Any thread of any rank may call it, repeatedly."""
        self._control.store.set(f"{self._key}/asked", "1")

    def heed(self) -> bool:
        """Check whether any rank has asked, and answer once. One thread of each rank calls it periodically."""
        store = self._control.store
        if self._has_told or not store.check([f"{self._key}/asked"]):
            return self._has_told
        with self._lock:
            self._has_told, num_passed = True, self._num_passed
        store.append(f"{self._key}/passed", f"{num_passed} ")
        # the last rank to arrive finds the numbers of all ranks
        if store.add(f"{self._key}/told", 1) == self._control.world_size:
            furthest = max(map(int, store.get(f"{self._key}/passed").split()))
            store.set(f"{self._key}/answer", str(furthest + 1))
        return True

    @property
    def is_known(self) -> bool:
        """Return whether this rank has read the answer."""
        return self._answer is not None

    def is_agreed(self) -> bool:
        """Return whether all ranks have written, so that they will stop: not if one of them is lost."""
        return self.is_known or self._control.store.check([f"{self._key}/answer"])

    def is_due(self) -> bool:
        """Pass a boundary; return whether all ranks stop at it, or should have stopped before. The same on all ranks.

        Raises: PeerLostError if the answer of some rank does not come.
        """
        with self._lock:
            self._num_passed += 1
            has_told = self._has_told
        if has_told and self._answer is None:
            answer = self._control.read(f"{self._key}/answer", what="agreement on the step to stop after")
            self._answer = int(answer)
        return self._answer is not None and self._num_passed >= self._answer
