"""A rank that was started again joins the ranks that go on: it asks at their store, and the first rank lets it in.

Requests and answers lie outside of the groups' keys, as a store may serve several groups in turn. The new group is in
the same store, so a rank that dies while it joins is lost as any other one.
"""

import json
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bigbatch.comm.rendezvous.control import Control, Joined
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_store import JobStore, Line
from bigbatch.comm.rendezvous.regroup import Group, Seat, Seats, bind_seat, holder_of, place_in
from bigbatch.errors import CommError
from bigbatch.words import first_difference

REQUESTS = "bigbatch/joins"
FIRST_NUMBER = 1 << 20
"""Ranks connect to a store under their numbers in a group, those that join under random ones from here on."""
CONNECT_SECONDS = 1.0
"""Limit of one attempt to reach the store."""
LOOK_SECONDS = 1.0
"""Longest wait for an answer in one request."""


@dataclass(frozen=True)
class Request:
    """A rank that wants to join, and the number under which it has connected to the store."""

    number: int
    seat: Seat


@dataclass(frozen=True)
class Admitted:
    """A group with ranks that join, and what the former first rank tells all."""

    group: Group
    told: dict[str, Any]


def ask_to_join(
    env: ProcessEnv,
    store: tuple[str, int],
    *,
    facts: Mapping[str, str],
    timeout_seconds: float,
    warn_seconds: float,
    interface: str | None,
) -> Admitted:
    """Ask the ranks of a store to take this process in, and wait for their next boundary, however long.

    facts: what must be equal on all ranks, by its name.
    Raises: CommError if they refuse it; RuntimeError if the store has ended, or does not know the secret; OSError.
    """
    number = FIRST_NUMBER + secrets.randbelow(1 << 30)
    line = Line(*store, env.secret, rank=number, timeout_seconds=CONNECT_SECONDS)
    requests = JobStore(line, REQUESTS, seconds=timeout_seconds)
    seat, bound = bind_seat(env, towards=store[0], interface=interface)
    asked = {"number": number, "seat": asdict(seat), "facts": dict(facts)}
    requests.append("asked", json.dumps(asked) + "\n")
    while not requests.wait_for(f"answer/{number}", LOOK_SECONDS):
        pass
    answer = json.loads(requests.get(f"answer/{number}"))
    if why := answer.get("refused"):
        raise CommError(f"rank {env.rank} on {env.host} cannot join: {why}; the other ranks go on without it")
    limits = timeout_seconds, warn_seconds
    return Admitted(_form(answer, env, line, number=number, bound=bound, limits=limits), answer["told"])


def find_requests(
    group: Group, facts: Callable[[], Mapping[str, str]], *, fits: Callable[[int], bool]
) -> list[Request]:
    """On the first rank, return which ranks can join now; refuse those that never can. Not collective.

    facts: called if a rank asks. fits: returns whether so many ranks can share the batch; if not, all wait for more.
    """
    assert isinstance(group.control.store, JobStore)
    requests = _requests(group.control)
    news = requests.tail("asked", 0)
    found: list[Request] = []
    for asked in map(json.loads, news.text.splitlines()):
        number = asked["number"]
        if number in news.gone or requests.check([f"answer/{number}"]):
            continue
        if why := _refusal(asked, group, facts()):
            requests.set(f"answer/{number}", json.dumps({"refused": why}))
            continue
        seat = Seat(**asked["seat"])
        # the loss of its former process may not be known yet
        if seat.rank not in [each.rank for each in (*group.seats.all, *(one.seat for one in found))]:
            found.append(Request(number, seat))
    return found if found and fits(group.env.world_size + len(found)) else []


def _refusal(asked: Mapping[str, Any], group: Group, facts: Mapping[str, str]) -> str:
    """Return why a rank can never join; empty if it may."""
    for name, ours in facts.items():
        theirs = asked.get("facts", {}).get(name, "")
        if theirs != ours:
            return f"its {name} is not that of the job: {first_difference(theirs, ours)}"
    for seat in group.seats.all:  # of the same release by now, so the fields are those of a Seat
        if seat.rank == asked["seat"]["rank"] and seat.has_ended() is False:
            return f"process {seat.pid} on {seat.host} is rank {seat.rank}"
    return ""


def let_in(group: Group, found: Sequence[Request], *, told: Mapping[str, Any]) -> Admitted:
    """Form the group of the present ranks and those found, in the launcher's order. Collective over the present ranks.

    found, told: on the first rank. No operation of the former group is under way afterwards.
    """
    env, control, seats = group.env, group.control, group.seats
    store = control.store
    assert isinstance(store, JobStore)
    assert store.numbers is not None
    text = ""
    if env.rank == 0:
        present = list(zip(store.numbers, seats.all, strict=True))
        everyone = sorted([*present, *((each.number, each.seat) for each in found)], key=lambda each: each[1].rank)
        answer = {
            "prefix": f"{store.prefix}+{','.join(str(each.number) for each in found)}",
            "numbers": [number for number, _ in everyone],
            "seats": [asdict(seat) for _, seat in everyone],
            "holder": [number for number, _ in everyone].index(store.numbers[holder_of(control)]),
            "told": dict(told),
        }
        text = json.dumps(answer)
    text = control.gather_text(text, what="agreement on the ranks that join")[0]
    if env.rank == 0 and found:
        # after the others know: if this rank is lost before, those that join ask again at the next store
        _requests(control).multi_set([f"answer/{each.number}" for each in found], [text] * len(found))
    limits, number = (control.timeout_seconds, control.warn_seconds), store.numbers[env.rank]
    env, answer = replace(env, secret=control.secret), json.loads(text)
    formed = _form(answer, env, store.line, number=number, bound=seats.socket, limits=limits)
    return Admitted(formed, answer["told"])


def _requests(control: Control) -> JobStore:
    assert isinstance(control.store, JobStore)
    return JobStore(control.store.line, REQUESTS, seconds=control.timeout_seconds)


def _form(
    answer: Mapping[str, Any],
    env: ProcessEnv,
    line: Line,
    *,
    number: int,
    bound: socket.socket,
    limits: tuple[float, float],
) -> Group:
    """Return the group of an answer. number: of this rank; limits: timeout_seconds and warn_seconds."""
    seats, numbers = [Seat(**each) for each in answer["seats"]], list(map(int, answer["numbers"]))
    env = replace(env, rank=numbers.index(number), former_rank=env.launched_as)
    env = place_in(env, seats, range(len(seats)), master=(line.address, line.port), secret=env.secret)
    store = JobStore(line, answer["prefix"], seconds=limits[0], numbers=numbers)
    joined = Joined(store, answer["holder"])
    control = Control(env, timeout_seconds=limits[0], warn_seconds=limits[1], joined=joined)
    return Group(env, control, Seats(tuple(seats), bound))
