"""Shared by all tests: one thread per process, and either the tests of the CPU or those of the GPU.

Without BIGBATCH_EXPECT_GPU=1 no test sees a GPU, nor do the ranks and processes that it starts: on a machine with one
GPU two ranks could not have one each. With it only tests marked gpu run, and fail where there is none.
"""

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# before torch loads its OpenMP: tests run beside each other, and threads that spin while they wait for one that has no
# core take several times the work's CPU time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bigbatch.trainer.step.signals import STOP_SIGNALS

EXPECT_GPU = os.environ.get("BIGBATCH_EXPECT_GPU") == "1"
if not EXPECT_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch looks when it is first asked for one
os.environ["BIGBATCH_SITE_FILE"] = ""  # what this machine's say is not what is tested
os.environ.pop("PYTHONUNBUFFERED", None)  # print would write a line and its end apart, and lines of ranks be glued

collect_ignore = [] if "BIGBATCH_OPENREG" in os.environ else ["openreg"]

torch.set_num_threads(1)
gc.disable()  # until the tests are collected: modules and tests stay, and looking at them again takes seconds
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with & by a shell; every process of a test inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that mark no test gpu if only those run: most of a start, and packages that may be missing."""
    if not EXPECT_GPU or not collection_path.match("test_*.py"):
        return None
    marks_gpu = re.search(r"mark\.gpu|DEVICES", collection_path.read_text())
    return None if marks_gpu else True  # False would overrule --ignore


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other kind of machine, and mark each weekly test as a long one, which it is."""
    here, others = [], []
    for item in items:
        if item.get_closest_marker("weekly"):
            item.add_marker("long")
        is_of_gpu = item.get_closest_marker("gpu") is not None
        (here if is_of_gpu == EXPECT_GPU else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = here


def pytest_collection_finish() -> None:
    """Collect garbage from now on, without another look at the modules and tests that stay."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test marked gpu where a GPU was promised and there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.fail("BIGBATCH_EXPECT_GPU=1, but torch finds no CUDA device", pytrace=False)


@pytest.fixture(autouse=True)
def _stop_signals_as_before() -> Iterator[None]:
    """Put back the handlers that a run in this process takes, which would swallow the next test's Ctrl-C."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
