"""benchmarks.gpu.recompute computes in the precision that it is asked for, and refuses sizes of nothing."""

import pytest
import torch

from benchmarks.gpu import recompute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16_autocast", torch.bfloat16), ("bf16", torch.bfloat16)]
)
def test_step_computes_in_the_precision_that_is_asked_for(precision: str, dtype: torch.dtype) -> None:
    options = recompute.parse(["--model", "resnet18", "--precision", precision, "--batch", "2"])
    model = recompute.make_model(options, torch.device("cpu"), 0)
    found = []
    model.layer1[0].conv1.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    recompute.step(model, torch.randn(2, 3, 32, 32, dtype=recompute.COMPUTE_DTYPES[precision]), precision)
    assert found == [dtype]
