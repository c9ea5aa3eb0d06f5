"""Triton's kernels are compiled for GPUs that are not here: the interpreter takes what the compiler refuses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")


def compile_for(capability: int, kernel: Any, types: Mapping[str, str], constants: Mapping[str, object]) -> bytes:
    """The machine code for an NVIDIA GPU of that compute capability, times ten."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    code: bytes = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
    return code


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("has_all", [False, True])
def test_end_of_a_lars_step_compiles(capability: int, has_all: bool) -> None:
    from bigbatch.trainer.optim.scaled_step_kernel import update_kernel

    types = dict.fromkeys(("addresses", "sizes", "programs"), "*i64")
    types |= dict.fromkeys(("scales", "divisor", "overflow"), "*fp32") | {"lr": "*fp32" if has_all else "fp32"}
    types |= {"momentum": "fp32", "weight_decay": "fp32", "num_tensors": "i32", "num_programs": "i32"}
    flags = ("HAS_DIVISOR", "HAS_OVERFLOW", "IS_LR_ON_DEVICE", "HAS_MOMENTUM", "NESTEROV")
    assert compile_for(capability, update_kernel, types, {**dict.fromkeys(flags, has_all), "BLOCK": 4096})


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_max_pool_compiles(capability: int, dtype: str) -> None:
    from bigbatch.trainer.models.max_pool_kernels import backward_kernel, forward_kernel

    sizes = dict.fromkeys(("channels", "height", "width", "num"), "i32")
    forward = {"images": f"*{dtype}", "pooled": f"*{dtype}", "places": "*i8", **sizes}
    backward = {"grad": f"*{dtype}", "places": "*i8", "images": f"*{dtype}", **sizes}
    for kernel, types in ((forward_kernel, forward), (backward_kernel, backward)):
        assert compile_for(capability, kernel, types, {"BLOCK": 1024})
