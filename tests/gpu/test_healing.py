"""Healing over NCCL: its groups are aborted, and new ones made in the same process."""

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import exit_codes

from bigbatch.comm.backends.in_flight import LateError
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import TIMEOUT_SECONDS, ForkedJob, alone, assert_identical, final_state, forked, run, train_command
from tests.parallel.test_healing import HEALING

pytestmark = pytest.mark.gpu


def test_nccl_is_aborted_while_the_gpu_works_and_connects_again() -> None:
    gpu = torch.device("cuda", 0)
    control = JobControl(ALONE, timeout_seconds=60)
    for _ in range(3):
        backend = TorchDistributedBackend(ALONE, control, library="nccl", device=gpu, heals=True)
        ones_N = torch.ones(1000, device=gpu)
        sum_ = partial(backend.all_reduce_, ones_N, backend.world)
        backend.submit(sum_, label="a sum").wait()
        assert ones_N.sum().item() == 1000
        torch.cuda._sleep(100_000_000)
        backend.submit(sum_, label="another sum")
        backend.abort()
        torch.cuda.synchronize()


def test_late_sum_over_nccl_is_abandoned_and_the_next_one_is_right() -> None:
    gpu = torch.device("cuda", 0)
    control = JobControl(ALONE, timeout_seconds=60)
    backend = TorchDistributedBackend(ALONE, control, library="nccl", device=gpu)
    backend.limit(0.2)
    work = backend.submit(lambda: torch.cuda._sleep(4_000_000_000), label="sum by hierarchical")
    with pytest.raises(LateError, match="hierarchical"):
        work.wait()
    backend.restart(num_missed=0)
    ones_N = torch.ones(1000, device=gpu)
    backend.submit(partial(backend.all_reduce_, ones_N, backend.world), label="a sum").wait()
    assert ones_N.sum().item() == 1000
    backend.close()


def test_other_ranks_continue_over_nccl_to_the_same_bits(tmp_path: Path) -> None:
    num_ranks = min(torch.cuda.device_count(), 4)
    if num_ranks < 3:
        pytest.skip("needs 3 GPUs: one rank alone has no NCCL group")
    write_dataset(tmp_path / "data", train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    run(alone(train_command(tmp_path / "data", tmp_path / "alone", HEALING)), RANK="0")
    settings = HEALING | {"comm.backend": "nccl", "comm.algorithm": "native"}
    command = train_command(tmp_path / "data", tmp_path / "run", settings)
    log = tmp_path / "log"
    job = ForkedJob(forked(command, ranks=num_ranks), log, DIE="1/5/sums")
    codes = exit_codes(job.ranks, timeout_seconds=TIMEOUT_SECONDS)
    assert codes == [0, -signal.SIGKILL, *[0] * (num_ranks - 2)], log.read_text()
    assert_identical(final_state(tmp_path / "run"), final_state(tmp_path / "alone"))
