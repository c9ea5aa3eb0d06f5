"""benchmarks/gpu/recompute.py computes in the precision that it is asked for, and refuses sizes of nothing."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks/gpu"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    import recompute

    return recompute


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16_autocast", torch.bfloat16), ("bf16", torch.bfloat16)]
)
def test_a_step_computes_in_the_precision_that_is_asked_for(
    precision: str, dtype: torch.dtype, benchmark: ModuleType
) -> None:
    options = benchmark.parse(["--model", "resnet18", "--precision", precision, "--batch", "2"])
    model = benchmark.make_model(options, torch.device("cpu"), 0)
    found = []
    model.layer1[0].conv1.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    benchmark.step(model, torch.randn(2, 3, 32, 32, dtype=benchmark.COMPUTE_DTYPES[precision]), precision)
    assert found == [dtype]


@pytest.mark.parametrize("option", ["--batch", "--repetitions", "--image-size"])
def test_sizes_of_nothing_are_refused(option: str, benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse([option, "0"])
    assert f"{option}=0: give at least 1" in capsys.readouterr().err
