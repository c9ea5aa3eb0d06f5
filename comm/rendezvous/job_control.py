"""Control channel of several ranks: rendezvous, exchange of short texts, and failure detection."""

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.failure_detector import FailureDetector, late_error
from bigbatch.comm.rendezvous.job_store import KeyValue
from bigbatch.comm.rendezvous.late_ranks import WARN_SECONDS
from bigbatch.comm.rendezvous.limits import (
    MAX_PEER_CHECKS_PER_SECOND,
    PEER_CHECK_SECONDS,
    POLL_SECONDS,
    SILENCE_SECONDS,
)
from bigbatch.comm.rendezvous.meeting import open_store
from bigbatch.errors import CommError
from bigbatch.words import first_difference, name_ranks

HOST = "bigbatch/host"
"""Prefix of the keys with the host of each rank that has met."""
PIECE_BYTES = 4 << 20
"""torch's store ends a connection that sends more than 8 MB at once."""
WHOLE_BYTES = 16 << 10
"""Longest text that is the value of its key, so that one request reads those of all ranks; others are in pieces."""
_WHOLE = b"="
"""Before such a text; the key of another one has the number of its pieces."""

_connections = 0
"""Number of control channels that this process has made: each has its own prefix for keys."""


class JobControl:
    """Control channel of several ranks, through a key-value store, with a failure detector.

    Collective: every rank constructs its controls in the same order. Independent of the backend, so it still works
    when that fails. timeout_seconds: limit of every wait and of each request to the store. meeting_seconds (None: the
    same): limit of the wait for all ranks to start; late ones are named after warn_seconds. joined: the store of a
    group that has formed after a rank failure, and the rank that holds it. Raises: CommError if the ranks cannot meet.
    """

    def __init__(
        self,
        env: ProcessEnv,
        *,
        timeout_seconds: float,
        meeting_seconds: float | None = None,
        warn_seconds: float = WARN_SECONDS,
        joined: tuple[KeyValue, int] | None = None,
    ) -> None:
        global _connections
        self.rank, self.world_size, self.host = env.rank, env.world_size, env.host
        self.timeout_seconds = timeout_seconds
        self.meeting_seconds = timeout_seconds if meeting_seconds is None else meeting_seconds
        self.warn_seconds = warn_seconds
        self.library = "control"
        """The transport, in errors."""
        if joined is None:
            # all ranks make theirs in the same order, so equal numbers mean the same one
            _connections += 1
            self.store, self.holder, met = open_store(
                env,
                f"bigbatch/{_connections}",
                timeout_seconds=timeout_seconds,
                meeting_seconds=self.meeting_seconds,
                warn_seconds=warn_seconds,
            )
        else:
            self.store, self.holder, met = joined[0], f"rank {joined[1]}", env
        self.master, self.secret = met.master, met.secret
        self._texts = 0
        self.hosts: dict[int, str] = {}
        """Host of each rank, as far as it is known."""
        self.detector = FailureDetector(self)
        # in a group formed after a failure the next operation reports a lost store: only then can another group form
        with self.detector.explained("meeting of all ranks") if joined is None else suppress(RuntimeError):
            self.store.set(f"{HOST}/{self.rank}", env.host)

    def gather_text(
        self, text: str, *, what: str = "comparison of a text over all ranks", timeout_seconds: float | None = None
    ) -> list[str]:
        """Gather a short text of every rank, in rank order, within timeout_seconds (None: the control's). Collective.

        Rank 0 collects and publishes, so the cost is linear in ranks. Rank 0 returns last, since it may hold the store.
        Raises: PeerLostError naming the missing ranks.
        """
        with self.detector.explained(what):
            key, texts = self._collect(text, what=what, timeout_seconds=timeout_seconds)
            if self.rank != 0:
                [joined] = self._take([key], sources=[0], what=what, timeout_seconds=timeout_seconds)
                self.store.set(f"{key}/read/{self.rank}", "1")
                return joined.split("\0")
            written = self._put(key, "\0".join(texts))
            others = range(1, self.world_size)
            read = [f"{key}/read/{rank}" for rank in others]
            self._await(read, sources=others, what=what)  # rank 0 may hold the store
            self.store.delete_key(*written, *read)
            return texts

    def gather(self, value: Any, **how: Any) -> list[Any]:
        """Gather a JSON value of every rank; tuples become lists. how: options of gather_text. Collective.

        Raises: CommError naming a rank that has closed its communicator; PeerLostError.
        """
        texts = self.gather_text(json.dumps(value), **how)
        if "" in texts:  # the last exchange of its close()
            what = f"rank {self.rank} asks for {how.get('what', 'values of all ranks')}"
            raise CommError(f"rank {texts.index('')} has closed its communicator, while {what}")
        return list(json.loads(f"[{','.join(texts)}]"))

    def agree(
        self, what: str, text: str, *, remedy: str = "start all ranks from the same files with the same command"
    ) -> None:
        """Check that all ranks have the same text. Collective. Raises: CommError naming a rank that differs."""
        # digests first: texts are long, and nearly always equal
        digests = self.gather(sha256(text.encode()).hexdigest())
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            texts = self.gather_text(text if self.rank in (0, odd[0]) else "")
            raise CommError(
                f"rank {odd[0]} and rank 0 disagree on {what}: {first_difference(texts[odd[0]], texts[0])}; {remedy}"
            )

    def collect_text(self, text: str, *, what: str) -> list[str]:
        """Gather texts on rank 0, also long ones; other ranks get an empty list. Collective."""
        with self.detector.explained(what):
            return self._collect(text, what=what)[1]

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str:
        """Return rank 0's text on all ranks, which wait for it up to timeout_seconds. Collective.

        Rank 0 does not wait: the next operation shows a lost rank sooner than a wait here. Raises: PeerLostError.
        """
        with self.detector.explained(what):
            key = self.next_key()
            if self.rank != 0:
                return self._take([key], sources=[0], what=what, timeout_seconds=timeout_seconds)[0]
            self._put(key, text)
            return text

    def describe_late_ranks(self) -> str:
        """On rank 0 return which ranks have not started; "" on other ranks, and if all have."""
        ranks = range(self.world_size if self.rank == 0 else 0)
        late = [rank for rank in ranks if not self.has_met(rank)]
        limit = f"meeting_seconds={self.meeting_seconds:g}"
        return f"rank 0 on {self.host} waits for {name_ranks(late)} to start ({limit})" if late else ""

    def next_key(self) -> str:
        """Return the key of the next exchange, equal on all ranks."""
        self._texts += 1
        return f"bigbatch/text/{self._texts}"

    def _collect(self, text: str, *, what: str, timeout_seconds: float | None = None) -> tuple[str, list[str]]:
        """Return the key of this exchange, and the texts (rank 0)."""
        key = self.next_key()
        if self.rank != 0:
            self._put(f"{key}/{self.rank}", text)
            return key, []
        others = range(1, self.world_size)
        keys = [f"{key}/{rank}" for rank in others]
        texts = self._take(keys, sources=others, what=what, timeout_seconds=timeout_seconds, is_last=True)
        return key, [text, *texts]

    def _put(self, key: str, text: str) -> list[str]:
        """Write a text; return its keys."""
        data = text.encode()
        if len(data) <= WHOLE_BYTES:
            self.store.set(key, _WHOLE + data)
            return [key]
        starts = range(0, len(data), PIECE_BYTES)
        names = [f"{key}/piece/{number}" for number in range(len(starts))]
        for name, start in zip(names, starts, strict=True):
            self.store.set(name, data[start : start + PIECE_BYTES])
        # last: a rank that waits for this key finds all pieces
        self.store.set(key, str(len(names)))
        return [key, *names]

    def _take(
        self,
        keys: Sequence[str],
        *,
        sources: Sequence[int],
        what: str,
        timeout_seconds: float | None = None,
        is_last: bool = False,
    ) -> list[str]:
        """Wait for the texts of these ranks and return them. is_last: no other rank reads them, so delete them."""
        self._await(keys, sources=sources, what=what, timeout_seconds=timeout_seconds)
        texts, names = [], list(keys)
        for key, value in zip(keys, self.store.multi_get(keys), strict=True):
            if value[:1] == _WHOLE:
                texts.append(value[1:].decode())
            else:
                pieces = [f"{key}/piece/{number}" for number in range(int(value))]
                texts.append(b"".join(map(self.store.get, pieces)).decode())
                names += pieces
        if is_last:  # the store of a long job must not grow
            self.store.delete_key(*names)
        return texts

    def read(self, key: str, *, what: str, source: int | None = None) -> str:
        """Wait for a short value that another rank (source, if stated) writes, and return it. Raises: PeerLostError."""
        with self.detector.explained(what):
            self._await([key], what=what, sources=[] if source is None else [source])
            return str(self.store.get(key).decode())

    def _await(
        self, keys: Sequence[str], *, what: str, sources: Sequence[int] = (), timeout_seconds: float | None = None
    ) -> None:
        """Wait for keys; end if another rank reports a failure. sources: who writes each, watched meanwhile."""
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        pause = min(PEER_CHECK_SECONDS, max(POLL_SECONDS, self.world_size / MAX_PEER_CHECKS_PER_SECOND))
        start, seconds, store = awake_seconds(), 0.0, self.store.within(limit + SILENCE_SECONDS)
        with self.detector.waiting():
            while not store.wait_for(*keys, seconds=min(pause, max(0.0, limit - seconds))):
                seconds = awake_seconds() - start
                self.detector.check_peers(what, seconds)
                ended = self.detector.log.state.gone.intersection(sources)
                # in this order: it may have written the key just before its end
                if ended and (lost := ended.intersection(self._late_sources(keys, sources))):
                    raise RuntimeError(f"the process of {self.detector.log.name([min(lost)])} has ended")
                if seconds > limit:
                    raise late_error(self._late_ranks(keys, sources))

    def _late_sources(self, keys: Sequence[str], sources: Sequence[int]) -> list[int]:
        """Return the ranks that have not written their key."""
        missing = set(self.store.missing(keys))
        return [rank for key, rank in zip(keys, sources, strict=True) if key in missing]

    def _late_ranks(self, keys: Sequence[str], sources: Sequence[int]) -> list[int]:
        """Return which ranks have not written their part of an exchange, whose key rank 0 writes last."""
        if any(sources):
            return self._late_sources(keys, sources)
        others = range(1, self.world_size)
        late = self._late_sources([f"{keys[0]}/{rank}" for rank in others], others)
        return late if 0 < len(late) < len(others) else list(sources)

    def has_met(self, rank: int) -> bool:
        return bool(self.store.check([f"{HOST}/{rank}"]))

    def host_of(self, rank: int) -> str:
        if rank not in self.hosts and self.has_met(rank):
            self.hosts[rank] = self.store.get(f"{HOST}/{rank}").decode()
        return self.hosts.get(rank, "a host that has not met")
