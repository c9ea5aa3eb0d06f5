"""Preflight: verdicts on hand-made nodes, who meets whom, and what launchers make of it."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from played_gpus import PlayedGpus

from bigbatch.cli import main
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import CommError, DataError, LaunchOptionError
from bigbatch.launch.jobs.fit_hosts import (
    choose_launcher,
    fit_hosts,
    preflight_command,
    preflight_of,
    read_bad_nodes,
    without,
    write_hostfile,
)
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.machine.gpu_driver import Clock
from bigbatch.trainer.machine.limits import Limits
from bigbatch.trainer.machine.network import Port
from bigbatch.trainer.preflight import examine, facts, links
from bigbatch.trainer.preflight.check import Host
from bigbatch.trainer.preflight.host import Seat
from bigbatch.trainer.preflight.meeting import Attendee, misfits, silent
from bigbatch.trainer.preflight.node import Node
from bigbatch.trainer.preflight.rates import Rates, measure_rates
from bigbatch.trainer.preflight.speeds import bits
from bigbatch.trainer.preflight.verdict import judge, odd_ones, remarks

GBIT = 1e9 / 8


def node(name: str, **changes: Any) -> Node:
    base = Node(
        host=name,
        versions={"torch": "2.14.1", "bigbatch": "0.1.0 abc"},
        device="NVIDIA H100",
        address="10.0.0.1",
        free_gb={"/dev/shm": 60.0, "runs": 500.0},
        images={"classes": 1000, "training": 1_281_167, "validation": 50_000},
        multiply_gflops=700_000.0,
        copy_gb_per_second=1500.0,
    )
    return replace(base, **changes)


def cluster(count: int = 4, *, rate: Callable[[int, int], float] = lambda a, b: 100 * GBIT, **odd: Any) -> list[Node]:
    """n0, n1 ... with links; changes of n1 are odd."""
    nodes = [
        node(f"n{i}", link_bytes_per_second={f"n{j}": rate(i, j) for j in range(count) if j != i}) for i in range(count)
    ]
    nodes[1] = replace(nodes[1], **odd)
    return nodes


def texts(nodes: list[Node]) -> list[str]:
    return [finding.text for finding in judge(nodes)]


def blamed(nodes: list[Node]) -> list[str]:
    return sorted({host for finding in judge(nodes) for host in finding.hosts})


# --- verdicts ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_equal_nodes_are_fit(count: int) -> None:
    assert judge([node(f"n{i}") for i in range(count)]) == []


def test_noise_is_no_finding() -> None:
    nodes = [
        node(
            f"n{i}", multiply_gflops=700e3 * share, copy_gb_per_second=1500 * share, link_bytes_per_second={"x": share}
        )
        for i, share in enumerate((1.0, 0.85, 1.1, 0.95))
    ]
    assert judge(nodes) == []


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"multiply_gflops": 350_000.0}, "n1: multiplies matrices at 350,000.0 GFLOP/s, the median node at 700,000.0"),
        ({"copy_gb_per_second": 750.0}, "n1: copies memory at 750.0 GB/s, the median node at 1,500.0"),
    ],
)
def test_node_slowed_by_half_is_named(count: int, odd: dict[str, float], told: str) -> None:
    nodes = cluster(count, **odd)
    (text,) = texts(nodes)
    assert text.startswith(told)
    assert blamed(nodes) == ["n1"]


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_link_at_a_tenth_is_named_and_not_its_partners(count: int) -> None:
    nodes = cluster(count, rate=lambda a, b: (10 if 1 in (a, b) else 100) * GBIT)
    (text,) = texts(nodes)
    assert text.startswith("n1: its link carries 10.00 Gbit/s, the median node's 100.00 Gbit/s")
    assert blamed(nodes) == ["n1"]


def test_slow_path_between_two_good_nodes_is_a_pair() -> None:
    nodes = cluster(rate=lambda a, b: (10 if {a, b} == {1, 3} else 100) * GBIT)
    assert texts(nodes) == ["n1 to n3: 10.00 Gbit/s, the median node's link 100.00 Gbit/s"]
    assert blamed(nodes) == []


def test_slow_links_of_two_nodes_have_none_to_compare_with() -> None:
    assert judge(cluster(2, rate=lambda a, b: GBIT)) == []


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"versions": {"torch": "2.10.0", "bigbatch": "0.1.0 abc"}}, "n1: torch 2.10.0, elsewhere 2.14.1"),
        ({"versions": {"torch": "2.14.1", "bigbatch": "0.1.0 def+"}}, "n1: bigbatch 0.1.0 def+, elsewhere 0.1.0 abc"),
        ({"versions": {"torch": "2.14.1", "bigbatch": "0.1.0 abc", "driver": "5"}}, "n1: driver 5, elsewhere none"),
        ({"device": "NVIDIA A100"}, "n1: device NVIDIA A100, elsewhere NVIDIA H100"),
        ({"free_gb": {"runs": 0.2}}, "n1: runs has 0.2 GB left, below 1: free some"),
        ({"free_gb": {"/dev/shm": 0.064}}, "n1: /dev/shm has 0.064 GB left, below 0.5: free some, or start the"),
        ({"free_gb": {}, "disk_trouble": {"runs": "no answer within 8 s"}}, "n1: runs: no answer within 8 s"),
        ({"complaint": "data/train: no such folder"}, "n1: data/train: no such folder"),
        ({"images": {"classes": 1000, "training": 5, "validation": 6}}, "n1: sees other data, {'classes': 1000, 'tr"),
        ({"address": "127.0.1.1"}, "n1: its address is 127.0.1.1, which other nodes cannot reach"),
        ({"hardware": {"RDMA ports": "7 of 400 Gbit/s"}}, "n1: RDMA ports 7 of 400 Gbit/s, elsewhere none"),
        ({"troubles": {"driver": ["nvidia-smi: no answer"]}}, "n1: nvidia-smi: no answer: see nvidia-smi there"),
    ],
)
def test_odd_node_is_named(odd: dict[str, Any], told: str) -> None:
    nodes = cluster(**odd)
    (text,) = texts(nodes)
    assert text.startswith(told)
    assert blamed(nodes) == ["n1"]


@pytest.mark.parametrize(
    "shared",
    [
        {"free_gb": {"runs": 0.2}},
        {"free_gb": {}, "disk_trouble": {"runs": "no answer within 8 s"}},
        {"address": "127.0.1.1"},
        {"troubles": {"locked memory": ["a rank may lock 64 KiB, below 1,048,576"]}},
    ],
)
def test_what_all_nodes_have_is_no_nodes_fault(shared: dict[str, Any]) -> None:
    nodes = [node(f"n{i}", **shared) for i in range(3)]
    assert len(judge(nodes)) == 3
    assert blamed(nodes) == []


def test_data_that_nobody_sees_are_no_nodes_fault() -> None:
    nodes = [node(f"n{i}", complaint="data/train: no such folder", images={}) for i in range(3)]
    assert texts(nodes) == ["data/train: no such folder"]
    assert blamed(nodes) == []


def test_node_that_nobody_reaches_is_named_once() -> None:
    nodes = [replace(each, unreachable=("n1",)) for each in cluster()]
    nodes[1] = replace(nodes[1], unreachable=())
    (text,) = texts(nodes)
    assert text.startswith("n1: 3 of 3 nodes cannot connect to 10.0.0.1, and it cannot connect to 0")
    assert blamed(nodes) == ["n1"]


def test_node_that_reaches_nobody_is_named_once() -> None:
    (text,) = texts(cluster(unreachable=("n0", "n2", "n3")))
    assert "n1: 0 of 3 nodes cannot connect" in text
    assert "it cannot connect to 3" in text


@pytest.mark.parametrize("count", [2, 4])
def test_pair_that_does_not_meet_is_named(count: int) -> None:
    assert texts(cluster(count, unreachable=("n0",))) == ["n1 cannot connect to n0: a firewall or a route between them"]


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        (Clock(900.0, ()), "n1: the GPU of rank 3 works at 900 MHz, the median one at 1,980: look at nvidia-smi -q"),
        (Clock(1980.0, ("heat",)), "n1: the GPU of rank 3 works at 1,980 MHz, slowed by heat, the median one at 1,980"),
    ],
)
def test_gpu_with_a_low_clock_is_named(clock: Clock, told: str) -> None:
    nodes = [node(f"n{i}", clocks={2 * i: Clock(1980.0, ()), 2 * i + 1: Clock(1755.0, ())}) for i in range(4)]
    assert judge(nodes) == []
    nodes[1] = replace(nodes[1], clocks={2: Clock(1980.0, ()), 3: clock})
    (text,) = texts(nodes)
    assert text.startswith(told)
    assert blamed(nodes) == ["n1"]


def test_heat_in_all_nodes_is_no_nodes_fault() -> None:
    nodes = [node(f"n{i}", clocks={i: Clock(900.0, ("heat",))}) for i in range(3)]
    assert len(judge(nodes)) == 3
    assert blamed(nodes) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"free_gb": {"/dev/shm": 0.1}}, {"free_gb": {"runs": 0.2}}),
        ({"free_gb": {"runs": 0.2}}, {"disk_trouble": {"runs": "no answer within 8 s"}}),
        ({"clocks": {0: Clock(1980.0, ("heat",))}}, {"clocks": {1: Clock(1980.0, ("its power supply's brake",))}}),
        (
            {"clocks": {0: Clock(900.0, ()), 1: Clock(1980.0, ()), 2: Clock(1980.0, ())}},
            {"clocks": {3: Clock(900.0, ()), 4: Clock(1980.0, ()), 5: Clock(1980.0, ())}},
        ),
    ],
)
def test_two_nodes_with_a_fault_of_their_own_are_both_named(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert blamed([node("n0", **first), node("n1", **second)]) == ["n0", "n1"]


@pytest.mark.parametrize(
    "fault", [{"clocks": {0: Clock(900.0, ("heat",))}}, {"free_gb": {"/dev/shm": 0.1}}, {"disk_trouble": {"runs": "x"}}]
)
def test_node_alone_is_named_too(fault: dict[str, Any]) -> None:
    assert blamed([node("n0", **fault)]) == ["n0"]


# --- who meets ---


def place(number: int, **changes: Any) -> Attendee:
    return replace(Attendee(8 * number, f"n{number}", "10.0.0.1", 1, f"m{number}", 8, None), **changes)


def test_equal_places_fit() -> None:
    assert misfits([place(0), place(1)]) == []
    assert misfits([place(0, num_gpus=0)]) == []


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("complaint", [None, "8 ranks on n1 but 7 GPUs"])
def test_node_that_lacks_a_gpu_is_named(count: int, complaint: str | None) -> None:
    odd = place(1, num_gpus=7, complaint=complaint)
    (finding,) = misfits([odd if number == 1 else place(number) for number in range(count)])
    assert finding.text == "n1: 7 GPUs, elsewhere 8: look at nvidia-smi and the kernel's log there"
    assert finding.hosts == ("n1",)


def test_too_few_gpus_everywhere_are_no_nodes_fault() -> None:
    found = misfits([place(number, num_gpus=4, complaint=f"8 ranks on n{number} but 4 GPUs") for number in (0, 1)])
    assert [finding.text for finding in found] == ["8 ranks on n0 but 4 GPUs", "8 ranks on n1 but 4 GPUs"]
    assert [finding.hosts for finding in found] == [(), ()]


def test_two_nodes_of_one_name_are_told() -> None:
    (finding,) = misfits([place(0, host="localhost"), place(1, host="localhost"), place(2)])
    assert finding.text == "2 nodes call themselves localhost, of ranks 0, 8: give each a host name of its own"
    assert finding.hosts == ()


def test_silent_node_is_told_apart_from_a_silent_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[0-3]")
    control = SimpleNamespace(world_size=8, host_of=lambda rank: f"n{rank // 2}")
    (finding,) = silent([4, 5, 7], control)  # type: ignore[arg-type]
    assert finding.text.startswith("no answer from ranks 4, 5, 7, on n2 within 12 s: see whether its processes started")
    assert finding.hosts == ("n2",)
    (finding,) = silent([7], control)  # type: ignore[arg-type]
    assert finding.text.startswith("no answer from rank 7 within 12 s: ")
    assert finding.hosts == ()
    assert silent([], control) == []  # type: ignore[arg-type]


def test_odd_ones_of_two_camps() -> None:
    assert odd_ones({"a": 1, "b": 2}) == [("b", "1")]
    assert odd_ones({"a": 1, "b": 2, "c": 2}) == [("a", "2")]
    assert odd_ones({"a": {}, "b": {}}) == []


def test_remarks_are_told_beside_findings() -> None:
    assert remarks(cluster()) == []
    short = {"classes": 1000, "training": 2_561_034, "validation": 50_000}
    assert remarks([node("n0", images=short)]) == [
        "1,000 classes, but 2,561,034 training and 50,000 validation pictures: ImageNet has 1,281,167 and 50,000"
    ]
    cores = {"troubles": {"cores": ["1 cores for 2 ranks"]}}
    assert remarks([node("n0"), node("n1", **cores), node("n2", **cores)]) == [
        "n1, n2: 1 cores for 2 ranks: ask for more (--cpus-per-rank)"
    ]
    assert judge([node("n0", **cores)]) == [], "a remark ends no job"
    assert remarks([node("n0", images={"classes": 10, "training": 5, "validation": 1})]) == []
    assert bits(1.25e9) == "10.00 Gbit/s"


# --- measuring ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_pairs_all_meet_once_and_nobody_twice_in_a_round(count: int) -> None:
    rounds = links.rounds_of_pairs(count)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for each in rounds:
        places = [place for pair in each for place in pair]
        assert len(places) == len(set(places))
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)


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
    monkeypatch.setattr("bigbatch.trainer.preflight.rates.time.perf_counter", lambda: next(ticks) * 0.5)
    monkeypatch.setattr("bigbatch.trainer.preflight.rates.CPU_SIDE", 32)
    monkeypatch.setattr("bigbatch.trainer.preflight.rates.COPY_BYTES", {"cpu": 1000})
    found = measure_rates(torch.device("cpu"), seconds=1.0)
    assert found.multiply_gflops == pytest.approx(2 * 32**3 / 0.5 / 1e9)
    assert found.copy_gb_per_second == pytest.approx(1000 / 0.5 / 1e9)


def test_images_are_counted_or_the_trouble_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "shapes", train_per_class=3, val_per_class=2)
    config = load_config(["--config", "quickstart", f"--data.root={tmp_path / 'shapes'}"])
    assert facts.count_images(config) == ({"classes": 10, "training": 30, "validation": 20}, None)
    none = load_config(["--config", "quickstart", f"--data.root={tmp_path / 'none'}"])
    counts, complaint = facts.count_images(none)
    assert counts == {}
    assert complaint is not None
    assert "no such folder" in complaint
    words = ["--config", "quickstart", "--data.loader=synthetic", "--data.num_synthetic_samples=512"]
    assert facts.count_images(load_config(words)) == ({}, None)


def test_disk_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}/a/b/c", "--data.stage=null"])
    free, trouble = facts.free_disk(config)
    assert set(free) == {"/dev/shm", f"{tmp_path}/a/b/c"}
    assert all(value > 0 for value in free.values())
    assert trouble == {}


def test_folder_that_the_system_refuses_is_told(tmp_path: Path) -> None:
    name = str(tmp_path / ("x" * 300))  # longer than a file system takes, and so refused to root, too
    words = ["--config", "quickstart", f"--run.directory={name}", "--data.stage=null", f"--data.root={name}"]
    config = load_config(words)
    free, trouble = facts.free_disk(config)
    assert set(free) == {"/dev/shm"}
    assert trouble == {name: "File name too long: let the job's user in there, or name another folder"}
    counts, complaint = facts.start_counting(config)()
    assert counts == {}
    assert complaint is not None
    assert "File name too long" in complaint


def test_storage_that_hangs_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two folders and the pictures at the same time."""
    end, usage = threading.Event(), facts.shutil.disk_usage

    def hangs(place: Path) -> Any:
        if str(place) != "/dev/shm":
            end.wait(200)
        return usage(place)

    def opens(root: Path, split: str) -> None:
        end.wait(200)
        raise DataError("too late")

    monkeypatch.setattr(facts, "STORAGE_SECONDS", 0.4)
    monkeypatch.setattr(facts.shutil, "disk_usage", hangs)
    monkeypatch.setattr(facts, "open_split", opens)
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}/run", f"--data.stage={tmp_path}"])
    began = time.monotonic()
    node = facts.gather_facts(config, rank=0, host="n0", is_leader=True, device=torch.device("cpu")).node
    seconds = time.monotonic() - began
    end.set()
    assert node is not None
    assert seconds < 100
    assert set(node.free_gb) == {"/dev/shm"}
    hang = "no answer within 0.4 s: see whether df hangs there, too"
    assert node.disk_trouble == {f"{tmp_path}/run": hang, str(tmp_path): hang}
    assert node.complaint == "data/shapes was not read within 0.4 s: slow storage; bigbatch data pack helps"


