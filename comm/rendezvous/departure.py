"""Agree on the step at which all ranks stop, or admit joining ranks, through the store and without a collective."""

from threading import Lock

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.control import Control


class Departure:
    """Agrees on the boundary at which all ranks stop, or admit joining ranks, after any rank has asked for it.

    All ranks pass the same boundaries, such as the ends of steps, in the same order, at different times. A rank that
    sees the request writes how many boundaries it has passed, continues working, and waits at its next boundary for the
    answer: the first boundary that no rank had passed. So no rank can pass that boundary before it knows the answer.
    For a join it writes only once all ranks poll often, so that no rank waits for another one's next poll.
    Does not synchronize with the device. Collective to construct.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._key = control.next_key()
        self._lock = Lock()
        self._num_passed = 0
        self._has_told = False
        self._answer: int | None = None
        self.is_near = False
        """A join has been asked for, so the caller must call poll() often."""
        self.is_join = False
        """All ranks have agreed on a join, not a stop. Valid once is_known."""
        self.has_come = False
        """Whether this rank has passed the boundary of the answer."""
        self.since = 0.0
        """When this rank came to its last boundary; awake_seconds()."""

    def ask(self, *, joins: bool = False) -> None:
        """Ask all ranks to stop, or to admit joining ranks. Any thread of any rank may call it, repeatedly.

        If both are asked for, all stop unless they have agreed on a join before.
        """
        if not joins:
            self._control.store.set(f"{self._key}/stops", "1")
        self._control.store.set(f"{self._key}/asked", "1")

    def poll(self) -> bool:
        """Check whether any rank has asked, and answer once. One thread of each rank calls it periodically."""
        store = self._control.store
        if self._has_told or not store.check([f"{self._key}/asked"]):
            return self._has_told
        return self._tell()

    def _tell(self) -> bool:
        """Answer a request; return False if not all ranks poll often yet, so that the answer to a join must wait."""
        store = self._control.store
        if not store.check([f"{self._key}/stops"]):
            num_near, self.is_near = store.add(f"{self._key}/near", 0 if self.is_near else 1), True
            if num_near < self._control.world_size:
                return False
        with self._lock:
            self._has_told, num_passed = True, self._num_passed
        store.append(f"{self._key}/passed", f"{num_passed} ")
        # the last rank to arrive finds the numbers of all ranks
        if store.add(f"{self._key}/told", 1) == self._control.world_size:
            furthest = max(map(int, store.get(f"{self._key}/passed").split()))
            what = "stop" if store.check([f"{self._key}/stops"]) else "join"
            store.set(f"{self._key}/answer", f"{furthest + 1} {what}")
        return True

    @property
    def is_known(self) -> bool:
        return self._answer is not None

    def is_agreed(self) -> bool:
        """Return whether all ranks have answered and will stop; false if a rank is lost before its answer."""
        store, key = self._control.store, f"{self._key}/answer"
        return store.check([key]) and store.get(key).endswith(b"stop")

    def is_due(self) -> bool:
        """Pass a boundary; return whether it is the agreed one or a later one. The same on all ranks.

        Raises: PeerLostError if the answer of some rank does not come.
        """
        self.since = awake_seconds()
        with self._lock:
            self._num_passed += 1
            has_told = self._has_told
        if has_told and self._answer is None:
            answer, what = self._control.read(f"{self._key}/answer", what="agreement on the step to stop after").split()
            self._answer, self.is_join = int(answer), what == "join"
        self.has_come = self._answer is not None and self._num_passed >= self._answer
        return self.has_come
