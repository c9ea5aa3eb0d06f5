"""Limits of a process and its job, and the memory that is left to it, as made-up files state them."""

import os
from math import inf
from pathlib import Path

import pytest
from host_tree import add_limits, write

from bigbatch.trainer.machine.kernel_files import leading_number, read_line
from bigbatch.trainer.machine.limits import Limits, lies_in_memory, memory_left, read_limits


def test_limits_of_a_process(tmp_path: Path) -> None:
    add_limits(tmp_path, locked=8388608, files=(1024, 4096))
    write(tmp_path, "proc/self/status", "Name:\tpython\nCapEff:\t00000000a80425fb")  # a container's: without IPC_LOCK
    assert read_limits(tmp_path) == Limits(locked_bytes=8 << 20, open_files=1024, max_open_files=4096)
    add_limits(tmp_path, files=("unlimited", "unlimited"))
    assert read_limits(tmp_path) == Limits()


def test_who_may_lock_memory_has_no_limit_of_it(tmp_path: Path) -> None:
    """CAP_IPC_LOCK is 14, so 0x4000 (capability(7))."""
    add_limits(tmp_path, locked=65536)
    write(tmp_path, "proc/self/status", "CapEff:\t0000000000004000")
    assert read_limits(tmp_path).locked_bytes == inf
    write(tmp_path, "proc/self/status", "CapEff:\t000001ffffffbfff")
    assert read_limits(tmp_path).locked_bytes == 65536


def test_limits_of_control_groups(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job_7/step_0")
    folder = "sys/fs/cgroup/job_7"
    write(tmp_path, f"{folder}/step_0/pids.max", "max")
    write(tmp_path, f"{folder}/step_0/pids.current", 50)
    write(tmp_path, f"{folder}/pids.max", 4096)
    write(tmp_path, f"{folder}/pids.current", 96)
    write(tmp_path, f"{folder}/step_0/cpu.max", "max 100000")
    write(tmp_path, f"{folder}/step_0/cpuset.cpus.effective", "0-5,8")
    assert read_limits(tmp_path) == Limits(tasks=4000, cores=7)
    write(tmp_path, f"{folder}/cpu.max", "250000 100000")
    assert read_limits(tmp_path) == Limits(tasks=4000, cores=2.5)


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:pids:/j\n3:cpuset:/j\n2:cpu,cpuacct:/j\n0::/")
    groups = "sys/fs/cgroup"
    for name, value in (("pids.max", 100), ("pids.current", 130)):
        write(tmp_path, f"{groups}/pids/j/{name}", value)
    write(tmp_path, f"{groups}/cpuset/j/cpuset.cpus", "4-7")
    for name, value in (("cpu.cfs_quota_us", -1), ("cpu.cfs_period_us", 100000)):
        write(tmp_path, f"{groups}/cpu/j/{name}", value)
    assert read_limits(tmp_path) == Limits(tasks=0, cores=4)
    write(tmp_path, f"{groups}/cpu/j/cpu.cfs_quota_us", 150000)
    assert read_limits(tmp_path).cores == 1.5


def test_no_file_is_no_limit(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == Limits()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("100 Gb/sec (4X EDR)", 100), ("2.5 Gb/sec", 2.5), ("-1", -1), ("0", 0)),
        *((text, None) for text in ("max", "", "[N/A]", "9" * 400, "inf", "nan", "1e400", "--1", ".", "-", "²", "٣")),
    ],
)
def test_number_at_the_beginning_is_finite_and_decimal(text: str, number: float | None) -> None:
    assert leading_number(text) == number


def test_line_has_no_more_than_can_be_printed(tmp_path: Path) -> None:
    write(tmp_path, "state", "4: \x1b[31mACTIVE\nmore")
    assert read_line(tmp_path / "state") == "4: [31mACTIVE"
    assert read_line(tmp_path / "none") == ""
    assert read_line(tmp_path / "a\0b") == ""


# --- memory ---

GB = 10**9


def group(root: Path, name: str, limit: object, usage: int, **stat: int) -> None:
    """Write a group; it is one of version 1 if the names of stat begin with total."""
    is_first = any(each.startswith("total") for each in stat)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
    texts = (limit, usage, "\n".join(f"{each} {value}" for each, value in stat.items()))
    for file, text in zip((*names, "memory.stat"), texts, strict=True):
        write(root, f"sys/fs/cgroup/{name}/{file}", text)


def test_memory_left_is_that_of_the_tightest_group_without_the_page_cache(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/slurm/job_7/step_0")
    group(tmp_path, "slurm/job_7/step_0", "max", 30 * GB, inactive_file=0)
    group(tmp_path, "slurm/job_7", 100 * GB, 95 * GB, inactive_file=40 * GB, active_file=10 * GB, shmem=20 * GB)
    group(tmp_path, "slurm", 900 * GB, 500 * GB, inactive_file=0, active_file=0)
    assert memory_left(tmp_path) == (100 - (95 - 50)) * GB
    group(tmp_path, "slurm/job_7/step_0", 40 * GB, 50 * GB, inactive_file=5 * GB)
    assert memory_left(tmp_path) == 0, "just lowered"


def test_memory_left_of_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "12:cpu,cpuacct:/x\n5:memory:/slurm/job_7\n1:name=systemd:/y\n0::/z")
    group(tmp_path, "memory/slurm/job_7", 64 * GB, 20 * GB, total_inactive_file=3 * GB, total_active_file=1 * GB)
    group(tmp_path, "memory", 9223372036854771712, 200 * GB, total_inactive_file=0)
    assert memory_left(tmp_path) == (64 - 20 + 4) * GB


@pytest.mark.parametrize("text", ["", "0::/", "0::/../other", "0::/gone"])
def test_memory_left_is_infinite_where_nothing_limits_it(text: str, tmp_path: Path) -> None:
    assert memory_left(tmp_path) == inf
    write(tmp_path, "proc/self/cgroup", text)
    assert memory_left(tmp_path) == inf


@pytest.mark.parametrize(("kind", "stands"), [("tmpfs", True), ("ext4", False), ("fuse.tmpfs", False)])
def test_lies_in_memory_goes_by_the_mount(kind: str, stands: bool, tmp_path: Path) -> None:
    assert not lies_in_memory(tmp_path, root=tmp_path)
    device = tmp_path.stat().st_dev
    other = f"22 1 0:9999 / / rw - {'ext4' if stands else 'tmpfs'} root rw"
    own = f"31 22 {os.major(device)}:{os.minor(device)} / /dev/shm rw,nosuid shared:4 - {kind} shm rw,size=1g"
    write(tmp_path, "proc/self/mountinfo", f"{other}\n{own}")
    assert lies_in_memory(tmp_path, root=tmp_path) is stands
