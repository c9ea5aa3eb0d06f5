"""Which ranks started together, told through a store that outlives them: by no launcher's count, as each agent of
torchrun counts its own restarts, and a change of members counts for none.

Each rank but the first writes down a word of its own, which nobody had before. The first rank answers every word with
the name of its session; those of ranks that are gone are answered, too, and nobody reads that. It waits until all ranks
have come to its session, and only then do they begin: a rank that an earlier first rank had answered follows the later.
"""

import time
import uuid
from collections.abc import Callable

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.job_store import KeyValue
from bigbatch.comm.rendezvous.late_ranks import WARN_SECONDS, name_ranks, telling_late

_WORDS = "bigbatch/words"
_PAUSE_SECONDS = 0.02


def meet_in_session(
    store: KeyValue, *, rank: int, world_size: int, timeout_seconds: float, warn_seconds: float = WARN_SECONDS
) -> str:
    """Return the name that the ranks of this start have in common, and no others ever. Collective.

    After warn_seconds rank 0 prints which ranks are late.

    Raises: TimeoutError naming who has not come; what the store raises.
    """
    deadline = awake_seconds() + timeout_seconds
    if rank == 0:
        return _host(store, world_size, deadline, warn_seconds=warn_seconds)
    return _join(store, rank, deadline)


def _host(store: KeyValue, world_size: int, deadline: float, *, warn_seconds: float) -> str:
    session = uuid.uuid4().hex
    comers = {rank: f"{session}/rank/{rank}" for rank in range(1, world_size)}
    num_answered = 0

    def have_come() -> bool:
        nonlocal num_answered
        words = store.get(_WORDS).decode().split() if store.check([_WORDS]) else []
        for word in words[num_answered:]:
            store.set(f"bigbatch/answer/{word}", session)
        num_answered = len(words)
        return store.check(list(comers.values()))

    def late() -> str:
        return name_ranks([rank for rank, key in comers.items() if not store.check([key])])

    with telling_late(warn_seconds, lambda: f"rank 0 waits for {named} to start" if (named := late()) else ""):
        if not wait_for(have_come, deadline):
            raise TimeoutError(f"{late()} did not come in time")
    store.set(f"{session}/begins", "1")
    return session


def _join(store: KeyValue, rank: int, deadline: float) -> str:
    word, session = uuid.uuid4().hex[:16], ""
    store.append(_WORDS, f"{word} ")
    answer = f"bigbatch/answer/{word}"

    def begins() -> bool:
        nonlocal session
        if store.check([answer]) and (told := store.get(answer).decode()) != session:
            session = told
            store.set(f"{session}/rank/{rank}", "1")
        return bool(session) and store.check([f"{session}/begins"])

    if not wait_for(begins, deadline):
        raise TimeoutError("some other rank did not come in time" if session else "rank 0 did not come in time")
    return session


def wait_for(is_so: Callable[[], bool], deadline: float) -> bool:
    """Ask again and again; tell whether it became so before awake_seconds() reaches the deadline."""
    while not is_so():
        if awake_seconds() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
