"""Loop, loader and staging on torch's openreg device: a process that reads its memory on the host ends at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_ranks import exit_codes, places, start_rank
from openreg_gpu import DEVICE, FOLDER, Locked, play_gpu

from bigbatch.comm.backends.host_staging import HostStaging
from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue, behind_kernels
from bigbatch.errors import CommError
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.prepare_batch import on_device


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    """What is locked for the GPU, which openreg is."""
    return play_gpu(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images of shapes."""
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=8, val_per_class=1)
    return root


def explain(label: str, seconds: float, error: Exception) -> CommError:
    """Say what failed."""
    return CommError(f"{label}: {error}")


def test_the_host_cannot_read_the_device() -> None:
    """Else nothing here would show anything."""
    code = (
        f"import ctypes, sys, torch; sys.path = {sys.path}; from openreg_gpu import DEVICE; "
        "ctypes.string_at(torch.ones(3, device=DEVICE).data_ptr())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode < 0, "no signal ended it"


def test_staging_brings_there_and_back_on_a_thread(locked: Locked) -> None:
    staging = HostStaging(DEVICE)
    host_N, device_N = torch.zeros(1000), torch.arange(1000.0, device=DEVICE)
    staging.pin(host_N)
    staging.pin(host_N[10:])
    ready = staging.ready()

    def there_and_back() -> None:
        staging.fetch(host_N, device_N, ready=ready)
        staging.copy_back(device_N, host_N.mul_(2))

    queue = ThreadQueue(explain, while_waiting=lambda label, seconds: None)
    queue.submit(there_and_back, label="copies").wait()
    staging.join()
    queue.close()
    assert torch.equal(device_N.cpu(), 2 * torch.arange(1000.0))
    assert locked.count == 1
    staging.unpin(host_N)
    assert not locked.addresses


def test_an_operation_behind_kernels_runs_on_its_own_device(locked: Locked) -> None:
    device_N, seen = torch.ones(3, device=DEVICE), []

    def operation() -> None:
        seen.append(torch.cuda.current_device())
        device_N.mul_(2)

    queue = ThreadQueue(explain, while_waiting=lambda label, seconds: None)
    queue.submit(behind_kernels(operation, DEVICE), label="a sum").wait()
    queue.close()
    assert seen == [DEVICE.index]
    assert device_N.tolist() == [2.0] * 3


def test_a_stream_queue_counts_what_the_device_has_done(locked: Locked) -> None:
    queue, sum_N, streams = StreamQueue(DEVICE), torch.zeros(4, device=DEVICE), []

    def operation() -> None:
        streams.append(torch.cuda.current_stream(DEVICE))
        sum_N.add_(1)

    before = torch.cuda.current_stream(DEVICE)
    for number in range(3):
        queue.submit(operation, label=f"buffer {number}").wait()
    queue.close()
    assert queue.oldest() is None
    assert sum_N.tolist() == [3.0] * 4
    assert set(streams) == {queue._stream} != {before}
    assert torch.cuda.current_stream(DEVICE) == before


def test_a_table_of_the_host_comes_to_the_device(locked: Locked) -> None:
    assert on_device(torch.arange(5).numpy(), DEVICE).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("setting", "rounding"),
    [
        ("precision=fp32", 1e-5),  # on a CPU LARS takes weights in other portions
        ("precision=bf16", 0.0),
        ("sharded=true", 0.0),
    ],
)
def test_training_gives_the_weights_of_the_cpu(
    num_ranks: int, setting: str, rounding: float, data: Path, tmp_path: Path
) -> None:
    """A process a rank, images that a loader decodes into locked memory, sums over tcp by way of the host."""
    log, here = tmp_path / "log", {FOLDER: os.environ[FOLDER]}
    arguments = [str(data), str(rounding), f"--optimizer.{setting}"]
    ranks = [
        start_rank("openreg_ranks:train_beside_the_cpu", arguments, environ=place | here, stdout=log, stderr=log)
        for place in places(num_ranks)
    ]
    assert exit_codes(ranks, timeout_seconds=280) == [0] * num_ranks, log.read_text()
