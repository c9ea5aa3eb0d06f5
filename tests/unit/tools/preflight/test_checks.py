"""What a host must have by itself: each check on a host that has it and on one that lacks it, and the table of docs."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from host_tree import add_card, add_gpu_on_bus, add_limits, add_port, write

from bigbatch.tools.preflight import facts
from bigbatch.tools.preflight.checks import CHECKS, Host, describe_hardware, find_troubles, links_are_broken
from bigbatch.tools.preflight.facts import RankGpu, foreign_processes, host_fields, query_host
from bigbatch.trainer.machine.limits import Limits
from bigbatch.trainer.machine.network import Card, Port
from bigbatch.trainer.machine.nvidia import Driver, NvLinks

ROOT = Path(__file__).resolve().parents[4]
HEALTHY = {
    "uuid": "GPU-a",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "ecc.errors.uncorrected.volatile.total": "0",
    "mig.mode.current": "Disabled",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "0",
}
INFINIBAND = Port("mlx5_0/1", "ACTIVE", "LinkUp", 400.0, "InfiniBand", has_routable_gid=False)
ROCE = Port("mlx5_1/1", "ACTIVE", "LinkUp", 400.0, "Ethernet", has_routable_gid=True)
DOWN = replace(INFINIBAND, name="mlx5_2/1", state="DOWN", physical="Disabled")
RAILS = tuple(replace(INFINIBAND, name=f"mlx5_{index}/1") for index in range(3, 10))
"""All but one of a node with a port for each of its 8 GPUs."""
STORAGE = (*(replace(ROCE, name=f"mlx5_1{index}/1") for index in range(3)), replace(DOWN, link_layer="Ethernet"))
"""Three of four Ethernet ports."""
GPUS = Host(
    num_ranks=8,
    world_size=64,
    on_gpus=True,
    own_gpus=("GPU-a",),
    limits=Limits(inf, 1024, 524288, 100_000, 1e12, 64),
    cards=(Card("eth1", 100.0, 9000), Card("eth0", 1.0, 1500)),
    ports=(INFINIBAND, replace(INFINIBAND, name="mlx5_9/1")),
    interface="eth0",
    driver=Driver(gpus=("H100",), health={"GPU-a": HEALTHY}, links={0: NvLinks(18, 0), 1: NvLinks(18, 0)}),
    gpus_on_bus=8,
    has_gpudirect=True,
    link_gbit_per_second=350.0,
)
CPUS = replace(GPUS, on_gpus=False, own_gpus=("",), ports=(), gpus_on_bus=0, driver=Driver(), link_gbit_per_second=9.0)


def gpus(**changes: Any) -> Host:
    return replace(GPUS, **changes)


def cpus(**changes: Any) -> Host:
    return replace(CPUS, **changes)


def limited(**limits: float) -> Host:
    return gpus(limits=replace(GPUS.limits, **limits))


def healthy_but(*, own: str = "GPU-a", **changes: str) -> Host:
    """A host with a GPU of that health; own: the UUID that its rank sees."""
    names = {name.replace(".", "_"): name for name in HEALTHY}
    row = HEALTHY | {names[name]: value for name, value in changes.items()}
    return gpus(own_gpus=(own,), driver=Driver(gpus=("H100",), health={"GPU-a": row}))


@pytest.mark.parametrize(
    "host",
    [
        *(GPUS, CPUS, Host(), gpus(ports=(ROCE,))),
        gpus(driver=Driver(health={"GPU-b": HEALTHY | {"ecc.errors.uncorrected.volatile.total": "9"}})),
        gpus(driver=Driver(links={0: NvLinks(0, 4), 1: NvLinks(4, 0)})),  # a bridge joins two of the GPUs
        healthy_but(**{name.replace(".", "_"): "[N/A]" for name in HEALTHY if name != "uuid"}),
        cpus(driver=Driver(complaint="it failed")),  # the program is there, and no GPU
        cpus(gpus_on_bus=8, wants_gpus=False, driver=Driver(complaint="it failed")),  # --device cpu
        cpus(limits=Limits(locked_bytes=65536), ports=(INFINIBAND, DOWN)),  # TCP needs none of them
        # nothing leaves the node
        replace(limited(locked_bytes=8 << 20), world_size=8, ports=(ROCE,), has_gpudirect=False),
        gpus(world_size=8, ports=(DOWN,), link_gbit_per_second=None),
        replace(healthy_but(mig_mode_current="Enabled"), world_size=1, num_ranks=1),  # one rank, one slice
        replace(healthy_but(mig_mode_current="Enabled"), may_share_gpus=True),  # NCCL connects slices
        cpus(link_gbit_per_second=0.94, is_interface_stated=True),  # on the card of 1 Gbit/s by choice
        cpus(link_gbit_per_second=0.1, cards=()),  # a virtual network, which states no rate
        cpus(link_gbit_per_second=0.1, interface="ib0", is_interface_stated=True),  # and no rate is known
        gpus(link_gbit_per_second=None),  # one node alone
        gpus(errors={"mlx5_0/1 link_downed": 3.0}, errors_after={"mlx5_0/1 link_downed": 3.0}),
    ],
)
def test_healthy_host_has_no_trouble(host: Host) -> None:
    assert find_troubles(host) == {}


SLOW = replace(INFINIBAND, name="mlx5_3/1", gbit_per_second=100.0)
UNROUTED = replace(ROCE, has_routable_gid=False)
NO_PORT = "no InfiniBand or RoCE port carries data (mlx5_{}): gradients go over TCP"
BY_HOST = "nvidia_peermem is not loaded, nor is dmabuf possible: gradients go through host memory"
LINKS = Driver(links={0: NvLinks(18, 0), 1: NvLinks(17, 1)})
RISEN = {"errors": {"mlx5_0/1 symbol_error": 5.0}, "errors_after": {"mlx5_0/1 symbol_error": 42.0}}
TROUBLES = (
    ("driver", gpus(driver=Driver(complaint="GPU is lost")), "nvidia-smi: GPU is lost"),
    ("driver", gpus(gpus_on_bus=0, driver=Driver(complaint="GPU is lost")), "nvidia-smi: GPU is lost"),
    ("driver", cpus(gpus_on_bus=8, driver=Driver(complaint="mismatch")), "nvidia-smi: mismatch"),
    (
        "driver version",
        gpus(driver=Driver(gpus=("H100, 520.61.05, 1980",)), torch_cuda="12.6"),
        "520.61.05 is below 525",
    ),
    ("unseen GPUs", cpus(gpus_on_bus=8), "8 NVIDIA GPUs on the PCI bus, and its ranks compute on the CPU"),
    ("foreign processes", gpus(foreign={4711: "GPU-a"}), "process 4711, which is not of this job, uses GPU-a"),
    ("ECC", healthy_but(ecc_errors_uncorrected_volatile_total="2"), "GPU-a: 2 uncorrected memory errors"),
    ("row remapping", healthy_but(remapped_rows_failure="1"), "GPU-a: a row of its memory could not be remapped"),
    ("pending rows", healthy_but(remapped_rows_pending="Yes"), "GPU-a: a row of its memory waits to be remapped"),
    ("MIG", healthy_but(mig_mode_current="Enabled"), "GPU-a: MIG is enabled"),
    ("MIG", healthy_but(own="GPU-slice", mig_mode_current="Enabled"), "GPU-a: MIG is enabled"),
    ("PCIe width", healthy_but(pcie_link_width_current="8"), "GPU-a: x8 of x16 PCIe lanes"),
    ("NVLink", gpus(driver=LINKS), "GPU 1: 17 active NVLinks, another GPU has 18"),
    ("Xid", gpus(xids={"Xid 79 of 0000:3b:00": 2}), "Xid 79 of 0000:3b:00, 2 times since the host started"),
    ("RDMA ports", gpus(ports=(DOWN,)), NO_PORT.format("2/1 DOWN (Disabled)")),
    ("RDMA ports", gpus(ports=(UNROUTED,)), NO_PORT.format("1/1 ACTIVE (LinkUp)")),
    ("RDMA devices", gpus(has_rdma_devices=False), "2 RDMA ports, and no device in /dev/infiniband"),
    (
        "lost rails",
        gpus(ports=(*RAILS, DOWN)),
        "mlx5_2/1 is DOWN (Disabled): 7 ports for 8 GPUs, which 8 would serve evenly",
    ),
    ("lost rails", gpus(ports=STORAGE), "3 ports for 8 GPUs, which 4 would serve evenly"),
    ("lost rails", gpus(ports=(*RAILS[:3], DOWN)), "3 ports for 8 GPUs, which 4 would serve evenly"),
    ("idle ports", gpus(ports=(INFINIBAND, DOWN)), "mlx5_2/1 is DOWN (Disabled)"),
    # free by intention, or of another network: as many ports more would not serve the GPUs evenly
    ("idle ports", gpus(ports=(*RAILS, INFINIBAND, DOWN)), "mlx5_2/1 is DOWN (Disabled)"),
    ("idle ports", gpus(ports=(*RAILS, replace(DOWN, link_layer="Ethernet"))), "mlx5_2/1 is DOWN (Disabled)"),
    ("idle ports", gpus(ports=(*RAILS, INFINIBAND, *STORAGE)), "mlx5_2/1 is DOWN (Disabled)"),
    ("idle ports", gpus(ports=(*RAILS, DOWN), are_ports_stated=True), "mlx5_2/1 is DOWN (Disabled)"),
    ("idle ports", gpus(ports=(*RAILS, DOWN), num_ranks=4), "mlx5_2/1 is DOWN (Disabled)"),  # half of the GPUs
    ("port rates", gpus(ports=(*GPUS.ports, SLOW, ROCE)), "mlx5_3/1 runs at 100 Gbit/s, most InfiniBand ports at 400"),
    ("GIDs", gpus(ports=(INFINIBAND, UNROUTED)), "mlx5_1/1 has no RoCE v2 address"),
    ("port errors", gpus(**RISEN), "mlx5_0/1 symbol_error rose by 37 while links were measured"),
    ("GPUDirect", gpus(has_gpudirect=False), BY_HOST),
    ("locked memory", limited(locked_bytes=8 << 20), "a rank may lock 8,192 KiB, below 1,048,576"),
    # TCP on the Ethernet card, where RDMA has 400; ranks use eth0, and eth1 has 100; a card of 1 Gbit/s at a tenth
    (
        "bandwidth",
        cpus(link_gbit_per_second=4.0, cards=(), stated_gbit_per_second=10.0),
        "4.00 Gbit/s, below 5: --link-gbit states 10",
    ),
    ("bandwidth", gpus(link_gbit_per_second=23.0), "23.00 Gbit/s, below 200: its 2 RDMA ports have 400"),
    ("bandwidth", cpus(link_gbit_per_second=0.94), "0.94 Gbit/s, below 1.5: eth1 has 100, and ranks use eth0"),
    ("bandwidth", cpus(link_gbit_per_second=0.09, is_interface_stated=True), "0.09 Gbit/s, below 0.5: eth0 has 1"),
    ("open files", limited(open_files=256), "a rank may open 256 files, below 1,024"),
    ("open files", replace(limited(max_open_files=4096), world_size=2048), "4,096 open files at most, below 9,216"),
    ("threads", limited(tasks=1000), "1,000 more threads may start, below 256 for each of 8 ranks"),
    ("memory", limited(memory_bytes=4e9), "4.0 GB of memory left, below 8 for 8 ranks"),
    ("cores", limited(cores=2.5), "2.5 cores for 8 ranks"),
)
"""Check, a host that it speaks of, and what it says."""


@pytest.mark.parametrize(("name", "host", "told"), TROUBLES)
def test_trouble_is_told(name: str, host: Host, told: str) -> None:
    ((found, (text,)),) = find_troubles(host).items()
    assert found == name
    assert told in text
    (check,) = [check for check in CHECKS if check.name == name]
    assert links_are_broken(host) is check.breaks_links


def test_every_check_has_a_trouble_here() -> None:
    assert {name for name, *_ in TROUBLES} == {check.name for check in CHECKS}


def test_page_shows_the_checks_in_order() -> None:
    page = (ROOT / "docs/preflight.md").read_text().splitlines()
    first = page.index("| each node alone | reported as |") + 2
    rows = [row.split(" | ") for row in page[first : page.index("", first)]]
    shown = [told.partition(":")[0] for _, told in rows]
    assert shown == ["finding" if check.is_finding else "remark" for check in CHECKS]


def test_hardware_that_all_hosts_need_the_same_of() -> None:
    ports = (*GPUS.ports, replace(INFINIBAND, name="a/1", gbit_per_second=100.0), DOWN)
    assert describe_hardware(replace(GPUS, ports=ports)) == {
        "RDMA ports": "1 of 100 Gbit/s, 2 of 400 Gbit/s",
        "PCIe lanes": "16",
        "NVLinks": "18",
    }
    assert describe_hardware(CPUS) == {}
    assert describe_hardware(Host(on_gpus=True)) == {}


# --- reading ---


def test_process_of_another_job_is_told_from_ranks(tmp_path: Path) -> None:
    """Numbers that no process here has are those of another container."""
    for number, name in ((11, "python"), (12, "python"), (13, "nvidia-cuda-mps"), (14, "python")):
        write(tmp_path, f"proc/{number}/comm", name)
    rows = [{"pid": str(number), "gpu_uuid": "GPU-a"} for number in (11, 12, 13, 15)]
    rows += [{"pid": "14", "gpu_uuid": "GPU-z"}, {"pid": "[N/A]", "gpu_uuid": "GPU-a"}]
    assert foreign_processes(rows, [RankGpu("n0", 11, "GPU-a")], root=tmp_path) == {12: "GPU-a"}


def test_looking_fills_in_what_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "query_driver", lambda: Driver(gpus=("H100",)))
    monkeypatch.setattr(facts, "torch_cuda", lambda: "12.6")
    monkeypatch.setattr(facts, "interface_of", {"10.0.0.1": "eth0"}.get)
    add_card(tmp_path, "eth0", 1000)
    add_port(tmp_path, "mlx5_0/1")
    add_gpu_on_bus(tmp_path, "0000:3b:00.0")
    add_limits(tmp_path, locked=65536)
    asked = Host(world_size=2, on_gpus=True, own_gpus=("GPU-a",))
    host = query_host(asked, gpus=[], address="10.0.0.1", root=tmp_path)()
    errors = {f"mlx5_0/1 {name}": 0.0 for name in ("symbol_error", "link_downed", "port_rcv_errors")}
    assert host == replace(
        asked,
        limits=Limits(locked_bytes=65536, open_files=1024, max_open_files=524288),
        cards=(Card("eth0", 1.0, 1500),),
        ports=(INFINIBAND,),
        interface="eth0",
        driver=Driver(gpus=("H100",)),
        gpus_on_bus=1,
        has_rdma_devices=False,
        torch_cuda="12.6",
        errors=errors,
    )
    assert links_are_broken(host)
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", 1)
    told = host_fields(host, links={"n1": 1.25e8, "n2": 2.5e9}, root=tmp_path)
    assert told["network"] == {"eth0": "1 Gbit/s, MTU 1500", "mlx5_0/1": "400 Gbit/s InfiniBand, ACTIVE"}
    assert told["hardware"] == {"RDMA ports": "1 of 400 Gbit/s"}
    assert set(told["troubles"]) == {"locked memory", "RDMA devices", "GPUDirect", "bandwidth", "port errors"}
    assert told["troubles"]["bandwidth"][0].startswith("its best link carries 20.00 Gbit/s, below 200: ")


def test_emulated_nodes_have_no_network_hardware(tmp_path: Path) -> None:
    add_card(tmp_path, "eth0", 1000)
    add_port(tmp_path, "mlx5_0/1")
    asked = Host(shares_machine=True, wants_gpus=False)
    assert query_host(asked, gpus=[], address="10.0.0.1", root=tmp_path)().cards == ()
    assert query_host(asked, gpus=[], address="10.0.0.1", root=tmp_path)().ports == ()


def test_driver_that_nothing_ends_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(facts, "DRIVER_SECONDS", 0.1)
    monkeypatch.setattr(facts, "torch_cuda", str)
    monkeypatch.setattr(facts, "query_driver", lambda: end.wait(20) and Driver())
    host = query_host(Host(), gpus=[], address="10.0.0.1", root=tmp_path)()
    end.set()
    assert host == Host(driver=Driver(complaint="no answer within 0.1 s"), has_rdma_devices=False)


def odd_texts(seed: int) -> Iterator[str]:
    """Texts that no kernel writes: numbers without an end, letters of all kinds, lines, colons, nothing."""
    draw = random.Random(seed)
    letters = "0123456789-:., \t\n/maxGb\x00\x1b\xff²٣é{}%"
    while True:
        yield "".join(draw.choice(letters) for _ in range(draw.choice((0, 1, 3, 10, 200))))


@pytest.mark.parametrize("seed", range(20))
def test_files_of_any_content_are_read_and_judged(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_card(tmp_path, "eth0", 1000)
    add_card(tmp_path, "bond0", 1000, below="eth0")
    add_port(tmp_path, "mlx5_0/1", layer="Ethernet", gids=(("0::1", "RoCE v2"),))
    add_gpu_on_bus(tmp_path, "0000:3b:00.0")
    add_limits(tmp_path)
    for path in ("proc/self/cgroup", "proc/self/status", "proc/modules", "proc/sys/kernel/osrelease", "dev/kmsg"):
        write(tmp_path, path, "")
    for name in ("memory.max", "memory.stat", "pids.max", "pids.current", "cpu.max", "cpuset.cpus.effective"):
        write(tmp_path, f"sys/fs/cgroup/{name}", "")
    texts = odd_texts(seed)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            path.write_text(next(texts), encoding="latin-1", errors="replace")
    if seed % 2:
        write(tmp_path, "proc/self/cgroup", "0::/")
    asked = Host(num_ranks=2, on_gpus=True, own_gpus=("GPU-a",))
    raised = []
    monkeypatch.setattr("threading.excepthook", raised.append)
    monkeypatch.setattr(facts, "query_driver", Driver)
    host = query_host(asked, gpus=[], address="10.0.0.1", root=tmp_path)()
    told = host_fields(host, links={"n1": 1.0}, root=tmp_path)
    assert raised == []
    assert all("\n" not in text for texts_of in told["troubles"].values() for text in texts_of)
