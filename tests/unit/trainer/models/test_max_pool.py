"""The kernels of the stem's max-pool beside torch's own, by Triton's interpreter, which needs no GPU."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import exit_codes, start_rank
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._triton import has_triton_package

from bigbatch.trainer.models.max_pool import BLOCK, MaxPool3x3, fits_kernels, register_operators


def _compare_pools(images_BCHW: Tensor) -> None:
    """Maxima, and where the gradients go: torch's. Up to four summands of a gradient are added in another order."""
    batch, channels, height, width = images_BCHW.shape
    grad_BCHW = torch.randn(batch, channels, height // 2, width // 2)
    found = []
    for pool in (torch.ops.bigbatch.max_pool3x3, lambda images: [F.max_pool2d(images, 3, 2, 1)]):
        given_BCHW = images_BCHW.clone(memory_format=torch.preserve_format).requires_grad_()
        pooled_BCHW = pool(given_BCHW)[0]
        found.append((pooled_BCHW, torch.autograd.grad(pooled_BCHW, given_BCHW, grad_BCHW)[0]))
    (ours_BCHW, our_grad_BCHW), (pooled_BCHW, want_BCHW) = found
    torch.testing.assert_close(ours_BCHW, pooled_BCHW, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(our_grad_BCHW, want_BCHW, rtol=0, atol=4 * torch.finfo().eps * 4)
    assert ours_BCHW.is_contiguous(memory_format=torch.channels_last)


def pool_like_torch() -> int:
    """The max-pool, with equal maxima, sizes that fill no program, NaN and -inf."""
    register_operators()
    torch.manual_seed(0)
    for shape in ((2, 8, 12, 16), (1, 3, 2, 2), (3, 5, 6, 4)):  # the last two fill no program
        images_BCHW = torch.randn(shape).mul(4).round().contiguous(memory_format=torch.channels_last)
        _compare_pools(images_BCHW)
    images_BCHW[0, 0, 1, 1], images_BCHW[1] = float("nan"), float("-inf")
    _compare_pools(images_BCHW)
    return 0


@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
def test_kernels_give_torchs_maxima_and_gradients(tmp_path: Path) -> None:
    log = tmp_path / "log"
    target = "tests.unit.trainer.models.test_max_pool:pool_like_torch"
    process = start_rank(target, [], environ={"TRITON_INTERPRET": "1"}, stdout=log, stderr=log)
    assert exit_codes([process], timeout_seconds=120) == [0], log.read_text()


@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
def test_compiler_traces_the_operator_without_a_break() -> None:
    register_operators()
    pool, graphs = MaxPool3x3().train(), []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with FakeTensorMode():  # tensors that have a device and no values
        images_BCHW = torch.empty(2, 8, 12, 16, device="cuda").contiguous(memory_format=torch.channels_last)
        pooled_BCHW = torch.compile(pool, fullgraph=True, backend=keep)(images_BCHW)
    assert pooled_BCHW.shape == (2, 8, 6, 8)
    assert pooled_BCHW.is_contiguous(memory_format=torch.channels_last)
    assert "bigbatch.max_pool3x3" in graphs[0].code


@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "fp32")])
def test_kernels_compile_for_a_gpu_that_is_not_here(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bigbatch.trainer.models.max_pool_kernels import max_pool_backward, max_pool_forward

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = dict.fromkeys(("channels", "height", "width", "num"), "i32") | {"BLOCK": "constexpr"}
    tensors = {"images": f"*{dtype}", "pooled": f"*{dtype}", "grad": f"*{dtype}", "places": "*i8"}
    for kernel in (max_pool_forward, max_pool_backward):
        types = {name: (tensors | sizes)[name] for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=types, constexprs={(kernel.arg_names.index("BLOCK"),): BLOCK})
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_compiled_pool_on_a_gpu_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    images_BCHW = torch.randn(4, 64, 56, 56, device="cuda", dtype=dtype).mul(4).round()
    images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
    grad_BCHW = torch.randn(4, 64, 28, 28, device="cuda", dtype=dtype)
    found = []
    for pool in (torch.compile(MaxPool3x3().train(), fullgraph=True), lambda images: F.max_pool2d(images, 3, 2, 1)):
        given_BCHW = images_BCHW.clone(memory_format=torch.preserve_format).requires_grad_()
        pooled_BCHW = pool(given_BCHW)
        found.append((pooled_BCHW, torch.autograd.grad(pooled_BCHW, given_BCHW, grad_BCHW)[0]))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_kernels_take_what_they_can_compare(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        fits = torch.empty(2, 8, 12, 16, device="cuda").contiguous(memory_format=torch.channels_last)
        assert fits_kernels(fits)
        for other in (fits.cpu(), fits.to(dtype), fits[:, :, 1:], fits.contiguous()):
            assert not fits_kernels(other)
        large = torch.empty(2**15, 64, 32, 32, device="cuda")
        assert not fits_kernels(large.contiguous(memory_format=torch.channels_last))


def test_pool_is_torchs_where_the_kernels_do_not_go() -> None:
    images_BCHW = torch.randn(2, 3, 9, 8)
    assert torch.equal(MaxPool3x3().train()(images_BCHW), F.max_pool2d(images_BCHW, 3, 2, 1))
