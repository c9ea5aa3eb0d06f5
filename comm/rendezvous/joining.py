"""A restarted rank joins a running job: it writes a request to the job's store, and rank 0 admits it.

Requests and answers have keys outside of the groups' prefixes, because one store may serve several groups in turn. The
new group uses the same store. A join is a transaction: either all present ranks enter the new group, or none does.
leave_former_group() ends the former group in the same way. If a rank is lost before that, the present ranks continue in
the former group, in which the joining ranks have no vote. The joining ranks then ask again.
"""

import json
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections
from bigbatch.comm.rendezvous.limits import PEER_CHECK_SECONDS
from bigbatch.comm.rendezvous.regroup import (
    Endpoint,
    Endpoints,
    Group,
    bind_endpoint,
    form_group,
    holder_of,
    prefix_after,
)
from bigbatch.errors import CommError, PeerLostError
from bigbatch.words import first_difference

REQUESTS = "bigbatch/joins"
FIRST_JOIN_NUMBER = 1 << 20
"""Initial ranks connect to a store under their ranks; a rank that joins, under a random number from here on."""
CONNECT_SECONDS = 1.0
"""Limit of one attempt to reach the store."""
LOOK_SECONDS = 1.0
"""Longest wait for an answer in one request."""
_COMMIT, _ABORT = "+", "-"


@dataclass(frozen=True)
class Request:
    """A rank that wants to join, and the number under which it has connected to the store."""

    number: int
    endpoint: Endpoint


@dataclass(frozen=True)
class Admitted:
    """The new group, with the ranks that have joined, and what rank 0 of the former group tells all of them."""

    group: Group
    announced: dict[str, Any]

    def leave(self) -> None:
        """Close this process's connections, so that the store sees that it has left the group."""
        self.group.store.connections.close()
        self.group.endpoints.socket.close()


def ask_to_join(
    env: ProcessEnv,
    store: tuple[str, int],
    *,
    facts: Mapping[str, str],
    timeout_seconds: float,
    warn_seconds: float,
    is_current: Callable[[], bool] = lambda: True,
) -> Admitted:
    """Ask the ranks of a store to admit this process, and wait without limit for their next boundary.

    facts: name -> value that must be equal on all ranks. is_current: returns whether the ranks still use this store.
    Raises: CommError if they refuse; RuntimeError if the store has ended, or does not know the secret; OSError, also
    if the ranks use another store.
    """
    number = FIRST_JOIN_NUMBER + secrets.randbelow(1 << 30)
    connections = StoreConnections(*store, env.secret, rank=number, timeout_seconds=CONNECT_SECONDS)
    bound: socket.socket | None = None
    try:
        requests = JobStore(connections, REQUESTS, seconds=timeout_seconds)
        endpoint, bound = bind_endpoint(env, towards=store[0])
        asked = {"number": number, "endpoint": asdict(endpoint), "facts": dict(facts)}
        requests.append("asked", json.dumps(asked) + "\n")
        while not requests.wait_for(f"answer/{number}", seconds=LOOK_SECONDS):
            if not is_current():
                raise ConnectionError("its ranks use another store by now")
        answer = json.loads(requests.get(f"answer/{number}"))
        if why := answer.get("refused"):
            raise CommError(f"rank {env.rank} on {env.host} cannot join: {why}; the other ranks continue without it")
        env = replace(env, master=store)
        formed = _form(answer, env, requests, number=number, bound=bound, warn_seconds=warn_seconds)
        return Admitted(formed, answer["announced"])
    except BaseException:
        connections.close()  # while connected, this process seems alive, and its request would be answered
        if bound:
            bound.close()
        raise


def find_requests(
    group: Group, facts: Callable[[], Mapping[str, str]], *, fits: Callable[[int], bool]
) -> list[Request]:
    """On rank 0, return which ranks can join now; refuse those that never can. Not collective.

    facts: called for each request. fits: returns whether that many ranks can share the batch; if not, the newest wait.
    """
    requests = _requests(group)
    found: list[Request] = []
    taken = {endpoint.rank for endpoint in group.endpoints.all}  # its former process may not be known as lost yet
    for number, asked in reversed(_read_requests(requests)):  # a rank's newest request counts
        if requests.check([f"answer/{number}"]):
            continue
        endpoint = _endpoint_of(asked)
        if why := _refusal(asked, endpoint, group, facts()):
            requests.set(f"answer/{number}", json.dumps({"refused": why}))
        elif endpoint and endpoint.rank not in taken:
            taken.add(endpoint.rank)
            found.append(Request(number, endpoint))
    while found and not fits(group.env.world_size + len(found)):
        found.pop(0)
    return found


def _read_requests(requests: JobStore) -> list[tuple[int, Mapping[str, Any]]]:
    """Return number and content of each request of a connected process; delete the others, and their answers.

    This keeps the store from growing with the number of ranks that have joined.
    """
    news = requests.tail("asked", 0)
    lines = news.text.splitlines(keepends=True)
    parsed = [(line, number, asked) for line in lines for number, asked in [_parse(line)] if number is not None]
    present = [each for each in parsed if each[1] not in news.gone]
    if len(present) < len(lines):
        kept = b"".join(line for line, _, _ in present)
        if requests.compare_set("asked", news.text, kept) == kept:  # otherwise another rank has just asked
            for _, number, _ in parsed:
                if number in news.gone:
                    requests.delete_key(f"answer/{number}")
    return [(number, asked) for _, number, asked in present]


