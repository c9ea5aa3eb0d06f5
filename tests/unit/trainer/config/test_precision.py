"""Settings of half precision and of the moving average that are refused, and what a GPU's hardware can do."""

import math
import re

import pytest
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.optimizer import LARGEST_SCALE, nearest_scale, precision_notice, require_hardware
from tests.unit.trainer.config.test_schema import make_config, refusal

FP16 = {"optimizer.precision": "fp16", "optimizer.loss_scale": 1024.0}


@pytest.mark.parametrize("scale", [1.0, 2.0, 65536.0, LARGEST_SCALE])
@pytest.mark.parametrize("growth_steps", [None, 1, 2000])
def test_loss_scale_powers_of_two_are_legal(scale: float, growth_steps: int | None) -> None:
    make_config({**FP16, "optimizer.loss_scale": scale, "optimizer.loss_scale_growth_steps": growth_steps})


@pytest.mark.parametrize(
    ("scale", "nearest"), [(1000.0, "1024"), (0.5, "1"), (1e-3, "1"), (5.0, "4"), (7.0, "8"), (1e12, "1.67772e+07")]
)
def test_loss_scale_of_another_value_gets_the_nearest(scale: float, nearest: str) -> None:
    message = refusal({**FP16, "optimizer.loss_scale": scale})
    assert message.startswith(f"optimizer.loss_scale={scale:g} must be a power of two from 1 to 1.67772e+07")
    assert message.endswith(f": {nearest} is the nearest")


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_loss_scale_that_is_offered_is_legal_and_nearest(scale: float) -> None:
    nearest = nearest_scale(scale)
    make_config({**FP16, "optimizer.loss_scale": nearest})
    assert all(abs(nearest - scale) <= abs(2.0**power - scale) for power in range(25))
    assert math.log2(nearest).is_integer()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16_autocast"])
def test_loss_scale_is_of_fp16_alone(precision: str) -> None:
    base = {"optimizer.precision": precision}
    assert "loss_scale=8.0 has no meaning" in refusal({**base, "optimizer.loss_scale": 8.0})
    message = refusal({**base, "optimizer.loss_scale_growth_steps": 5})
    named = ("optimizer.loss_scale_growth_steps=5 ", f"optimizer.precision={precision}:", "null")
    assert re.search(naming(*named), message)
    make_config(base)


@pytest.mark.parametrize("precision", ["fp16", "fp16_autocast"])
def test_loss_scale_is_needed_by_fp16(precision: str) -> None:
    assert "optimizer.loss_scale is null" in refusal({"optimizer.precision": precision})
    make_config({**FP16, "optimizer.precision": precision, "optimizer.loss_scale_growth_steps": 5})


def test_ema_decay_and_its_steps_go_together() -> None:
    assert refusal({"optimizer.ema_decay": 0.9}).startswith("optimizer.ema_every_steps is null, but")
    message = refusal({"optimizer.ema_every_steps": 2})
    assert re.search(naming("optimizer.ema_every_steps=2 ", "optimizer.ema_decay", "null"), message)
    make_config({"optimizer.ema_decay": 0.0, "optimizer.ema_every_steps": 1})


@pytest.mark.parametrize(
    ("precision", "capability", "legal"),
    [
        ("fp16", (5, 2), "fp32"),
        ("fp16_autocast", (5, 2), "fp32"),
        ("bf16", (7, 5), "fp32 or fp16 or fp16_autocast"),
        ("bf16_autocast", (7, 5), "fp32 or fp16 or fp16_autocast"),
        ("tf32", (7, 5), "fp32 or fp16 or fp16_autocast"),
        ("bf16", (5, 2), "fp32"),
        ("fp16", (3, 7), "fp32"),
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


@pytest.mark.parametrize(
    ("precision", "capability"),
    [
        ("fp32", (2, 0)),
        ("fp16", (5, 3)),
        ("fp16_autocast", (7, 0)),
        ("bf16", (8, 0)),
        ("tf32", (8, 0)),
        ("bf16", (9, 0)),
    ],
)
def test_require_hardware_takes_a_gpu_with_the_precision(precision: str, capability: tuple[int, int]) -> None:
    require_hardware(precision, capability=capability, device="New One")


@pytest.mark.parametrize(
    ("precision", "capability", "named"),
    [
        ("fp32", None, None),
        ("fp32", (6, 1), None),
        ("tf32", None, ("fp32", "CPU")),
        ("bf16", None, ("slower", "fp32")),
        ("fp16_autocast", None, ("slower", "fp32")),
        ("fp16", (6, 1), ("7.0", "6.1")),
        ("fp16_autocast", (6, 0), ("7.0", "6.0")),
        ("fp16", (7, 0), None),
        ("bf16_autocast", (8, 0), None),
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
