"""Check that the ranks' releases, hosts, local ranks and GPUs are consistent before they are used."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

import bigbatch
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.gpus import require_own_gpus
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.late_ranks import reporting_late
from bigbatch.comm.rendezvous.launcher import LAUNCHER_VARIABLES
from bigbatch.errors import CommError
from bigbatch.words import name_ranks

_REMEDY = (
    "start all ranks of a host by one launcher and give every node its own host name; to emulate several nodes on "
    "one host, name them by BIGBATCH_HOST"
)


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs, as it states itself."""

    rank: int
    host: str
    space: str
    """Result of process_space(): which other processes it sees."""
    local_rank: int
    local_size: int
    plays_host: bool = False
    gpu: str = ""
    """UUID of a GPU that no other rank may use; "" for none."""

    @property
    def node(self) -> str:
        """Return the node's name: ranks of one node can share memory."""
        return f"{self.host} {self.space}"


def process_space() -> str:
    """Return this process's PID and user namespaces: only ranks that have the same ones can share memory.

    A process may not open the memory of processes in another user namespace (ptrace(2), "access mode checking"); each
    Apptainer container without setuid has its own. Without Linux's /proc, return a name unique to this process.
    """
    try:
        return f"{os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/user')}"
    except OSError:
        return f"process {os.getpid()}"


def meet(env: ProcessEnv, control: JobControl, *, gpu: str = "") -> list[RankPlace]:
    """Gather where every rank runs, in rank order. Collective. gpu: as in RankPlace.

    Raises: CommError if ranks run different code or take different backends, two processes have the same rank, or the
    ranks of a host contradict each other or share a GPU.
    """
    mine = RankPlace(env.rank, env.host, process_space(), env.local_rank, env.local_size, env.plays_host, gpu)
    _claim_rank(env, control)
    limit = control.meeting_seconds
    with reporting_late(control.warn_seconds, control.describe_late_ranks):
        everyone = control.gather(
            {"release": release(), "backend": control.library, **asdict(mine)},
            what=f"meeting of all ranks (meeting_seconds={limit:g})",
            timeout_seconds=limit,
        )
    # first: another release of bigbatch may have other fields
    require_same_release([each.pop("release") for each in everyone], hosts=[each["host"] for each in everyone])
    backends = [each.pop("backend") for each in everyone]
    places = [RankPlace(**each) for each in everyone]
    control.hosts |= {place.rank: place.host for place in places}
    require_consistent(places)
    for place, backend in zip(places, backends, strict=True):
        if backend != backends[0]:
            raise CommError(
                f"rank {place.rank} on {place.host} takes backend {backend}, and rank 0 on {places[0].host} takes "
                f"{backends[0]}: name one backend for all ranks, or make the GPUs of all hosts work alike"
            )
    require_own_gpus([(place.host, place.gpu) for place in places])
    return places


def _claim_rank(env: ProcessEnv, control: JobControl) -> None:
    """Claim this rank; a second process with the same rank is an error."""
    key = f"bigbatch/claim/{env.rank}"
    with control.detector.explained("meeting of all ranks"):
        if control.store.add(key, 1) == 1:
            control.store.set(f"{key}/host", env.host)
            return
    first = control.read(f"{key}/host", what=f"check for a second rank {env.rank}")
    variables = LAUNCHER_VARIABLES.get(env.launcher)
    raise CommError(
        f"two processes are rank {env.rank}, one on {first} and one on {env.host}: start every process in one job, "
        f"with its own {variables[0] if variables else 'rank'}"
    )


def require_consistent(places: Sequence[RankPlace]) -> None:
    """Check that local ranks and local sizes, which choose GPUs, agree with the host names.

    A container that sees only its own processes counts as a host. Hosts named by BIGBATCH_HOST are not checked.
    Raises: CommError naming ranks and host.
    """
    if any(place.plays_host for place in places):
        return
    problem = _contradiction(places, lambda place: place.host)
    if problem and _contradiction(places, lambda place: place.node):
        raise CommError(f"{problem}: {_REMEDY}")


def _contradiction(places: Sequence[RankPlace], host_of: Callable[[RankPlace], str]) -> str | None:
    hosts: dict[str, list[RankPlace]] = {}
    for place in places:
        hosts.setdefault(host_of(place), []).append(place)
    for together in hosts.values():
        host = together[0].host
        firsts: dict[int, RankPlace] = {}
        for place in together:
            first = firsts.setdefault(place.local_rank, place)
            if first is not place:
                return f"rank {first.rank} and rank {place.rank} are both local rank {place.local_rank} of {host}"
        for place in together:
            if place.local_size != len(together):
                return (
                    f"rank {place.rank} was started as one of {place.local_size} on {host}, where {len(together)} run "
                    f"({name_ranks([each.rank for each in together])})"
                )
    return None


@cache
def release() -> str:
    """Return versions and a digest of the sources, which differs between two checkouts of one version."""
    return f"bigbatch {bigbatch.__version__} (sources {sources_digest()}), torch {torch.__version__}"


def sources_digest() -> str:
    """Digest all Python files of the package, wherever it is installed. Takes some milliseconds."""
    root = Path(bigbatch.__file__).parent
    folders = os.walk(root, followlinks=True)  # a checkout's packages are links
    paths = [Path(folder, name).relative_to(root) for folder, _, names in folders for name in names]
    digest = sha256()
    for path in sorted(path for path in paths if path.suffix == ".py"):
        if not any(part.startswith(".") for part in path.parts):  # files of editors and notebooks
            digest.update(f"{path.as_posix()} {sha256((root / path).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:8]


def require_same_release(releases: Sequence[str], *, hosts: Sequence[str]) -> None:
    """Compare every rank's release. Raises: CommError naming the hosts that differ from rank 0's, and both releases."""
    first = releases[0]
    odd: dict[str, dict[str, None]] = {}
    for other, host in zip(releases, hosts, strict=True):
        if other != first:
            odd.setdefault(other, {})[host] = None
    if odd:
        named = "; ".join(f"{', '.join(names)}: {other}" for other, names in odd.items())
        raise CommError(
            f"the ranks run different code: {named}; {hosts[0]}: {first}: install the same release on all "
            "nodes, or once on a shared disk"
        )
