"""What is digested of single microbatches, against gradients and outputs of each by itself."""

import pytest
import torch
from error_texts import naming
from torch import nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.observe.digests import (
    ACTIVATIONS,
    BEFORE_SUM,
    MicrobatchDigests,
    chosen_layers,
    chosen_values,
    hex_digest,
)
from bigbatch.trainer.observe.replicas import digest


class Small(nn.Module):
    """Two layers; backward recomputes the first one; a third one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.fc = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
        """Give logits."""
        hidden: torch.Tensor = self.block(x_BC)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.compute_again(x_BC))
        logits_BK: torch.Tensor = self.fc(hidden)
        return logits_BK

    def compute_again(self, x_BC: torch.Tensor) -> None:
        """Do within backward what activation checkpointing does, whose import takes seconds."""
        self.block(x_BC)


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small()


def word_of(tensor: torch.Tensor) -> str:
    return hex_digest(int(digest([tensor])[0]))


def test_each_microbatch_has_its_own_gradients_and_activations(model: Small) -> None:
    inputs = {5: torch.randn(2, 4), 7: torch.randn(2, 4)}
    expected = {}
    for number, x_BC in inputs.items():
        expected[ACTIVATIONS, "block", number] = word_of(torch.tanh(model.block[0](x_BC)))
        used = {n: p for n, p in model.named_parameters() if not n.startswith("unused")}
        for name, gradient in zip(used, torch.autograd.grad(model(x_BC).sum(), used.values()), strict=True):
            expected[BEFORE_SUM, name, number] = word_of(gradient)
    found = MicrobatchDigests(model, layers=["block"])
    model(torch.zeros(1, 4)).sum().backward()  # a step that is not recorded, whose gradients stay
    found.start()
    for number, x_BC in inputs.items():
        found.microbatch = number
        model(x_BC).sum().backward()
    assert {row[:3]: row[3] for row in found.take()} == expected
    model(inputs[5]).sum().backward()
    assert found.take() == [], "no hook is left"


def test_what_is_to_be_kept_whole_is_kept_by_microbatch(model: Small) -> None:
    inputs = {5: torch.randn(2, 4), 7: torch.randn(2, 4)}
    found = MicrobatchDigests(model, layers=["block", "fc"], kept=["block", "fc.bias"])
    found.start()
    for number, x_BC in inputs.items():
        found.microbatch = number
        model(x_BC).sum().backward()
    found.take()
    assert found.values.keys() == {ACTIVATIONS, BEFORE_SUM}
    assert found.values[ACTIVATIONS].keys() == {"block"}
    assert found.values[BEFORE_SUM].keys() == {"fc.bias"}
    for number, x_BC in inputs.items():
        (kept,) = found.values[ACTIVATIONS]["block"][number]
        assert torch.equal(kept, torch.tanh(model.block[0](x_BC)))
        assert torch.equal(found.values[BEFORE_SUM]["fc.bias"][number][0], torch.full((3,), 2.0))
    found.start()
    assert found.values == {}, "of the step before"


def test_a_layer_that_is_called_twice_tells_of_both(model: Small) -> None:
    tanh = model.block[1]
    found = MicrobatchDigests(nn.Sequential(tanh, nn.Identity(), tanh), layers=["0"])

    def words(x_N: torch.Tensor) -> list[str]:
        found.start()
        found._model(x_N)
        return [row[3] for row in found.take()]

    one, other = words(torch.ones(3)), words(torch.full((3,), 2.0))
    assert len(one) == len(other) == 1
    assert one != other
    assert one != [word_of(torch.tanh(torch.ones(3)))]


def test_layers_are_chosen_by_patterns_and_a_wrong_one_is_told_what_there_is(model: Small) -> None:
    assert chosen_layers(model, ["fc", "block.*"]) == ["block.0", "block.1", "fc"]
    assert chosen_layers(model, []) == []
    with pytest.raises(ConfigError, match=naming("blok.1", "there are block.1, block.0, ", "fc", "unused")):
        chosen_layers(model, ["fc", "blok.1"])
    assert chosen_values(model, ["block"], ["block*", "fc.bias"]) == [
        "block",
        "block.0.weight",
        "block.0.bias",
        "fc.bias",
    ]
    with pytest.raises(
        ConfigError, match=naming("run.digest_values", "parameter, or layer of run.digest_layers", "fc.bias")
    ):
        chosen_values(model, ["block"], ["fc"])
    many = nn.Sequential(*(nn.Tanh() for _ in range(20)))
    with pytest.raises(ConfigError, match=naming("layer", "and 8 more")):
        chosen_layers(many, ["layer"])
