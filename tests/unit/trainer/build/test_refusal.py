"""What a model refuses at its first forward, in a line."""

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.errors import ConfigError, PeerLostError
from bigbatch.trainer.build.model import explain_refusal_


class Raising(nn.Module):
    """Raises the given exception."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.error:
            raise self.error
        return images_BCHW.flatten(1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.MaxPool2d(3), "Output size is too small"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)), "Expected more than 1 value per channel"),
        (Raising(AssertionError("Input height (2) doesn't match model (224).")), "AssertionError: Input height"),
    ],
)
def test_refusal_of_a_first_forward_is_a_line_that_names_what_to_set(model: nn.Module, reason: str) -> None:
    explain_refusal_(model, name="own.Net")
    with pytest.raises(ConfigError, match=naming("model.name=own.Net", "1 images of 2 x 2", reason, "data.image_size")):
        model(torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("rank 1 is gone"),
        MemoryError(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_refusal_is_not_what_may_go_well_the_next_time(error: Exception) -> None:
    model = Raising(error)
    explain_refusal_(model, name="own.Net")
    with pytest.raises(type(error)) as raised:
        model(torch.zeros(1, 3, 2, 2))
    assert raised.value is error


def test_refusal_of_a_later_forward_is_a_defect() -> None:
    model = Raising(None)
    explain_refusal_(model, name="own.Net")
    assert model(torch.ones(1, 3, 2, 2)).sum() == 12
    assert "forward" not in vars(model)
    model.error = ArithmeticError("a defect")
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 3, 2, 2))
