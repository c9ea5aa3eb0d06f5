"""What connect() refuses before any training, and that a refusal leaves nothing behind. No second rank takes part."""

import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from error_texts import naming
from one_rank import transport_over
from played_gpus import PlayedGpus
from silent_ranks import hurry_count
from torch.distributed import HashStore

from bigbatch.comm import communicator, connection, several_ranks
from bigbatch.comm import connect as connecting
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends import links, tcp, torch_distributed
from bigbatch.comm.backends.base import Capabilities
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.tcp import TcpBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous import bounded_store, by_mpi, hang_report, meeting, watch
from bigbatch.comm.rendezvous.bounded_store import BoundedStore, NoAnswerError, answer_within
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv, read_process_env
from bigbatch.comm.rendezvous.failures import Verdict
from bigbatch.comm.rendezvous.gpus import require_own_gpus
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.meeting import listen
from bigbatch.comm.rendezvous.places import RankPlace, meet, require_consistent
from bigbatch.errors import LOST, CommError, PeerLostError

CPU = torch.device("cpu")
TWO = ProcessEnv("torchrun", 0, 2, 0, 2, "here", ("127.0.0.1", 0), secret=b"of this job")
PLACES_OF_TWO = [RankPlace(rank, "here", "1", rank, 2) for rank in range(2)]
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_count(monkeypatch)
    monkeypatch.setattr(meeting, "_met", {})


# --- ranks and hosts that contradict each other ---


def places(*told: tuple[str, str, int, int]) -> list[RankPlace]:
    return [RankPlace(rank, *each) for rank, each in enumerate(told)]


@pytest.mark.parametrize(
    "consistent",
    [
        [("a", "1", 0, 1)],
        [("a", "1", 0, 2), ("a", "1", 1, 2)],
        [("a", "1", 0, 2), ("b", "1", 0, 2), ("a", "1", 1, 2), ("b", "1", 1, 2)],  # by slot or by node
        [("a", "1", 0, 1), ("b", "1", 0, 2), ("b", "1", 1, 2)],
        [("a", "process 7", 0, 2), ("a", "process 8", 1, 2)],  # no /proc, or a process namespace for each rank
        [("a", "1", 0, 2), ("a", "2", 0, 2), ("a", "1", 1, 2), ("a", "2", 1, 2)],  # two containers under one host name
    ],
)
def test_places_that_launchers_tell_are_consistent(consistent: list[tuple[str, str, int, int]]) -> None:
    require_consistent(places(*consistent))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ([("n0", "1", 0, 2), ("n0", "1", 0, 2)], ("rank 0", "rank 1", "local rank 0", "n0")),
        (
            [("n0", "1", 0, 2), ("n0", "1", 1, 2), ("n1", "1", 1, 2), ("n1", "1", 1, 2)],
            ("rank 2", "rank 3", "local rank 1", "n1"),
        ),
        ([("n0", "1", 0, 2), ("n1", "1", 1, 2)], ("of 2 on n0", "1 run", "(rank 0)")),
        ([("n0", "1", 0, 2), ("n0", "1", 1, 1), ("n0", "1", 2, 3)], ("of 2 on n0", "3 run", "(ranks 0, 1, 2)")),
        (
            [("n0", "1", rank, 4) for rank in range(9)],
            ("of 4 on n0", "9 run", "(ranks 0, 1, 2, 3, 4, 5, 6, 7 "),
        ),
    ],
)
def test_places_that_contradict_name_ranks_and_host(
    told: list[tuple[str, str, int, int]], named: tuple[str, ...]
) -> None:
    with pytest.raises(CommError, match=naming(*named, "BIGBATCH_HOST")) as caught:
        require_consistent(places(*told))
    assert "\n" not in str(caught.value)


def test_places_on_played_hosts_are_not_the_launchers() -> None:
    told = [("a", "1", 0, 2), ("b", "1", 1, 2)]
    require_consistent([replace(place, plays_host=True) for place in places(*told)])
    assert read_process_env({**TORCHRUN, "BIGBATCH_HOST": "a"}).plays_host
    assert read_process_env({"BIGBATCH_HOST": "a"}).plays_host
    assert not read_process_env({**TORCHRUN, "BIGBATCH_HOST": ""}).plays_host
    assert not read_process_env({}).plays_host