def test_drivers_words() -> None:
    line = "NVIDIA H100 80GB HBM3, 570.86.15, 1980 MHz, 1980 MHz, 31"
    versions = facts.versions(torch.device("cpu"), (line, line))
    assert versions["driver"] == "570.86.15"
    assert re.fullmatch(r"\d+\.\d+\.\d+( [0-9a-f]{12}\+?)? \(sources [0-9a-f]{8}\)", versions["bigbatch"])


def test_launchers_interface_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that nobody asked for; the command's own word goes before it."""
    monkeypatch.setenv("BIGBATCH_INTERFACE", "ib7")
    for words, name in (([], "ib7"), (["--interface", "ib8"], "ib8")):
        with pytest.raises(CommError, match=f"^interface '{name}': "):
            examine.main(words)


def test_links_are_measured_on_the_interface_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """connect() puts the one that the launcher named first."""
    asked = []

    def connect(*, env: ProcessEnv, **others: Any) -> None:
        asked.append(env.interface)
        raise CommError("far enough")

    monkeypatch.setenv("BIGBATCH_INTERFACE", "ib7")
    monkeypatch.setattr(examine, "connect", connect)
    monkeypatch.setattr(examine, "measure_rates", lambda device, *, seconds: Rates(1.0, 1.0, None))
    with pytest.raises(CommError, match="far enough"):
        examine.main(["--interface", "lo"])
    assert asked == ["lo"]


