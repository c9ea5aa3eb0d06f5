"""Models that move buffers of their own in training."""

import pytest
import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.models.foreign import refuse_own_state


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs_BC: Tensor) -> Tensor:
        if self.training:
            self.center.lerp_(inputs_BC.mean(0), 0.1)
        found: Tensor = self.layer((inputs_BC - self.center) * self.scale)
        return found


SPECTRAL = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 40), n_power_iterations=1)


@pytest.mark.parametrize(
    ("model", "name"), [(Centered(), "center"), (nn.Sequential(SPECTRAL), "0.parametrizations.weight.0._u")]
)
def test_own_state_is_refused_by_name_in_the_first_training_forward(model: nn.Module, name: str) -> None:
    refuse_own_state(model)
    model.eval()(torch.randn(4, 3))
    with pytest.raises(ConfigError, match=f"cannot keep {name}"):
        model.train()(torch.randn(4, 3))


def test_own_state_that_stays_is_none() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)).train()
    model.register_buffer("scale", torch.ones(2))
    refuse_own_state(model)
    model(torch.randn(4, 3))
    model.scale += 1
    model(torch.randn(4, 3))  # looked at once
