"""Make a trained model fast for inference: fold batch norms into convolutions, use half precision, compile."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from bigbatch.errors import ComputeError, first_line
from bigbatch.trainer.machine.host import seconds_of
from bigbatch.trainer.models.initialization import has_own_weights
from bigbatch.trainer.models.regions import compile_failure
from bigbatch.trainer.step.precision import to_half_

WARMUP_BATCHES = 2
"""Batches before a rate is measured: they choose kernels and fill caches."""
TOLERANCE = 1e-4
"""Largest difference, as a share of the largest output. Sums in another order moved fp32 logits by 1e-6 of it."""
MEASURED_SECONDS, MIN_BATCHES, MAX_BATCHES = 0.5, 3, 100
"""Seconds for which a rate is measured, and the least and most batches."""


def for_inference(
    model: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    fold: bool = False,
    channels_last: bool = True,
) -> nn.Module:
    """Return a copy of an evaluation-mode model on the device, with weights in dtype, except norms that stay.

    The copy takes images in dtype. fold: fold norms first, in fp32.
    """
    model = fold_norms(model) if fold else copy.deepcopy(model)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    to_half_(model, dtype)
    return model


@torch.no_grad()
def fold_norms(model: nn.Module) -> nn.Module:
    """Return a copy of an evaluation-mode model, with each norm directly after a convolution folded into it.

    The convolution gets a bias, and an empty nn.Sequential replaces the norm. Other norms stay, such as one after a
    max-pool, which would commute only with positive scales, or after a convolution that standardizes its weight.
    The function is the same up to rounding. Raises: ComputeError for a model that cannot be traced.
    """
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for names in _foldable(model):
        convolution, norm = map(model.get_submodule, names)
        fused: Any = fuse_conv_bn_eval(convolution, norm)  # type: ignore[type-var,arg-type]
        rest = nn.Sequential(*norm.children())  # timm's norms include their activation
        sides = [8 + (kernel - 1) * step for kernel, step in zip(fused.kernel_size, fused.dilation, strict=True)]
        noise_BCHW = torch.randn(2, fused.in_channels, *sides, generator=generator).to(fused.weight)
        new_BCHW, old_BCHW = rest(fused(noise_BCHW)), norm(convolution(noise_BCHW))
        if (new_BCHW - old_BCHW).abs().max() <= TOLERANCE * old_BCHW.abs().max():
            model.set_submodule(names[0], fused)
            model.set_submodule(names[1], rest)
    return model


def num_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


class _Tracer(fx.Tracer):
    """Traces each convolution, norm and adaptive pool as one operation, bigbatch's subclasses included."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.AdaptiveAvgPool2d) or super().is_leaf_module(
            m, module_qualified_name
        )


def _foldable(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names (convolution, norm) where only the norm reads the convolution, and each is called once."""
    try:
        nodes = [node for node in _Tracer().trace(model).nodes if node.op == "call_module"]
    except Exception as error:  # a model's own code, called with values that have no numbers, may raise anything
        raise ComputeError(f"this model's norms cannot be folded: {first_line(error)}; leave out --fold") from error
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
            and all(has_own_weights(model.get_submodule(name)) for name in names)
            and all(num_calls[name] == 1 for name in names)
        ):
            pairs.append(names)
    return pairs


@torch.no_grad()
def compile_(model: nn.Module, images_BCHW: Tensor) -> None:
    """Compile forward for batches of this shape, in place; the first batch of another shape compiles again.

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
    count = round(MEASURED_SECONDS / seconds_of(forward, device))
    count = min(max(count, MIN_BATCHES), MAX_BATCHES)

    def repeat() -> None:  # keeps no outputs
        for _ in range(count):
            forward()

    return count * num_images / seconds_of(repeat, device)