def test_meet_tells_ranks_where_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    met = JobControl(ALONE, timeout_seconds=60)
    assert [(place.rank, place.host) for place in meet(ALONE, met)] == [(0, "here")]

    def gather_text(text: str, *, what: str, timeout_seconds: float) -> list[str]:
        other = {**json.loads(text), "rank": 1}
        return [text, json.dumps(other)]

    met = JobControl(ALONE, timeout_seconds=60)
    monkeypatch.setattr(met, "gather_text", gather_text)
    with pytest.raises(CommError, match=naming("rank 0", "rank 1", "local rank 0", "here")):
        meet(TWO, met)
    assert RankPlace(**json.loads(json.dumps(asdict(places(("a", "1", 0, 2))[0])))).node == "a 1"


def test_release_that_differs_between_nodes_is_named_before_anything_else_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another bigbatch may describe its place by other words."""
    met = JobControl(ALONE, timeout_seconds=60)
    other = json.dumps({"host": "n1", "release": "bigbatch 0.2.0 (sources 1234abcd), torch 2.14.1", "place": 7})
    monkeypatch.setattr(met, "gather_text", lambda text, **_: [text, other])
    expected = (
        r"n1: bigbatch 0\.2\.0 \(sources 1234abcd\), torch 2\.14\.1; "
        r"here: bigbatch \S+ \(sources [0-9a-f]{8}\), torch \S+"
    )
    with pytest.raises(CommError, match=expected):
        meet(TWO, met)


@pytest.mark.parametrize(("launcher", "variable"), [("torchrun", "RANK"), ("srun", "SLURM_PROCID"), ("own", "its own")])
def test_rank_with_a_second_process_is_refused(launcher: str, variable: str) -> None:
    met = JobControl(ALONE, timeout_seconds=60)
    meet(ALONE, met)
    again = replace(ALONE, launcher=launcher, host="n7")
    with pytest.raises(CommError, match=naming("rank 0", "here", "n7", variable)):
        meet(again, met)


# --- where ranks meet ---


def test_control_knows_where_the_ranks_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JobControl(TWO, timeout_seconds=60).master == TWO.master
    with listen("127.0.0.1", 0) as free:
        found = free.getsockname()[:2]
    env = replace(TWO, launcher="openmpi", master=None)
    monkeypatch.setattr(by_mpi, "meet_by_mpi", lambda env, **_: replace(env, master=found, secret=b"drawn"))
    for _ in range(2):  # the second connection of this process meets nowhere else
        met = JobControl(env, timeout_seconds=60)
        assert (met.master, met.secret) == (found, b"drawn")


@pytest.mark.parametrize(("local_size", "towards"), [(1, "10.0.0.9"), (2, None)])
def test_links_lead_to_where_the_ranks_met(
    local_size: int, towards: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def own_address(**options: object) -> str:
        asked.append(options)
        return "127.0.0.1"

    monkeypatch.setattr(links, "own_address", own_address)
    env = replace(TWO, launcher="openmpi", master=None, local_size=local_size)
    met = JobControl(TWO, timeout_seconds=60)
    met.master = "10.0.0.9", 1  # as MPI told
    links.Links(env, met, while_waiting=lambda seconds: None).close()
    assert asked == [{"is_one_host": local_size == 2, "interface": None, "towards": towards}]


# --- choices ---


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"timeout_seconds": "60"}, ("timeout_seconds", "'60' (str)")),
        ({"warn_seconds": "1"}, ("warn_seconds", "'1' (str)")),
        ({"predivide": None}, ("predivide", "None (NoneType)")),
        ({"group_size": 2.0}, ("group_size", "2.0 (float)")),
        ({"device": "cpu"}, ("device", 'torch.device("cpu")', "'cpu' (str)")),
        ({"algorithm": None}, ("algorithm", '"ring"', "None (NoneType)")),
        ({"table": "tuned.json"}, ("table", "read_tuned(path).table", "'tuned.json' (str)")),
    ],
)
def test_settings_of_another_type_are_named(options: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=naming(*named)):
        connect(**{"env": ALONE, "device": CPU, **options})


@pytest.mark.parametrize("backend", ["tcp", "gloo", "mpi"])
def test_interface_of_the_launcher_goes_before_the_configs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI may have it, too: the launcher has passed it on."""
    asked = []

    def refuse(env: ProcessEnv, **_: object) -> None:
        asked.append(env.interface)
        raise CommError("enough")

    monkeypatch.setattr(several_ranks, "JobControl", refuse)
    stated = None if backend == "mpi" else "eth0"
    for env in (replace(TWO, interface="ib0"), TWO):
        with pytest.raises(CommError, match="enough"):
            connect(backend=backend, interface=stated, env=env, device=CPU)
    assert asked == ["ib0", stated]


