"""What a rank's process takes of its host."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_training import TINY

from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.trainer import train
from bigbatch.trainer.machine import host

HERE = "here [0, 1, 2, 3]"


@pytest.mark.parametrize(
    ("others", "is_reproducible", "stated", "threads"),
    [
        ([], False, None, 4),  # alone on four cores
        ([HERE], False, None, 2),  # one more rank on the same cores
        ([HERE] * 7, False, None, 1),  # more ranks than cores
        (["here [4, 5, 6, 7]"], False, None, 4),  # bound to other cores
        (["there [0, 1, 2, 3]"] * 3, False, None, 4),  # on other machines
        ([], False, 3, 3),
        ([], True, None, 1),
        ([], True, 2, 2),
    ],
)
def test_threads_are_stated_or_the_share_of_the_cores_or_one_for_the_same_bits(
    others: list[str], is_reproducible: bool, stated: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    asked: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", asked.append)
    monkeypatch.setattr(host, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(host, "boot_id", lambda: "here")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "")
    env = SimpleNamespace(host="a pod of it")
    connection = SimpleNamespace(gather=lambda text: [text, *others], env=env)
    communicator = SimpleNamespace(device=torch.device("cpu"), connection=connection)
    host.set_up_process(communicator, cudnn_benchmark=True, is_reproducible=is_reproducible, cpu_threads=stated)
    assert chosen == [threads]
    assert asked == [2] * is_reproducible


@pytest.mark.long
@pytest.mark.parametrize("is_reproducible", [False, True])
def test_host_a_run_does_not_import_the_compiler(is_reproducible: bool, tmp_path: Path) -> None:
    """Nor where it saves and resumes: in a process of its own, as others' imports are here already."""
    settings = TINY | {"run.reproducible": is_reproducible, "run.directory": str(tmp_path / "run")}
    settings |= {"schedule.warmup_epochs": 0}
    words = ["train", "--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items())]
    script = (
        "import sys, bigbatch; from bigbatch.cli import main\n"
        f"codes = [main({words!r} + [f'--run.epochs={{epochs}}']) for epochs in (1, 2)]\n"
        f"bigbatch.train('quickstart', {settings | {'run.epochs': 3}}, quiet=True)\n"
        "print(codes, [name for name in sys.modules if name.startswith(('torch._dynamo', 'torch._inductor'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[0, 0] []"], done.stdout + done.stderr


class PlayedDriver:
    """The part of libcuda that says whether CUDA has started: cuda.h's codes of cuDeviceGetCount."""

    def __init__(self, *, has_started: bool) -> None:
        self.cuDeviceGetCount = lambda count: 0 if has_started else 3


@pytest.mark.parametrize(
    ("local_rank", "count", "has_started", "listed"),
    [
        (3, 4, False, "3,0,1,2"),
        (1, 8, False, "1,2,3,0,4,5,6,7"),  # NVML may count GPUs that CUDA lacks, at the first of which its list ends
        (3, 4, True, None),  # CUDA reads the list once
        (3, 1, False, None),  # the launcher has bound the rank
        (3, 0, False, None),
    ],
)
def test_own_gpu_is_listed_first_before_cuda_starts(
    local_rank: int, count: int, has_started: bool, listed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then each rank of a host uses device 0, by which torch's compiler names the code that they share."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # restored afterwards
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("BIGBATCH_GPUS_LISTED", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: PlayedDriver(has_started=has_started))
    env = ProcessEnv("openmpi", local_rank, 4, local_rank, 4, "here", None)
    for _ in range(2):  # the second time it is listed already
        host.list_own_gpu_first(env, backend="auto")
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == listed


def test_a_rank_lists_its_gpu_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []

    def stop(config: object, env: ProcessEnv) -> None:
        steps.append("joins")
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "list_own_gpu_first", lambda env, *, backend: steps.append((env.local_rank, backend)))
    monkeypatch.setattr(train, "join", stop)
    monkeypatch.setattr(train, "skip_compiler_import", lambda: None)
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(KeyboardInterrupt):
        train.main(["--config", "quickstart"])
    assert steps == [(3, "auto"), "joins"]


def test_gpus_of_a_rank_on_the_cpu_and_without_a_driver_stay_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    env = ProcessEnv("openmpi", 3, 4, 3, 4, "here", None)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: PlayedDriver(has_started=False))
    host.list_own_gpu_first(replace(env, keeps_to_cpu=True), backend="auto")
    host.list_own_gpu_first(env, backend="mpi")  # Open MPI compares the indices of two ranks' GPUs
    monkeypatch.setattr(host.ctypes, "CDLL", missing)
    host.list_own_gpu_first(env, backend="auto")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("amx_bf16 amx_tile", True), ("avx512_bf16x", False)],
)
def test_a_cpu_that_multiplies_bfloat16_is_known_by_its_flags(flags: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert host.has_cpu_bf16(tmp_path / "cpuinfo") is expected
    assert not host.has_cpu_bf16(tmp_path / "none")
