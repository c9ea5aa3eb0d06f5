"""Measurements of preflight on a host and between hosts, and its findings if it cannot measure."""

import json
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hand_made_nodes import place
from played_gpus import PlayedGpus

from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import CommError, DataError
from bigbatch.tools.preflight import command as preflight_command
from bigbatch.tools.preflight import facts, links
from bigbatch.tools.preflight.checks import Host
from bigbatch.tools.preflight.facts import RankGpu
from bigbatch.tools.preflight.rates import Rates, measure_rates
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.machine.limits import Limits
from bigbatch.trainer.machine.network import Port


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_pairs_all_meet_once_and_no_node_twice_in_a_round(count: int) -> None:
    rounds = [*links.rounds_of_pairs(count)]
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for each in rounds:
        places = [place for pair in each for place in pair]
        assert len(places) == len(set(places))
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)


def test_first_round_of_thousands_of_nodes_makes_no_other() -> None:
    rounds = iter(links.rounds_of_pairs(20_001))
    assert [len(next(rounds)) for _ in range(2)] == [10_000] * 2


def test_ports_that_do_not_answer() -> None:
    with links.listening("127.0.0.1") as port, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and not listening
        there = ("127.0.0.1", port)
        assert links.unreachable([there, closed.getsockname(), there]) == [1]


@pytest.mark.slow
def test_short_queue_of_the_kernel_is_no_unreachable_node(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda where, backlog: create(where, backlog=4))
    with links.listening("127.0.0.1") as port:
        assert links.unreachable([("127.0.0.1", port)] * 60) == []


def test_rates_are_of_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices of side n take 2 n^3 operations; the clock says 0.5 s for each repeat."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("bigbatch.tools.preflight.rates.time.perf_counter", lambda: next(ticks) * 0.5)
    monkeypatch.setattr("bigbatch.tools.preflight.rates.CPU_SIDE", 32)
    monkeypatch.setattr("bigbatch.tools.preflight.rates.COPY_BYTES", {"cpu": 1000})
    found = measure_rates(torch.device("cpu"), seconds=1.0)
    assert found.multiply_gflops == pytest.approx(2 * 32**3 / 0.5 / 1e9)
    assert found.copy_gb_per_second == pytest.approx(1000 / 0.5 / 1e9)


