"""A trained model made fast for inference: batch norm folded into the convolutions, half precision, compiled."""

import copy
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from bigbatch.errors import ComputeError
from bigbatch.trainer.machine.host import wait_for
from bigbatch.trainer.step.execution import compile_failure
from bigbatch.trainer.step.precision import to_half_

WARMUP_BATCHES = 2
"""Before a rate is measured: the first choose kernels and fill caches."""
MEASURED_SECONDS, LEAST_BATCHES, MOST_BATCHES = 0.5, 3, 100
"""For how long a rate is measured, within these numbers of batches."""


def for_inference(
    model: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    fold: bool = False,
    channels_last: bool = True,
) -> nn.Module:
    """Copy a model in evaluation mode to the device, with its weights in dtype, except norms that were not folded.

    It takes images in dtype. Folding goes before rounding, in fp32.
    """
    model = fold_norms(model) if fold else copy.deepcopy(model)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    to_half_(model, dtype)
    return model


def fold_norms(model: nn.Module) -> nn.Module:
    """Copy a model in evaluation mode, so that each batch norm directly behind a convolution is part of it.

    The convolution gets a bias, the norm is an empty nn.Sequential; other norms stay, such as one behind a max-pool,
    which would commute only with positive scales. The same function, but for rounding.
    """
    model = copy.deepcopy(model)
    for convolution, norm in _foldable(model):
        old = model.get_submodule(norm)
        fused = fuse_conv_bn_eval(model.get_submodule(convolution), old)  # type: ignore[type-var,arg-type]
        model.set_submodule(convolution, fused)
        model.set_submodule(norm, nn.Sequential(*old.children()))  # timm's norms include their activation
    return model


def num_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


class _Tracer(fx.Tracer):
    """Takes each convolution, norm and adaptive pool as one operation, those of our own kinds as well."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.AdaptiveAvgPool2d) or super().is_leaf_module(
            m, module_qualified_name
        )


def _foldable(model: nn.Module) -> list[tuple[str, str]]:
    """Find pairs of (convolution, norm) by name, where the norm alone reads the convolution, and each works once."""
    nodes = [node for node in _Tracer().trace(model).nodes if node.op == "call_module"]
    num_calls = Counter(str(node.target) for node in nodes)
    pairs = []
    for norm in nodes:
        source = norm.all_input_nodes[0]
        names = str(source.target), str(norm.target)
        if (
            source.op == "call_module"
            and isinstance(model.get_submodule(names[0]), nn.Conv2d)
            and isinstance(model.get_submodule(names[1]), nn.BatchNorm2d)
            # another reader would get the normalised output
            and len(source.users) == 1
            and all(num_calls[name] == 1 for name in names)
        ):
            pairs.append(names)
    return pairs


@torch.no_grad()
def compile_(model: nn.Module, images_BCHW: Tensor) -> None:
    """Compile forward for batches such as this one, in place; others are compiled when they come.

    Raises: ComputeError.
    """
    model.compile(fullgraph=True, dynamic=False)
    if failure := compile_failure(lambda: model(images_BCHW)):
        raise ComputeError(f"the model does not compile: {failure}; fix that, or leave out --compile")


@torch.no_grad()
def forward_rate(forward: Callable[[], object], *, num_images: int, device: torch.device) -> float:
    """Measure images per second of forward, which takes num_images, repeated after a warm-up. Waits for the device."""
    for _ in range(WARMUP_BATCHES):
        forward()
    count = round(MEASURED_SECONDS / _seconds(forward, 1, device=device))
    count = min(max(count, LEAST_BATCHES), MOST_BATCHES)
    return count * num_images / _seconds(forward, count, device=device)


def _seconds(forward: Callable[[], object], count: int, *, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        forward()
    wait_for(device)
    return time.perf_counter() - start
