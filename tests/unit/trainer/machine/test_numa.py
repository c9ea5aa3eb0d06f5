"""Cores for ranks: the choice as a table and by laws, the kernel's files from a made tree, and a real binding."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sample_images
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.trainer.machine import numa
from bigbatch.trainer.machine.numa import bind, choose_cores, parse_cores, pci_address, pci_node, read_nodes
from bigbatch.words import spans

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TWO = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}  # threads of one core have numbers far apart
FOUR = {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}
ALL = list(range(8))


@pytest.mark.parametrize(
    ("nodes", "usable", "gpu_node", "rank_of", "chosen"),
    [
        (TWO, ALL, 0, (0, 1), [0, 1, 4, 5]),
        (TWO, ALL, 1, (0, 8), [2, 3, 6, 7]),
        (TWO, [1, 2, 3, 4], 1, (0, 2), [2, 3]),
        (TWO, [0, 1], 1, (0, 2), [0, 1]),  # the launcher bound it elsewhere: not ours to undo
        (TWO, ALL, 7, (0, 2), ALL),
        ({**TWO, 2: []}, ALL, 2, (0, 2), ALL),  # memory alone
        ({0: [0, 1]}, [0, 1, 9], 0, (0, 1), [0, 1, 9]),
        ({}, ALL, None, (1, 2), ALL),
        (TWO, ALL, None, (0, 1), ALL),
        (TWO, ALL, None, (1, 2), [2, 3, 6, 7]),
        ({**TWO, 2: []}, ALL, None, (1, 2), [2, 3, 6, 7]),
        (TWO, ALL, None, (1, 3), [0, 1, 4, 5]),
        (TWO, ALL, None, (2, 3), [2, 3, 6, 7]),
        (FOUR, ALL, None, (0, 2), [0, 1, 2, 3]),
        (FOUR, ALL, None, (2, 3), [4, 5, 6, 7]),
        (FOUR, [7, 6, 0], None, (1, 2), [0, 6, 7]),
        (FOUR, [0, 1, 2, 3], None, (1, 4), [0, 1, 2, 3]),  # the other socket is for ranks 2 and 3
    ],
)
def test_numa_choice(nodes, usable, gpu_node, rank_of, chosen):
    rank, size = rank_of
    assert choose_cores(usable=usable, nodes=nodes, gpu_node=gpu_node, local_rank=rank, local_size=size) == chosen


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=32),
    usable=st.sets(st.integers(0, 40), min_size=1),
    gpu_node=st.none() | st.integers(0, 4),
    local_size=st.integers(1, 9),
)
def test_numa_no_rank_leaves_the_usable_cores_and_no_node_stays_idle(owners, usable, gpu_node, local_size):
    nodes = {node: [core for core, owner in enumerate(owners) if owner == node] for node in range(4)}
    chosen = [
        choose_cores(usable=sorted(usable), nodes=nodes, gpu_node=gpu_node, local_rank=rank, local_size=local_size)
        for rank in range(local_size)
    ]
    for cores in chosen:
        assert cores
        assert set(cores) <= usable
        assert cores == sorted(cores)
    if gpu_node is None:
        assert {core for cores in chosen for core in cores} >= usable & set(range(len(owners)))
        if not usable >= set(range(len(owners))):
            assert chosen == [sorted(usable)] * local_size


@given(st.sets(st.integers(0, 300)))
def test_numa_core_lists_are_read_and_written_back(cores):
    ones = ",".join(map(str, sorted(cores)))
    assert parse_cores(ones) == sorted(cores)
    assert parse_cores(spans(sorted(cores), between=",") + "\n") == sorted(cores)


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="needs Linux's sysfs")
def test_numa_this_machine_is_read_as_the_kernel_writes_it():
    nodes = read_nodes(Path("/sys"))
    for node, cores in nodes.items():
        assert spans(cores, between=",") == Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()


def sysfs(root, nodes, *, gpus=None):
    """gpus: PCI address -> what numa_node holds."""
    lists = {f"devices/system/node/node{node}/cpulist": f"{cores}\n" for node, cores in nodes.items()}
    cards = {f"bus/pci/devices/{address}/numa_node": f"{node}\n" for address, node in (gpus or {}).items()}
    noise = {"devices/system/node/online": "0-1\n", "devices/system/node/node_reclaim/cpulist": "?"}
    return sample_images.write(root, {name: text.encode() for name, text in {**lists, **cards, **noise}.items()})


def test_numa_files_of_the_kernel(tmp_path):
    root = sysfs(tmp_path, {0: "0-1", 1: "2-3", 10: ""}, gpus={"0000:3b:00.0": 1, "0001:ff:1f.0": -1})
    assert read_nodes(root) == {0: [0, 1], 1: [2, 3], 10: []}
    assert pci_node("0000:3b:00.0", sys_root=root) == 1
    assert pci_node("0001:ff:1f.0", sys_root=root) is None
    assert pci_node("0000:00:00.0", sys_root=root) is None
    assert read_nodes(tmp_path / "elsewhere") == {}


@pytest.fixture
def affinity(monkeypatch):
    """What this process may use, as if it were another machine's; bind changes it."""
    cores = set(ALL)

    def set_cores(pid, chosen):
        assert pid == 0
        cores.clear()
        cores.update(chosen)

    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda pid: set(cores), raising=False)
    monkeypatch.setattr(numa.os, "sched_setaffinity", set_cores, raising=False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=1),
    )
    return cores