class NativeBackend(SingleBackend):
    """Can neither send messages nor sum bf16; takes down what happens to it."""

    name = "collectives-only"
    capabilities = Capabilities(("cpu",), (torch.float32, torch.float16), has_messages=False)

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.is_abandoned = False

    def abandon(self) -> None:
        self.is_abandoned = True


@pytest.mark.parametrize(
    ("made", "names", "named"),
    [
        (SingleBackend, ["ring", "tree"], ("uses tree,", "single has native, ring, hierarchical, sharded, doubling")),
        (NativeBackend, ["native", "ring", "doubling"], ("uses ring, doubling,", "collectives-only has native")),
    ],
)
def test_table_of_algorithms_that_cannot_run_here_is_refused(
    made: type[SingleBackend], names: Sequence[str], named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "SingleBackend", made)
    met = connect(env=ALONE, device=CPU)
    limits = [*range(1, len(names)), None]
    table = HybridTable(tuple(HybridRow(limit, name) for limit, name in zip(limits, names, strict=True)))
    with pytest.raises(ValueError, match=naming("'hybrid'", *named, "bigbatch comm tune")):
        met.with_algorithm("hybrid", table=table)
    assert met.with_algorithm("native", table=table).algorithm == "native"  # nothing asks the table
    native = HybridTable((HybridRow(None, "native"),))
    assert met.with_algorithm("hybrid", table=native).sum_(torch.ones(2), label="x").tolist() == [1, 1]


# --- GPUs that ranks share ---


@pytest.mark.parametrize(
    "seen",
    [
        ["a ", "a ", "b "],  # several, or none
        ["a GPU-1", "a GPU-2", "b GPU-3"],
        ["a GPU-1", "a GPU-2", "b GPU-1"],  # hosts that are played
        ["a GPU-1", "a ", "a "],
    ],
)
def test_gpus_of_ranks_own_are_accepted(seen: list[str]) -> None:
    require_own_gpus([(host, gpu) for host, gpu in (each.split(" ") for each in seen)])


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (["a GPU-1", "a GPU-1"], ("2 ranks on a", "1 GPU ", "rank 0", "rank 1", "GPU-1", "--ranks 1")),
        (["b GPU-1", "a GPU-2", "a GPU-3", "a GPU-3"], ("3 ranks on a", "2 GPUs", "rank 2", "rank 3", "GPU-3")),
    ],
)
def test_gpu_that_two_ranks_of_a_host_share_is_refused(seen: list[str], named: tuple[str, ...]) -> None:
    remedies = ("--gpus-per-node", "--gpus-per-task", "--device cpu")
    with pytest.raises(CommError, match=naming(*named, *remedies)) as caught:
        require_own_gpus([(host, gpu) for host, gpu in (each.split(" ") for each in seen)])
    assert "\n" not in str(caught.value)
    assert ("--ranks" in str(caught.value)) == ("--ranks 1" in named), "of one host alone"


def test_gpu_that_two_ranks_share_is_refused_as_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    met = JobControl(ALONE, timeout_seconds=60)
    second = {"rank": 1, "local_rank": 1}
    monkeypatch.setattr(met, "gather_text", lambda text, **_: [text, json.dumps({**json.loads(text), **second})])
    with pytest.raises(CommError, match=naming("rank 0", "rank 1", "GPU-7")):
        meet(TWO, met, gpu="GPU-7")