def _parse(line: bytes) -> tuple[int | None, Mapping[str, Any]]:
    """Return the number and the content of a request; the number is None if the line is no request."""
    with suppress(ValueError, TypeError, LookupError):
        asked = json.loads(line)
        return int(asked["number"]), asked
    return None, {}


def _endpoint_of(asked: Mapping[str, Any]) -> Endpoint | None:
    """Return the endpoint of a request; None if another release has written it."""
    with suppress(TypeError, LookupError):
        return Endpoint(**asked["endpoint"])
    return None


def _refusal(asked: Mapping[str, Any], endpoint: Endpoint | None, group: Group, facts: Mapping[str, str]) -> str:
    """Return why a rank can never join; empty if it may."""
    stated = asked.get("facts")
    for name, ours in facts.items():
        theirs = stated.get(name, "") if isinstance(stated, dict) else ""
        if theirs != ours:
            return f"its {name} differs from the job's: {first_difference(f'{theirs}', ours)}"
    if endpoint is None:
        return "its request is of another format"
    for each in group.endpoints.all:
        if each.rank == endpoint.rank and each.has_ended() is False:
            return f"process {each.pid} on {each.host} is rank {each.rank}"
    return ""


def admit(group: Group, found: Sequence[Request], *, announced: Mapping[str, Any]) -> Admitted:
    """Form the group of the present ranks and those found, in the launcher's order. Collective over the present ranks.

    found, announced: only rank 0's are used. No operation of the former group is under way afterwards.
    Raises: PeerLostError, then on all remaining ranks, and no rank is in the new group.
    """
    env, control, endpoints = group.env, group.control, group.endpoints
    store = group.store
    assert store.numbers is not None
    text = ""
    if env.rank == 0:
        present = list(zip(store.numbers, endpoints.all, strict=True))
        everyone = sorted([*present, *((each.number, each.endpoint) for each in found)], key=lambda each: each[1].rank)
        answer = {
            "prefix": prefix_after(store.prefix, "+", [each.number for each in found]),
            "numbers": [number for number, _ in everyone],
            "endpoints": [asdict(endpoint) for _, endpoint in everyone],
            "holder": [number for number, _ in everyone].index(store.numbers[holder_of(control)]),
            "announced": dict(announced),
        }
        text = json.dumps(answer)
    text = _all_or_none(group, text, what="agreement on the ranks that join")
    if env.rank == 0:
        for each in found:  # one request for all could exceed MAX_REQUEST_BYTES
            _requests(group).set(f"answer/{each.number}", text)
    number, bound, answer = store.numbers[env.rank], endpoints.socket, json.loads(text)
    env = replace(env, secret=control.secret, master=control.master)
    formed = _form(answer, env, store, number=number, bound=bound, warn_seconds=control.warn_seconds)
    return Admitted(formed, answer["announced"])


def leave_former_group(group: Group) -> None:
    """Agree that the new group is complete, so that no rank returns to the former group. Collective.

    Raises: PeerLostError, then on all remaining ranks, unless the store is lost while they read the answer.
    """
    _all_or_none(group, what="agreement to leave the former group")


def former_ranks(former: Group, group: Group, ranks: Collection[int]) -> frozenset[int]:
    """Return the ranks that these ranks of the new group had in the former one; read which processes have ended."""
    log = former.control.detector.log
    with suppress(RuntimeError):  # the store is lost, too
        log.read(former.control.store.within(PEER_CHECK_SECONDS))
    endpoints = {group.endpoints.all[each] for each in ranks}
    return frozenset(rank for rank, endpoint in enumerate(former.endpoints.all) if endpoint in endpoints)


def _all_or_none(group: Group, text: str = "", *, what: str) -> str:
    """Return rank 0's text on all ranks once all have come, or raise PeerLostError on all remaining ones. Collective.

    The first value of one key decides, so a rank that finds another one lost cannot decide otherwise. If the store is
    lost, a rank that has not read that value raises.
    """
    control, store = group.control, group.store
    key = f"{control.next_key()}/decision"
    try:
        control.collect_text("", what=what)
        with control.detector.explained(what):
            if control.rank == 0:
                decision = store.compare_set(key, "", _COMMIT + text).decode()
            else:
                decision = control.read(key, what=what, source=0)
            if decision == _ABORT:
                raise RuntimeError("another rank has reported a lost rank")
    except PeerLostError:
        decision = _ABORT
        with suppress(RuntimeError):
            decision = store.compare_set(key, "", _ABORT).decode()
        if decision == _ABORT:
            raise
    return decision.removeprefix(_COMMIT)


def _requests(group: Group) -> JobStore:
    return JobStore(group.store.connections, REQUESTS, seconds=group.control.timeout_seconds)


def _form(
    answer: Mapping[str, Any],
    env: ProcessEnv,
    former: JobStore,
    *,
    number: int,
    bound: socket.socket,
    warn_seconds: float,
) -> Group:
    """Form the group that an answer describes. env.master: address of the store. number: this rank's in the store."""
    endpoints, numbers = tuple(Endpoint(**each) for each in answer["endpoints"]), list(map(int, answer["numbers"]))
    env = replace(env, rank=numbers.index(number), former_rank=env.launched_as)
    store = JobStore(former.connections, answer["prefix"], seconds=former.seconds, numbers=numbers)
    return form_group(env, Endpoints(endpoints, bound), store, holder=answer["holder"], warn_seconds=warn_seconds)
