"""What is copied of a GPU's state for a checkpoint."""

import pytest
import torch

from bigbatch.trainer.checkpoint.saving import copy_to_host

pytestmark = pytest.mark.gpu


def test_state_is_copied_to_the_host_as_it_was_when_asked_for() -> None:
    flat_N = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    for _ in range(10):  # still on their way when the copy is asked for
        flat_N += 1
    copied = copy_to_host({"first": flat_N[:10], "rest": flat_N[10:].view(2, -1)})
    flat_N.zero_()
    assert all(tensor.device.type == "cpu" for tensor in copied.values())
    expected_N = torch.arange(10, (1 << 20) + 10, dtype=torch.float32)
    assert torch.equal(copied["first"], expected_N[:10])
    assert torch.equal(copied["rest"], expected_N[10:].view(2, -1))