def test_backends_that_differ_are_refused_as_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by "auto" on two hosts, one without a GPU: each library would wait for the other ranks."""
    met = JobControl(ALONE, timeout_seconds=60)
    met.library = "nccl"
    second = {"rank": 1, "local_rank": 1, "backend": "tcp"}
    monkeypatch.setattr(met, "gather_text", lambda text, **_: [text, json.dumps({**json.loads(text), **second})])
    with pytest.raises(CommError, match=naming("rank 1 on here", "backend tcp", "rank 0 on here", "nccl")) as caught:
        meet(TWO, met)
    assert "\n" not in str(caught.value)


# --- a refusal leaves nothing behind ---


@pytest.mark.parametrize("options", [{"algorithm": "tree"}, {"wire_dtype": "bfloat16"}, {"algorithm": "hybrid"}])
def test_connection_that_is_refused_is_given_up(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = NativeBackend()
    monkeypatch.setattr(connecting, "SingleBackend", lambda **_: made)
    before = dict(connection.open_connections)
    with pytest.raises(ValueError, match=naming(*options.values())):
        connect(env=ALONE, device=CPU, **options)
    assert connection.open_connections == before
    assert made.is_abandoned


def test_process_group_that_contradicts_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    play_group(monkeypatch, rank=0, size=2)
    with pytest.raises(CommError, match=naming("rank 0 of 2 in torch's", "rank 1 of 4 for torchrun", "connect()")):
        connect(device=CPU)


def test_rank_of_a_process_group_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    play_group(monkeypatch, rank=0, size=2)
    with pytest.raises(CommError, match=naming("rank 1", "connect()", "0.2 s")):
        connect(device=CPU, timeout_seconds=0.2)


def play_group(monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int) -> None:
    """Let torch tell of a process group that does not exist."""
    for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": size}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", torch.distributed.HashStore)


def test_connection_by_a_function_is_refused() -> None:
    """A function that returned what it got made a communicator that summed nothing."""
    before = dict(connection.open_connections)
    with pytest.raises(TypeError, match=naming("algorithm", "ring", "function")):
        connect(env=ALONE, device=CPU, algorithm=lambda met: met)  # type: ignore[arg-type]
    assert connection.open_connections == before


def test_connection_that_loses_a_peer_does_not_give_up_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may hang in the library: to join it would hang, too."""
    made = NativeBackend()

    def lose(*_: object, **__: object) -> None:
        raise PeerLostError("rank 1 is gone")

    monkeypatch.setattr(connecting, "SingleBackend", lambda **_: made)
    monkeypatch.setattr(communicator, "make_allreduce", lose)
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        connect(env=ALONE, device=CPU)
    assert not made.is_abandoned


def test_tcp_backend_abandoned_listens_no_more() -> None:
    met = JobControl(TWO, timeout_seconds=60)
    met.store.set("bigbatch/host/1", "node1")
    backend = TcpBackend(TWO, met)
    address, port, _ = met.store.get("bigbatch/tcp/0").decode().split()
    backend.abandon()
    listen(address, int(port)).close()
    with pytest.raises(CommError, match=naming("buffer 7", "closed")):
        backend.submit(lambda: None, label="buffer 7")


def test_process_group_abandoned_makes_room_for_another() -> None:
    for _ in range(2):
        met = JobControl(ALONE, timeout_seconds=60)
        met.store = BoundedStore(HashStore(), seconds=60)
        TorchDistributedBackend(ALONE, met, library="gloo", device=CPU).abandon()
        assert not torch.distributed.is_initialized()


# --- a rank that freezes between the meeting and the library's own connection ---


def test_library_that_connects_without_a_limit_ends_with_the_ranks_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """NCCL's eager connection, played: it waits for all ranks in C++, and rank 1 has frozen after the meeting."""
    codes: list[int] = []
    given_up = threading.Event()

    def end_process(code: int) -> None:
        codes.append(code)
        given_up.set()

    def wait_for_ever(*_: object, **__: object) -> None:
        given_up.wait(timeout=60)
        raise RuntimeError("the process would be gone")

    def meet_both(env: ProcessEnv, met: JobControl, *, gpu: str) -> list[RankPlace]:
        met.store.set("bigbatch/host/1", "node1")
        return PLACES_OF_TWO

    PlayedGpus(1, monkeypatch=monkeypatch)
    monkeypatch.setattr(several_ranks, "meet", meet_both)
    monkeypatch.setattr(watch.os, "_exit", end_process)
    monkeypatch.setattr(hang_report, "dump_flight", str)  # of what other tests did
    monkeypatch.setattr(torch.distributed, "init_process_group", wait_for_ever)
    monkeypatch.setattr(torch_distributed, "prefer_interface", lambda interface, *, is_one_host: None)
    with pytest.raises(CommError):
        connect(backend="nccl", env=TWO, device=torch.device("cuda", 0), timeout_seconds=0.6, warn_seconds=0.2)
    assert set(codes) == {LOST}
    first, *_, last = capfd.readouterr().err.splitlines()
    assert re.search(naming("rank 0", "connection of 2 ranks by nccl", "rank 1 on node1 has not started"), first)
    assert re.search(naming("rank 0", "connection of 2 ranks by nccl", "no answer from rank 1 on node1"), last)