def test_rates_say_what_share_of_its_cores_a_rank_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 threads could run 8 s in 4 s of wall time, and ran 2 s."""
    wall, ran = iter((0.0, 4.0)), iter((10.0, 12.0))
    monkeypatch.setattr("bigbatch.tools.preflight.rates.median_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr("bigbatch.tools.preflight.rates.torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("bigbatch.tools.preflight.rates.time.perf_counter", lambda: next(wall))
    monkeypatch.setattr("bigbatch.tools.preflight.rates.time.process_time", lambda: next(ran))
    assert measure_rates(torch.device("cpu"), seconds=1.0).cpu_share == 2 / 8


class TwoHosts:
    """Control channel of rank 0 of here, beside a rank of there whose measurements are given."""

    timeout_seconds = 30.0

    def __init__(self, other: dict[str, Any]) -> None:
        self.other, self.turns = {"host": "there", "links": {}, **other}, 0

    def gather_text(self, text: str, *, what: str) -> None:
        self.turns += 1

    def collect_text(self, text: str, *, what: str) -> list[str]:
        return [text, json.dumps(self.other)]

    def tell_all(self, text: str, **how: Any) -> str:
        return text


HERE_AND_THERE = [place(0, host="here"), place(0, rank=1, host="there", machine="m1")]


@pytest.mark.parametrize(
    ("rates", "other", "used"),
    [
        ([80.0, 79.0], 78.0, 2),
        ([55.0, 54.0, 79.0], 80.0, 3),  # a hiccup, which the third round does not show
        ([40.0, 39.0, 41.0], 80.0, 3),  # a slow node
        ([20.0, 50.0, 79.0], 80.0, 3),  # noise so far, which the third round shows
        ([80.0, 79.0], 40.0, 2),  # the other host is measured again
    ],
)
def test_node_that_would_be_named_is_measured_once_more(
    rates: list[float], other: float, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(rates)
    monkeypatch.setattr(preflight_command, "measure_rates", lambda device, *, seconds: Rates(next(given), 1.0, None))
    control = TwoHosts({"rates": [{"multiply_gflops": other, "copy_gb_per_second": 1.0}] * 2})
    measured: dict[str, Any] = {"host": "here", "rates": [], "links": {}}
    preflight_command._take_turns(control, HERE_AND_THERE, measured, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert [each["multiply_gflops"] for each in measured["rates"]] == rates[:used] == rates
    assert control.turns == 2 + (3 in (used, used + (other == 40.0)))


@pytest.mark.parametrize("again", [[], ["n1", "n3"]])
def test_pair_that_would_be_named_is_measured_once_more(again: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """n1 and n3 are at 10 of 100 Gbit/s at first."""
    rates = iter(({1: 100.0, 2: 100.0, 3: 100.0}, {1: 90.0, 3: 110.0}))
    asked: list[list[str]] = []

    def measure_pairs(communicator: Any, leaders: list[int], *, of: list[int]) -> dict[int, float]:
        asked.append([f"n{index}" for index in of])
        return {index: rate for index, rate in next(rates).items() if {0, index} & {*of}}

    monkeypatch.setattr(preflight_command, "measure_pairs", measure_pairs)
    monkeypatch.setattr(preflight_command, "connect", lambda **how: SimpleNamespace(close=lambda: None))
    measured: dict[str, Any] = {
        "host": "n0",
        "rates": [{"multiply_gflops": 1.0, "copy_gb_per_second": 1.0}],
        "links": {},
    }
    places = [place(number, rank=number) for number in range(4)]

    def collect_text(text: str, *, what: str) -> list[str]:
        links = {
            i: {f"n{j}": [10.0 if {i, j} == {1, 3} and again else 100.0] for j in range(4) if j != i} for i in range(4)
        }
        return [text, *(json.dumps({**measured, "host": f"n{i}", "links": links[i]}) for i in (1, 2, 3))]

    control = SimpleNamespace(collect_text=collect_text, tell_all=lambda text, **how: text, timeout_seconds=30.0)
    env = ProcessEnv("torchrun", 0, 4, 0, 1, "n0", None)
    preflight_command._measure_links(control, places, measured, env, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert asked == [["n0", "n1", "n2", "n3"], again]
    more = {"n1": [90.0], "n3": [110.0]} if again else {}
    assert measured["links"] == {f"n{i}": [100.0, *more.get(f"n{i}", [])] for i in (1, 2, 3)}


def test_link_rate_must_be_above_0(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("0", "nan", "-1"):
        with pytest.raises(SystemExit, match="2"):
            preflight_command.main([f"--link-gbit={word}"])
    assert "argument --link-gbit: -1 must be a positive number" in capsys.readouterr().err


def test_images_are_counted_or_the_trouble_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "shapes", train_per_class=3, val_per_class=2)
    config = load_config(["--config", "quickstart", f"--data.root={tmp_path / 'shapes'}"])
    assert facts.count_images(config) == ({"classes": 10, "training": 30, "validation": 20}, None)
    none = load_config(["--config", "quickstart", f"--data.root={tmp_path / 'none'}"])
    counts, complaint = facts.count_images(none)
    assert counts == {}
    assert "no such folder" in str(complaint)
    words = ["--config", "quickstart", "--data.loader=synthetic", "--data.num_synthetic_samples=512"]
    assert facts.count_images(load_config(words)) == ({}, None)


def test_disk_is_that_of_the_nearest_folder_that_exists_or_the_system_refuses_it(tmp_path: Path) -> None:
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}/a/b/c", "--data.stage=null"])
    free, trouble = facts.free_disk(config)
    assert set(free) == {"/dev/shm", f"{tmp_path}/a/b/c"}
    assert all(value > 0 for value in free.values())
    assert trouble == {}
    name = str(tmp_path / ("x" * 300))  # longer than a file system takes, and so refused to root, too
    config = load_config(["--config", "quickstart", f"--run.directory={name}", f"--data.root={name}"])
    free, trouble = facts.free_disk(config)
    assert set(free) == {"/dev/shm"}
    assert trouble == {name: "File name too long: give the job's user access, or name another folder"}
    counts, complaint = facts.start_counting(config)()
    assert counts == {}
    assert "File name too long" in str(complaint)


def test_storage_that_hangs_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders and the images hang at the same time."""
    end, usage = threading.Event(), facts.shutil.disk_usage

    def hangs(place: Path) -> Any:
        if str(place) != "/dev/shm":
            end.wait(200)
        return usage(place)

    def opens(root: str, *, listed: object) -> None:
        end.wait(200)
        raise DataError("too late")

    monkeypatch.setattr(facts, "STORAGE_SECONDS", 0.4)
    monkeypatch.setattr(facts.shutil, "disk_usage", hangs)
    monkeypatch.setattr(facts, "DataRoot", opens)
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}/run", f"--data.stage={tmp_path}"])
    began = time.monotonic()
    node = facts.gather_facts(config, device=torch.device("cpu"))
    seconds = time.monotonic() - began
    end.set()
    assert seconds < 100
    assert set(node["free_gb"]) == {"/dev/shm"}
    hang = "no answer within 0.4 s: see whether df hangs there, too"
    assert node["disk_trouble"] == {f"{tmp_path}/run": hang, str(tmp_path): hang}
    assert node["complaint"] == "data/shapes was not read within 0.4 s: slow storage; bigbatch data pack helps"


def test_drivers_words() -> None:
    line = "NVIDIA H100 80GB HBM3, 570.86.15, 1980 MHz, 1980 MHz, 31"
    versions = facts.versions(torch.device("cpu"), (line, line))
    assert versions["driver"] == "570.86.15"
    assert re.fullmatch(r"\d+\.\d+\.\d+( [0-9a-f]{12}\+?)? \(sources [0-9a-f]{8}\)", versions["bigbatch"])


