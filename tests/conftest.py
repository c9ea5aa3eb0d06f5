"""Shared by all tests: one thread per process, and tests that need a GPU."""

import os

import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu on a machine without one; fail it where a GPU was promised."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("BIGBATCH_EXPECT_GPU") == "1":
        pytest.fail("BIGBATCH_EXPECT_GPU=1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")
