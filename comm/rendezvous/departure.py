"""Where ranks that work at paces of their own leave off together: agreed on beside the data, without a collective."""

from threading import Lock

from bigbatch.comm.rendezvous.control import Control


class Departure:
    """Agrees on the boundary of common work at which all ranks leave off, once any of them asks.

    All ranks pass the same boundaries, such as the ends of steps, in the same order, each in its own time. A rank that
    heeds the request writes down how many it has passed, and waits at its next one for the answer: the first boundary
    that no rank had passed. Until then it works on, so nobody waits for it; and none can pass the answer unawares.
    No device is asked. Collective to construct.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._key = control.next_key()
        self._lock = Lock()
        self._num_passed = 0
        self._has_told = False
        self._answer: int | None = None

    def ask(self) -> None:
        """Ask all ranks to leave off; any thread of any rank does, as often as it likes."""
        self._control.store.set(f"{self._key}/asked", "1")

    def heed(self) -> bool:
        """Take a look, beside the work, whether any rank has asked; one thread of each rank does every now and then."""
        store = self._control.store
        if self._has_told or not store.check([f"{self._key}/asked"]):
            return self._has_told
        with self._lock:
            self._has_told, num_passed = True, self._num_passed
        store.append(f"{self._key}/passed", f"{num_passed} ")
        # who comes last finds what all have written
        if store.add(f"{self._key}/told", 1) == self._control.world_size:
            furthest = max(map(int, store.get(f"{self._key}/passed").split()))
            store.set(f"{self._key}/answer", str(furthest + 1))
        return True

    def is_due(self) -> bool:
        """Pass a boundary; tell whether it, or one before it, is the one to leave off at: the same on all ranks.

        Raises: PeerLostError where the answer of some rank does not come.
        """
        with self._lock:
            self._num_passed += 1
            has_told = self._has_told
        if has_told and self._answer is None:
            answer = self._control.read(f"{self._key}/answer", what="agreement on the step to stop after")
            self._answer = int(answer)
        return self._answer is not None and self._num_passed >= self._answer
