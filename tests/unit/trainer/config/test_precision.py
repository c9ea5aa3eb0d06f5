"""Settings of half precision and of the moving average that are refused, and what a GPU's hardware can do."""

import math
import re

import pytest
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.optimizer import nearest_scale, optimizer_notes, precision_notice, require_hardware
from tests.unit.trainer.config.test_schema import make_config

FP16 = {"optimizer.precision": "fp16", "optimizer.loss_scale": 1024.0}


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_loss_scale_that_is_offered_is_legal_and_nearest(scale: float) -> None:
    nearest = nearest_scale(scale)
    make_config({**FP16, "optimizer.loss_scale": nearest})
    assert all(abs(nearest - scale) <= abs(2.0**power - scale) for power in range(25))
    assert math.log2(nearest).is_integer()


def test_log_says_that_evaluations_are_of_the_average() -> None:
    config = make_config({"optimizer.ema_decay": 0.9, "optimizer.ema_every_steps": 5})
    (note,) = optimizer_notes(config.optimizer)
    assert re.search(naming("of the moving average of the weights", "from step 5 on"), note)
    assert optimizer_notes(make_config({}).optimizer) == []


@pytest.mark.parametrize(
    ("precision", "capability", "legal"),
    [
        ("fp16", (5, 2), "fp32"),
        ("bf16_autocast", (7, 5), "fp32 or fp16 or fp16_autocast"),
        ("tf32", (7, 5), "fp32 or fp16 or fp16_autocast"),
    ],
)
def test_require_hardware_refuses_a_gpu_without_the_precision(
    precision: str, capability: tuple[int, int], legal: str
) -> None:
    named = naming(f"optimizer.precision={precision} ", "Old One", "{}.{}:".format(*capability))
    with pytest.raises(ConfigError, match=named) as caught:
        require_hardware(precision, capability=capability, device="Old One")
    assert str(caught.value).endswith(f" to {legal}")
    for name in legal.split(" or "):
        require_hardware(name, capability=capability, device="Old One")


@pytest.mark.parametrize(("precision", "capability"), [("fp32", (2, 0)), ("fp16", (5, 3)), ("tf32", (8, 0))])
def test_require_hardware_takes_a_gpu_with_the_precision(precision: str, capability: tuple[int, int]) -> None:
    require_hardware(precision, capability=capability, device="New One")


@pytest.mark.parametrize(
    ("precision", "capability", "named"),
    [
        ("fp32", None, None),
        ("fp32", (6, 1), None),
        ("tf32", None, ("fp32", "CPU")),
        ("bf16", None, ("slower", "fp32")),
        ("fp16", (6, 1), ("7.0", "6.1")),
        ("fp16", (7, 0), None),
    ],
)
def test_precision_notice_tells_of_another_speed_where_it_is_to_be_expected(
    precision: str, capability: tuple[int, int] | None, named: tuple[str, ...] | None
) -> None:
    notice = precision_notice(precision, capability=capability)
    assert (notice is None) == (named is None)
    if notice and named:
        assert notice.startswith(f"optimizer.precision={precision} ")
        assert re.search(naming(*named), notice)
