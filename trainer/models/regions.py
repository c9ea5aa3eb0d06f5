"""Compile regions of a model one by one, and recompute residual blocks in backward."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch.user_settings import set_compile_cache

Region: TypeAlias = tuple[nn.Module, str]
"""Module with the method, and the method's name.

A model's regions() lists the parts that are compiled one by one, in the order of its forward: together they are its
forward, and none overlap. Its residual_blocks() lists blocks that backward can recompute: they draw no random numbers.
"""


GPU_OPTIONS = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 16, "realize_opcount_threshold": 100}
"""Settings of torch's compiler on a GPU: with its defaults, backward of batch norm and ReLU stores a gradient in fp32.

With these it computes the gradient again where it is needed; tests/support/lowered_gpu.py counts the bytes of both.
"""


def compile_regions_(model: nn.Module, *, mode: str | None, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each region of model with torch.compile: one graph without breaks for each of its shapes.

    Blocks of the same shape share their code. In place; modules, names and state_dict stay as they are. The first call
    with each shape compiles. A model without regions() is one region.
    """
    prepare_: Callable[[], None] | None = getattr(model, "prepare_compile_", None)
    if prepare_ is not None:
        prepare_()
    settings: dict[str, Any] = {"mode": mode}
    if backend == "inductor" and any(parameter.is_cuda for parameter in model.parameters()):
        # torch.compile takes options only without a mode, which is a name of some of them
        settings = {"options": {**torch._inductor.list_mode_options(mode or "default"), **GPU_OPTIONS}}
    for owner, name in _regions(model):
        setattr(owner, name, compile_region(getattr(owner, name), backend=backend, **settings))


def compile_region(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compile a function to one graph without breaks for each of its shapes, in training and in evaluation."""
    # blocks share one forward, which has the shapes of all: hence the limit. Code for dynamic shapes would be slower.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2**16
    return torch.compile(function, fullgraph=True, dynamic=False, **settings)


def restore_regions_(model: nn.Module) -> None:
    for owner, name in _regions(model):
        delattr(owner, name)


def _regions(model: Any) -> list[Region]:
    return model.regions() if hasattr(model, "regions") else [(model, "forward")]


def compile_failure(first_call: Callable[[], object]) -> str:
    """Call a compiled function for the first time; return one line on why it cannot be compiled, else ""."""
    loaded = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    # before the import, which makes the folder
    set_compile_cache(torchs_own=loaded.default_cache_dir() if loaded else None)
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import, which only compiling needs

    try:
        first_call()
    except TorchDynamoException as error:
        message = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]  # without torch's hints
        return " ".join(message.split())[:300]
    return ""


def recompute_(model: Any, num_blocks: int) -> None:
    """Make backward recompute the activations of the first num_blocks residual blocks. In place.

    The running statistics of batch norm must be such that a second forward changes nothing: see MicrobatchStatistics.
    """
    blocks = model.residual_blocks() if num_blocks else []
    assert num_blocks <= len(blocks)
    for block in blocks[:num_blocks]:
        again: Callable[[Tensor], Tensor] = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # blocks draw no numbers; a CUDA graph could not read the state
        )
        block.forward = again