def test_what_the_node_lacks_is_told_and_its_links_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL would not connect where it may lock no memory."""
    port = Port("mlx5_0/1", "ACTIVE", "LinkUp", 400.0, "InfiniBand", has_routable_gid=False)
    host = Host(world_size=2, on_gpus=True, ports=(port,), limits=Limits(locked_bytes=65536, cores=0.5))
    monkeypatch.setattr(examine, "start_looking", lambda asked, *, seats, address: lambda: host)
    monkeypatch.setattr(examine, "connect", None)
    monkeypatch.setattr(examine, "measure_rates", lambda device, *, seconds: Rates(1.0, 1.0, None))
    assert examine.main(["--json", str(tmp_path / "facts.json")]) == 4
    lines = capsys.readouterr().out.splitlines()
    name = socket.gethostname()
    assert f"bigbatch: {name}: a rank may lock 64 KiB, below 1,048,576: have it unlimited (ulimit -l; " in lines[-4]
    assert lines[-2].startswith(f"remark: {name}: 0.5 cores for 1 ranks: ask for more")
    assert "findings: 1, unfit: " in lines[-1]
    (found,) = json.loads((tmp_path / "facts.json").read_text())["nodes"]
    assert found["network"] == {"mlx5_0/1": "400 Gbit/s InfiniBand, ACTIVE"}
    assert set(found["troubles"]) == {"locked memory", "GPUDirect", "cores"}


@pytest.mark.parametrize(("beside", "processes"), [("m1", [1]), ("m0", [1, 2])])
def test_nodes_of_one_machine_know_each_others_processes(
    beside: str, processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(examine, "machine_id", lambda: "m0")
    monkeypatch.setattr(examine, "start_looking", lambda host, *, seats, address: asked.append((host, seats, address)))
    env = ProcessEnv("torchrun", 0, 2, 0, 1, "n0", None, interface="lo")
    places = [place(0), place(1, machine=beside)]
    seats = [Seat("n0", 1, "GPU-a", "GPU-a"), Seat("n1", 2, "GPU-b", "GPU-b")]
    examine._start_looking(None, env, places, seats, device=torch.device("cuda", 0), address="10.0.0.1")
    ((host, known, address),) = asked
    assert host == Host(
        num_ranks=1,
        world_size=2,
        on_gpus=True,
        own_gpus=("GPU-a",),
        shares_machine=beside == "m0",
        is_interface_stated=True,
    )
    assert ([seat.process for seat in known], address) == (processes, "10.0.0.1")


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
    monkeypatch.setattr(examine, "start_looking", lambda host, *, seats, address: asked.append(host))
    config = load_config(["--config", "quickstart", *words]) if words else None
    env = ProcessEnv("torchrun", 0, 1, 0, 1, "n0", None, keeps_to_cpu=keeps_to_cpu)
    examine._start_looking(config, env, [], [], device=torch.device("cpu"), address="10.0.0.1")
    assert [host.wants_gpus for host in asked] == [wants]


def test_gpu_that_all_ranks_of_a_node_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees one alone, which could be its own."""
    PlayedGpus(1, monkeypatch=monkeypatch, uuids="f")
    beside = json.dumps({"host": "here", "process": 2, "gpu": "GPU-f", "only_gpu": "GPU-f"})
    others = {"meeting of every node": "null", "comparison of GPUs": beside}
    control = SimpleNamespace(gather_text=lambda text, *, what: [text, others[what]])
    env = ProcessEnv("torchrun", 0, 2, 0, 2, "here", None)
    nodes, (found,) = examine.examine(None, env, control, address="127.0.0.1")  # type: ignore[arg-type]
    assert nodes == []
    for named in ("2 ranks on here", "1 GPUs", "GPU-f", "--device cpu"):
        assert named in found.text