def test_launchers_interface_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if --interface states one; the command's own option takes precedence."""
    monkeypatch.setenv("BIGBATCH_INTERFACE", "ib7")
    for words, name in (([], "ib7"), (["--interface", "ib8"], "ib8")):
        with pytest.raises(CommError, match=f"^interface '{name}': "):
            preflight_command.main(words)


def test_links_are_measured_on_the_interface_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """connect() puts the one that the launcher named first."""
    asked = []

    def connect(*, env: ProcessEnv, **others: Any) -> None:
        asked.append(env.interface)
        raise CommError("far enough")

    monkeypatch.setenv("BIGBATCH_INTERFACE", "ib7")
    monkeypatch.setattr(preflight_command, "connect", connect)
    monkeypatch.setattr(preflight_command, "measure_rates", lambda device, *, seconds: Rates(1.0, 1.0, None))
    with pytest.raises(CommError, match="far enough"):
        preflight_command.main(["--interface", "lo"])
    assert asked == ["lo"]


def test_what_the_node_lacks_is_told_and_its_links_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL would not connect where it may lock no memory."""
    port = Port("mlx5_0/1", "ACTIVE", "LinkUp", 400.0, "InfiniBand", has_routable_gid=False)
    host = Host(world_size=2, on_gpus=True, ports=(port,), limits=Limits(locked_bytes=65536, cores=0.5))
    monkeypatch.setattr(preflight_command, "query_host", lambda asked, *, gpus, address: lambda: host)
    monkeypatch.setattr(preflight_command, "connect", None)
    monkeypatch.setattr(preflight_command, "measure_rates", lambda device, *, seconds: Rates(1.0, 1.0, None))
    assert preflight_command.main(["--json", str(tmp_path / "facts.json")]) == 4
    lines = capsys.readouterr().out.splitlines()
    name = socket.gethostname()
    assert f"bigbatch: {name}: a rank may lock 64 KiB, below 1,048,576: have it unlimited (ulimit -l; " in lines[-4]
    assert lines[-2].startswith(f"remark: {name}: 0.5 cores for 1 rank: ask for more")
    assert "findings: 1, unfit: " in lines[-1]
    (found,) = json.loads((tmp_path / "facts.json").read_text())["nodes"]
    assert found["network"] == {"mlx5_0/1": "400 Gbit/s InfiniBand, ACTIVE"}
    assert set(found["troubles"]) == {"locked memory", "GPUDirect", "cores"}


@pytest.mark.parametrize(("beside", "processes"), [("m1", [1]), ("m0", [1, 2])])
def test_nodes_of_one_machine_know_each_others_processes(
    beside: str, processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(preflight_command, "machine_id", lambda: "m0")
    monkeypatch.setattr(
        preflight_command, "query_host", lambda host, *, gpus, address: asked.append((host, gpus, address))
    )
    env = ProcessEnv("torchrun", 0, 2, 0, 1, "n0", None, interface="lo")
    places = [place(0), place(1, machine=beside)]
    gpus = [RankGpu("n0", 1, "GPU-a"), RankGpu("n1", 2, "GPU-b")]
    preflight_command._query_host(None, env, places, gpus, device=torch.device("cuda", 0), address="10.0.0.1")
    ((host, known, address),) = asked
    assert host == Host(
        num_ranks=1,
        world_size=2,
        on_gpus=True,
        own_gpus=("GPU-a",),
        shares_machine=beside == "m0",
        is_interface_stated=True,
    )
    assert ([gpu.process for gpu in known], address) == (processes, "10.0.0.1")


@pytest.mark.parametrize(
    ("words", "keeps_to_cpu", "wants"),
    [
        ((), False, True),
        ((), True, False),
        (("--comm.backend=gloo",), False, False),
        (("--comm.backend=nccl",), False, True),
    ],
)
def test_gpus_are_asked_for_where_the_job_wants_them(
    words: tuple[str, ...], keeps_to_cpu: bool, wants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(preflight_command, "query_host", lambda host, *, gpus, address: asked.append(host))
    config = load_config(["--config", "quickstart", *words]) if words else None
    env = ProcessEnv("torchrun", 0, 1, 0, 1, "n0", None, keeps_to_cpu=keeps_to_cpu)
    preflight_command._query_host(config, env, [], [], device=torch.device("cpu"), address="10.0.0.1")
    assert [host.wants_gpus for host in asked] == [wants]


def test_gpu_that_all_ranks_of_a_node_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees one alone, which could be its own."""
    PlayedGpus(1, monkeypatch=monkeypatch, uuids="f")
    beside = {"host": "here", "process": 2, "uuid": "GPU-f"}
    others = {"meeting of every node": None, "comparison of GPUs": beside}
    control = SimpleNamespace(gather=lambda value, *, what: [value, others[what]])
    env = ProcessEnv("torchrun", 0, 2, 0, 2, "here", None)
    nodes, (found,) = preflight_command.examine(None, env, control, address="127.0.0.1")  # type: ignore[arg-type]
    assert nodes == []
    for named in ("2 ranks on here", "1 GPU ", "GPU-f", "--device cpu"):
        assert named in found.text
