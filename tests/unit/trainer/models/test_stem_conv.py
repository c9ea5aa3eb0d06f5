"""The first convolution over blocks of pixels, beside torch's own in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from bigbatch.trainer.models.stem_conv import StemConv2d, convolve_blocks


@pytest.mark.parametrize("shape", [(2, 3, 32, 48), (1, 3, 2, 6)])
def test_convolution_of_blocks_has_torchs_sums_and_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    images_BCHW = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    weight_OCHW = torch.randn(8, 3, 7, 7, dtype=torch.float64, requires_grad=True)
    images_BCHW.requires_grad_()
    found = []
    for features_BCHW in (
        convolve_blocks(images_BCHW, weight_OCHW),
        F.conv2d(images_BCHW, weight_OCHW, stride=2, padding=3),
    ):
        grads = torch.autograd.grad(features_BCHW.square().sum(), [images_BCHW, weight_OCHW])
        found.append([features_BCHW, *grads])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_on_a_cpu_is_torchs(dtype: torch.dtype) -> None:
    conv, images_BCHW = StemConv2d(8).to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    assert torch.equal(conv(images_BCHW), F.conv2d(images_BCHW, conv.weight, stride=2, padding=3))


def compile_and_keep(conv: StemConv2d, graphs: list[str], *, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile conv in training, and keep the text of its graph."""

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return backend(graph, inputs)

    return torch.compile(conv.train(), fullgraph=True, dynamic=False, backend=keep)


@pytest.mark.parametrize(("dtype", "side", "is_by_blocks"), [("bfloat16", 8, 1), ("bfloat16", 7, 0), ("float16", 8, 0)])
def test_compiled_convolution_for_a_gpu_is_by_blocks(
    dtype: str, side: int, is_by_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, of images with even sides."""
    memory_format = torch.channels_last
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_: memory_format)
    graphs: list[str] = []
    with FakeTensorMode(), torch.device("cuda"):  # tensors that have a device and no values
        conv = StemConv2d(8)
        conv.weight = torch.nn.Parameter(conv.weight.detach().to(getattr(torch, dtype)))
        images_BCHW = torch.empty(2, 3, side, side, dtype=getattr(torch, dtype))
        compiled = compile_and_keep(conv, graphs, backend=lambda graph, _inputs: graph)
        assert compiled(images_BCHW).shape == (2, 8, 4, 4)
    assert ["pad(" in code for code in graphs] == [bool(is_by_blocks)]


@pytest.mark.gpu
def test_compiled_convolution_in_bf16_on_a_gpu_rounds_as_torchs_does() -> None:
    torch.manual_seed(0)
    conv, graphs = StemConv2d(64).cuda().bfloat16(), list[str]()
    images_BCHW = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
    truth_BCHW = F.conv2d(images_BCHW.double(), conv.weight.double(), stride=2, padding=3)
    from torch._inductor.compile_fx import compile_fx

    found_BCHW = compile_and_keep(conv, graphs, backend=compile_fx)(images_BCHW)
    assert "pad(" in graphs[0], "torch's own convolution was compiled"
    distance = (found_BCHW.double() - truth_BCHW).norm() / truth_BCHW.norm()
    assert distance < torch.finfo(torch.bfloat16).eps / 2  # the result is rounded once