# --- launchers ---

TRAIN = ("train", "--config", "quickstart")


def test_command_checks_the_experiment_of_train() -> None:
    assert preflight_command(TRAIN) == ("preflight", "--config", "quickstart")
    assert preflight_command((*TRAIN, "--quiet", "--dry-run")) == preflight_command(TRAIN)
    assert preflight_command((), "--json", "x") == ("preflight", "--json", "x")
    assert preflight_command(("comm", "bench")) == ("preflight",)
    own = JobSpec(("train", "--rate", "3"), 2, is_python=True)
    assert preflight_of(own) == JobSpec(("preflight",), 2)


def test_preflight_starts_by_the_launcher_of_the_job() -> None:
    assert choose_launcher(JobSpec(TRAIN, 2)) == "mpirun"
    assert choose_launcher(JobSpec(TRAIN, 2, hosts=(("n0", 2),))) == "mpirun"
    for asked in ({"num_nodes": 2}, {"partition": "gpu"}, {"minutes": 5}):
        assert choose_launcher(JobSpec(TRAIN, 2, **asked)) == "slurm"  # type: ignore[arg-type]


def test_job_without_its_unfit_hosts() -> None:
    job = JobSpec(TRAIN, 4, hosts=(("n0.cluster", 2), ("n1.cluster", 2), ("n2.cluster", 2)))
    assert without(job, ["n1"]).hosts == (("n0.cluster", 2), ("n2.cluster", 2))
    with pytest.raises(LaunchOptionError, match=naming(" n0, n1 ", " 2 slots ", " 4 ranks", "--hosts", "--ranks")):
        without(job, ["n0", "n1"])
    with pytest.raises(LaunchOptionError, match=naming(" n0, n1, n2 ", " 0 slots")):
        without(replace(job, num_ranks=1), ["n0", "n1", "n2"])


ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.1.1")


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name -> address, as this host resolves it; addresses are their own."""
    known: dict[str, str] = {}

    def getaddrinfo(host: str, port: None) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in known and not host[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (known.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize(
    ("hosts", "known", "bad", "fit"),
    [
        (("n0", "n1.cluster", "n10"), {}, "n1", ("n0", "n10")),
        (("n0", "n1", "n10"), {}, "n1.cluster", ("n0", "n10")),
        (("n1.a", "n1.b"), {}, "n1.b", ("n1.a",)),
        (("n1.a", "n1.b"), {"n1": "10.0.0.1", "n1.a": "10.0.0.1", "n1.b": "10.0.0.2"}, "n1", ("n1.b",)),
        (ADDRESSES, {}, "10.0.0.1", ADDRESSES[1:]),
        (ADDRESSES, {"n1": "10.0.0.2"}, "n1", (ADDRESSES[0], ADDRESSES[2])),
        (("left", "right"), {"left": "10.0.0.1", "right": "10.0.0.2", "n1": "10.0.0.2"}, "n1", ("left",)),
    ],
)
def test_unfit_host_is_found_under_another_name(
    hosts: tuple[str, ...], known: dict[str, str], bad: str, fit: tuple[str, ...], resolves: dict[str, str]
) -> None:
    resolves.update(known)
    assert fit_hosts([(host, 2) for host in hosts], bad=[bad]) == tuple((host, 2) for host in fit)


@pytest.mark.parametrize(
    ("hosts", "known"),
    [
        (ADDRESSES, {}),
        (("left", "right"), {"left": "10.0.0.1"}),
        (("n1.a", "n1.b"), {}),
        (("localhost", "right"), {"localhost": "127.0.0.1", "n1": "127.0.0.1"}),  # each is its own
    ],
)
def test_unfit_host_that_cannot_be_told_is_refused(
    hosts: tuple[str, ...], known: dict[str, str], resolves: dict[str, str], tmp_path: Path
) -> None:
    resolves.update(known)
    stated = tuple((host, 2) for host in hosts)
    told = r"^--hosts: [^\n]* n1: [^\n]*`hostname`[^\n]*$"
    with pytest.raises(LaunchOptionError, match=told):
        without(JobSpec(TRAIN, 2, hosts=stated), ["n1"])
    with pytest.raises(LaunchOptionError, match=told):
        write_hostfile(tmp_path / "good", stated, bad=["n1"])
    assert not (tmp_path / "good").exists()


MPIRUN = """#!/bin/sh
printf '%s\\n' "$*" >> "$CALLS"
while [ $# -gt 0 ]; do
  [ "$1" != --bad-nodes ] || printf "$BAD" > "$2"
  [ "$1" != preflight ] || code=$CODE
  shift
done
exit ${code:-0}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr("bigbatch.launch.launchers.mpirun.find_mpirun", lambda: str(tmp_path / "mpirun"))
    for name, value in (("CALLS", str(tmp_path / "calls")), ("BAD", ""), ("CODE", "0")):
        monkeypatch.setenv(name, value)
    return tmp_path / "calls"


HOSTS = ("--hosts", "n0:2,n1:2,n2:2", "--ranks", "4")


@pytest.mark.parametrize(
    ("choice", "code", "bad", "result", "hosts"),
    [
        ("warn", 0, "", 0, "n0:2,n1:2,n2:2"),
        ("stop", 0, "", 0, "n0:2,n1:2,n2:2"),
        ("exclude", 0, "", 0, "n0:2,n1:2,n2:2"),
        ("warn", 4, "n1\\n", 0, "n0:2,n1:2,n2:2"),
        ("exclude", 4, "n1\\n", 0, "n0:2,n2:2"),
        ("stop", 4, "n1\\n", 4, None),
        ("exclude", 4, "", 4, None),  # a pair, or the data: no host is to blame
        ("exclude", 1, "", 1, None),  # a rank did not come, and nobody knows from where
        ("exclude", 137, "n1\\n", 0, "n0:2,n2:2"),  # what hung there had to be killed
        ("exclude", 4, "n1\\nn2\\n", 1, None),  # too few are left
        ("exclude", 4, "n9\\n", 1, None),  # of which nobody knows which one it is
        ("warn", 1, "", 0, "n0:2,n1:2,n2:2"),
        ("warn", 137, "n1\\n", 0, "n0:2,n1:2,n2:2"),
    ],
)
def test_mpirun_looks_first(
    choice: str,
    code: int,
    bad: str,
    result: int,
    hosts: str | None,
    calls: Path,
    resolves: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CODE", str(code))
    monkeypatch.setenv("BAD", bad)
    assert main(["launch", "mpirun", *HOSTS, "--preflight", choice, "--", *TRAIN]) == result
    looked, *started = calls.read_text().splitlines()
    assert "-n 6 " in looked, "all slots are looked at"
    assert " preflight --config quickstart --bad-nodes " in looked
    if hosts is None:
        assert started == []
        assert "starting without" not in capsys.readouterr().err
    else:
        assert f"--host {hosts} " in started[0]
        assert "-n 4 " in started[0]
        assert started[0].endswith("-m bigbatch train --config quickstart")


@pytest.mark.parametrize("choice", ["warn", "stop", "exclude"])
@pytest.mark.parametrize("code", [0, 1, 4, 138])
def test_ctrl_c_while_it_looks_starts_nothing(
    choice: str, code: int, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun ends with 138 after the first one, with 1 after the second, or with the preflight's own code."""
    started = []

    def run_in_foreground(argv: list[str], **others: Any) -> Ended:
        started.append(argv)
        Path(argv[argv.index("--bad-nodes") + 1]).write_text("n1\n")
        return Ended(code, was_asked=True)

    monkeypatch.setattr("bigbatch.launch.launchers.mpirun.run_in_foreground", run_in_foreground)
    assert main(["launch", "mpirun", *HOSTS, "--preflight", choice, "--", *TRAIN]) == (code or 130)
    assert len(started) == 1


def test_hostfile_of_the_fit(calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODE", "4")
    monkeypatch.setenv("BAD", "n1\\n")
    good = tmp_path / "good"
    assert main(["launch", "preflight", *HOSTS, "--good-hosts", str(good), "--json", "x.json"]) == 4
    assert good.read_text() == "n0 slots=2\nn2 slots=2\n"
    assert " preflight --json x.json --bad-nodes " in calls.read_text()
    assert main(["launch", "preflight", "--good-hosts", str(good)]) == 1
    assert main(["launch", "preflight", "--nodes", "2", "--good-hosts", str(good)]) == 1


def test_preflight_dry_runs_show_both(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "mpirun", *HOSTS, "--preflight", "stop", "--dry-run", "--", *TRAIN]) == 0
    looked, started = capsys.readouterr().out.splitlines()
    assert " preflight --config quickstart" in looked
    assert started.endswith(" train --config quickstart")
    assert main(["launch", "preflight", "--nodes", "4", "--dry-run", "--", *TRAIN]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=4" in script
    assert "-m bigbatch preflight --config quickstart &" in script
    assert not calls.exists()


def test_preflight_is_refused_by_other_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "torchrun", "--preflight", "stop", "--", *TRAIN]) == 2
    assert "--preflight: bigbatch launch torchrun " in capsys.readouterr().err


def test_preflight_alone_excludes_nobody(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "preflight", *HOSTS, "--preflight", "exclude"]) == 1
    assert capsys.readouterr().err.startswith("bigbatch: --preflight: bigbatch launch preflight ")
    assert not calls.exists()


def test_preflight_that_wrote_nothing_blames_nobody() -> None:
    assert read_bad_nodes(Path("/no/such/file")) == []