def test_single_rank_refuses_a_process_group_made_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several ranks that a script spawns would train alone."""
    with connect(device=CPU) as communicator, connect(device=CPU, env=ALONE) as alone:
        communicator.sum_(torch.ones(1), label="before")
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(CommError, match=naming("a metric", "one rank", "has 2", "after init_process_group()")):
            communicator.sum_(torch.ones(1), label="a metric")
        alone.sum_(torch.ones(1), label="a metric")
        monkeypatch.undo()


def test_connection_that_fails_stops_its_inspector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_ranks, "meet", lambda env, met, gpu: PLACES_OF_TWO)
    monkeypatch.setattr(tcp, "TcpBackend", MagicMock(side_effect=CommError("no")))
    with pytest.raises(CommError):
        connect(backend="tcp", env=TWO, device=CPU, timeout_seconds=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "bigbatch-watch" and thread.is_alive()]


def test_settings_of_nccl_reach_it_and_what_it_has_not_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    PlayedGpus(2, monkeypatch=monkeypatch)
    asked: list[Any] = []

    def register(device: torch.device, *, is_symmetric: bool) -> None:
        asked.append((device, is_symmetric))
        raise CommError("comm.buffers is not to be had")

    transport = SimpleNamespace(
        capabilities=Capabilities(("cuda",), in_place=True),
        oldest=lambda: None,
        abandon=lambda: asked.append("abandoned"),
        register=register,
        name="nccl",
    )
    monkeypatch.setattr(several_ranks, "meet", lambda env, met, gpu: PLACES_OF_TWO)
    monkeypatch.setattr(torch_distributed, "TorchDistributedBackend", lambda *_, **__: transport)
    gpu = torch.device("cuda", 0)
    with pytest.raises(CommError, match=re.escape("comm.buffers")):
        connect(backend="nccl", env=TWO, device=gpu, timeout_seconds=1, buffers="symmetric")
    assert asked == [(gpu, True), "abandoned"]
    assert not [thread for thread in threading.enumerate() if thread.name == "bigbatch-watch" and thread.is_alive()]


def test_inspector_watches_until_the_transport_is_closed() -> None:
    """The last barrier waits for all ranks."""
    closed: list[str] = []
    inspector = SimpleNamespace(close=lambda: closed.append("inspector"))
    backend: Any = SimpleNamespace(close=lambda: closed.append("backend"), name="nccl")
    transport_over(backend, watch=inspector).connection.close()
    assert closed == ["backend", "inspector"]


class Played(SimpleNamespace):
    """A backend and control of a connection."""

    __hash__ = object.__hash__


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of this process, which does not end. No connection or request of another test is open in it."""
    monkeypatch.setattr(connection, "open_connections", {})
    monkeypatch.setattr(connection, "_aborted", [])
    earlier, all_threads = set(threading.enumerate()), bounded_store.running_threads
    monkeypatch.setattr(
        bounded_store, "running_threads", lambda: [each for each in all_threads() if each not in earlier]
    )
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    noted: list[int] = []
    monkeypatch.setattr(os, "_exit", noted.append)
    return noted


