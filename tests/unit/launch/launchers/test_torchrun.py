"""The argument list of torchrun, word by word."""

import sys

import pytest

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.torchrun import torchrun_argv

TRAIN = ("train", "--config", "quickstart")


def test_torchrun_on_this_host() -> None:
    assert torchrun_argv(JobSpec(TRAIN, 4)) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("-m", "bigbatch", *TRAIN),
    ]


def test_torchrun_takes_no_hosts() -> None:
    with pytest.raises(LaunchOptionError, match="--hosts"):
        torchrun_argv(JobSpec(TRAIN, 4, hosts=(("n0", 4),)))
