"""Memory that is left to a job, by groups that are written down here."""

import os
from pathlib import Path

import pytest

from bigbatch.trainer.machine.cgroup import lies_in_memory, memory_left

GB = 10**9


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc"


def group(folder: Path, limit: object, usage: int, **stat: int) -> None:
    """Write a group; it is one of version 1 if the names of stat begin with total."""
    folder.mkdir(parents=True, exist_ok=True)
    is_first = any(name.startswith("total") for name in stat)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def test_memory_left_is_that_of_the_tightest_group_without_the_page_cache(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    group(groups / "slurm/job_7/step_0", "max", 30 * GB, inactive_file=0)
    group(groups / "slurm/job_7", 100 * GB, 95 * GB, inactive_file=40 * GB, active_file=10 * GB, shmem=20 * GB)
    group(groups / "slurm", 900 * GB, 500 * GB, inactive_file=0, active_file=0)
    assert memory_left(proc=proc, groups=groups) == (100 - (95 - 50)) * GB
    group(groups / "slurm/job_7/step_0", 40 * GB, 50 * GB, inactive_file=5 * GB)
    assert memory_left(proc=proc, groups=groups) == 0, "just lowered"


def test_memory_left_of_version_1(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("12:cpu,cpuacct:/x\n5:memory:/slurm/job_7\n1:name=systemd:/y\n0::/z\n")
    group(groups / "memory/slurm/job_7", 64 * GB, 20 * GB, total_inactive_file=3 * GB, total_active_file=1 * GB)
    group(groups / "memory", 9223372036854771712, 200 * GB, total_inactive_file=0)
    assert memory_left(proc=proc, groups=groups) == (64 - 20 + 4) * GB


@pytest.mark.parametrize("text", [None, "", "0::/\n", "0::/../other\n", "0::/gone\n"])
def test_memory_left_is_none_where_nothing_limits_it(proc: Path, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (proc / "self/cgroup").write_text(text)
    (tmp_path / "cgroup").mkdir()
    assert memory_left(proc=proc, groups=tmp_path / "cgroup") is None


@pytest.mark.parametrize(("kind", "stands"), [("tmpfs", True), ("ext4", False), ("fuse.tmpfs", False)])
def test_lies_in_memory_goes_by_the_mount(proc: Path, tmp_path: Path, kind: str, stands: bool) -> None:
    device = tmp_path.stat().st_dev
    other = f"22 1 0:9999 / / rw - {'ext4' if stands else 'tmpfs'} root rw\n"
    own = f"31 22 {os.major(device)}:{os.minor(device)} / /dev/shm rw,nosuid shared:4 - {kind} shm rw,size=1g\n"
    (proc / "self/mountinfo").write_text(other + own)
    assert lies_in_memory(tmp_path, proc=proc) is stands
    (proc / "self/mountinfo").unlink()
    assert not lies_in_memory(tmp_path, proc=proc)
