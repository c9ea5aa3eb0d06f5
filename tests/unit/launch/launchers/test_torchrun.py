"""The argument list of torchrun, word by word."""

import argparse
import sys

import pytest
from torch.distributed.run import get_args_parser

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.torchrun import start, torchrun_argv

TRAIN = ("train", "--config", "quickstart")


def test_torchrun_on_this_host() -> None:
    assert torchrun_argv(JobSpec(TRAIN, 4)) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("-m", "bigbatch", *TRAIN),
    ]


def test_torchrun_takes_no_hosts() -> None:
    with pytest.raises(LaunchOptionError, match="--hosts"):
        torchrun_argv(JobSpec(TRAIN, 4, hosts=(("n0", 4),)))


@pytest.mark.parametrize("name", [("train.py",), ("-m", "my.train")])
@pytest.mark.parametrize("words", [(), ("--",), ("--", "--", "-x"), ("-x", "--", "y"), ("x", "--")])
def test_torchrun_hands_on_every_word_of_a_script(name: tuple[str, ...], words: tuple[str, ...]) -> None:
    """By torchrun's own parser."""
    argv = torchrun_argv(JobSpec((*name, *words), 2, is_python=True))
    read = get_args_parser().parse_args(argv[3:])
    assert (read.training_script, tuple(read.training_script_args), read.module) == (name[-1], words, len(name) == 2)


@pytest.mark.parametrize(("ranks", "stated", "threads"), [(2, {}, 1), (2, {"OMP_NUM_THREADS": "3"}, 3), (1, {}, 0)])
def test_torchrun_need_not_explain_how_many_threads_it_sets(ranks: int, stated: dict[str, str], threads: int) -> None:
    """It sets the same, unless the user has, with five lines of text."""
    argv = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ.get('OMP_NUM_THREADS', 0)))"]
    job = JobSpec(TRAIN, ranks)
    assert start(lambda job: argv, job, environ=stated, options=argparse.Namespace()) == threads