@pytest.mark.parametrize(
    ("device", "nodes", "gpu_node", "line", "cores"),
    [
        (CUDA, {0: "0-3", 1: "4-7"}, 1, "bound to NUMA node 1: cores 4-7", {4, 5, 6, 7}),
        (CUDA, {0: "0-1,4-5", 1: "2-3,6-7"}, 0, "bound to NUMA node 0: cores 0-1,4-5", {0, 1, 4, 5}),
        (CUDA, {0: "0-3", 1: "4-7"}, -1, None, set(ALL)),
        (CUDA, {0: "0-7"}, 0, None, set(ALL)),
        (CPU, {0: "0-3", 1: "4-7"}, 1, "bound to NUMA node 0: cores 0-3", {0, 1, 2, 3}),
        (CPU, {n: f"{2 * n}-{2 * n + 1}" for n in range(4)}, 0, "bound to NUMA nodes 0-1: cores 0-3", {0, 1, 2, 3}),
        (CPU, {}, 0, None, set(ALL)),
    ],
)
def test_numa_bind(tmp_path, affinity, device, nodes, gpu_node, line, cores):
    root = sysfs(tmp_path, nodes, gpus={"0000:3b:01.0": gpu_node})
    assert bind(device=device, local_rank=0, local_size=2, sys_root=root) == line
    assert affinity == cores
    assert bind(device=device, local_rank=0, local_size=2, sys_root=root) is None or len(nodes) == 4
    assert affinity <= cores


def test_numa_a_system_without_binding_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delattr(numa.os, "sched_setaffinity", raising=False)
    assert bind(device=CPU, local_rank=0, local_size=2, sys_root=sysfs(tmp_path, {0: "0", 1: "1"})) is None


CHILD = """
import sys, threading
from pathlib import Path
from types import SimpleNamespace
from bigbatch.trainer.machine.numa import bind
assert "torch" not in sys.modules, "a rank without a GPU needs none of it"
print(bind(device=SimpleNamespace(type="cpu"), local_rank=1, local_size=2, sys_root=Path(sys.argv[1])))
def tell():
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    print(*(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")))
tell()
thread = threading.Thread(target=tell)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not Path("/proc/thread-self").exists(), reason="needs Linux")
def test_numa_a_process_and_its_later_threads_are_bound(tmp_path):
    """The kernel's own word for it. Two cores stand for two nodes."""
    first, *rest = sorted(numa.os.sched_getaffinity(0))
    if not rest:
        pytest.skip("needs two usable cores")
    second, *others = rest
    root = sysfs(tmp_path, {0: first, 1: ",".join(map(str, [second, *others]))})
    bound = spans([second, *others], between=",")
    done = subprocess.run([sys.executable, "-c", CHILD, root], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"bound to NUMA node 1: cores {bound}", bound, bound]


@pytest.mark.gpu
def test_numa_the_address_of_a_real_gpu_is_the_kernels():
    vendor = Path("/sys/bus/pci/devices", pci_address(CUDA), "vendor")
    assert vendor.read_text().strip() == "0x10de"