def leaving(**told: object) -> tuple[Communicator, list[str]]:
    """An open connection, and notes of how it is left. told: of its backend and failure detector."""
    noted = list[str]()
    played: Any = Played(name="single", timeout_seconds=60.0, verdict=None, has_failed=False, oldest=lambda: None)
    calls = {"publish_departure": "left", "close": "closed", "publish_success": "ended", "publish_crash": "reported"}
    for name, word in calls.items():
        setattr(played, name, lambda *_, word=word, **__: noted.append(word))
    vars(played).update(told, detector=played)
    made = Communicator(transport_over(played, control=played), "native", lambda tensor_N: None, Wire())
    connection.close_at_exit(made.connection)
    return made, noted


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ["left", "closed", "ended"]),
        (SystemExit(0), ["left", "closed", "ended"]),
        (SystemExit(3), ["reported"]),
        (KeyError("defect"), ["reported"]),
    ],
)
def test_connection_is_closed_by_with_or_reports_its_failure(error: BaseException | None, expected: list[str]) -> None:
    made, noted = leaving()
    with suppress(SystemExit, KeyError), made as entered:
        assert entered is made
        if error is not None:
            raise error
    assert noted == expected
    assert made.connection.control not in connection.open_connections


@pytest.mark.parametrize(
    ("last_value", "expected"), [(None, ["left", "closed", "ended"]), (KeyError("defect"), ["reported"])]
)
def test_connection_that_is_open_at_exit_is_closed_or_reports_the_uncaught_exception(
    last_value: BaseException | None, expected: list[str], codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", last_value, raising=False)
    _, noted = leaving()
    connection._close_all()
    assert noted == expected


def test_connection_is_not_ended_by_a_forked_process(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, noted = leaving()
    finalized: list[int] = []
    monkeypatch.setattr(connection, "load", lambda path: lambda: finalized.append(1))
    monkeypatch.setattr(connection, "_closed_over_mpi", [os.getpid()])
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        with suppress(SystemExit), made:
            raise SystemExit(0)
        connection.abort_all(1)
        connection._close_all()
        child.setattr(connection, "open_connections", {})
        connection.end_mpi()
    assert (noted, finalized, codes) == ([], [], [])
    connection._close_all()
    connection.end_mpi()
    assert (noted, finalized) == (["left", "closed", "ended"], [1])


def test_connection_that_loses_a_peer_at_exit_says_so_in_one_line_and_fails(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    leaving(close=MagicMock(side_effect=PeerLostError("no answer from rank 1")))
    connection._close_all()
    assert codes == [1]
    assert capsys.readouterr().err == "bigbatch: no answer from rank 1\n"


def test_connection_that_has_lost_a_peer_waits_for_no_barrier(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """close() after a caught error returns; a script that ends without it fails."""
    verdict = Verdict(frozenset({1}), "no answer from rank 1", 0.0)
    made, noted = leaving(verdict=verdict)
    made.close()
    assert noted == ["left", "closed", "ended"], "a rank that nothing has told of the loss meets it in the barrier"
    made, noted = leaving(verdict=verdict, has_failed=True)
    made.close()
    connection._close_all()
    assert (noted, connection.open_connections, codes) == (["reported"], {}, [])
    leaving(verdict=verdict, has_failed=True)
    connection._close_all()
    assert (codes, capsys.readouterr().err) == ([1], "bigbatch: no answer from rank 1\n")


@pytest.mark.parametrize(
    ("looks_to_the_end", "last_value", "expected"),
    [(2, None, []), (10_000, None, [1]), (10_000, KeyboardInterrupt(), [130])],
)
def test_process_that_ends_behind_a_failure_waits_for_an_operation_a_while_and_leaves(
    looks_to_the_end: int,
    last_value: BaseException | None,
    expected: list[int],
    codes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that returns from a library while the interpreter ends would abort the process."""
    monkeypatch.setattr(connection, "LAST_SECONDS", 1e9 if looks_to_the_end < 10_000 else 0.05)
    monkeypatch.setattr(sys, "last_value", last_value, raising=False)
    made, _ = leaving()
    looks = iter(range(looks_to_the_end))
    made.transport.backend.oldest = lambda: None if next(looks, None) is None else Pending(1, "sum", 0.0)  # type: ignore[method-assign]
    with suppress(PeerLostError), made:
        raise PeerLostError("no answer from rank 1")
    connection._close_all()
    assert codes == expected


def test_process_that_ends_waits_for_a_request_that_was_given_up(
    codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    with pytest.raises(NoAnswerError):
        answer_within(0.0, lambda: answer.wait(timeout=200))
    monkeypatch.setattr(connection, "LAST_SECONDS", 0.05)
    connection._close_all()
    assert codes == [1]
    monkeypatch.setattr(connection, "LAST_SECONDS", 200.0)
    answer.set()
    connection._close_all()
    assert codes == [1]
