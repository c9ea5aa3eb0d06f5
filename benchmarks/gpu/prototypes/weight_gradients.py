"""Gradients of weights on a second stream of a captured step, beside norms whose backward waits for memory.

Backward of a residual block as a chain of norm, input's gradient and weight's gradient by hand, with one convolution
call for each of the two gradients. The weights' gradients are read at the block's end alone: on one stream they come
between the others, and on a second one each starts when its norm's backward has ended, and the chain continues. Bytes
and the 20 launches stay the same; at 32 images six of them, which finish sums, take less than 5 microseconds. Three
forks and a join become edges of the CUDA graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.prototypes.common import Comparison, Prototype, Values, compiled_as_today, main

Start: TypeAlias = Callable[[Callable[[], Tensor]], Tensor]
"""Computes a weight's gradient now or beside what follows."""
LAYERS = {"layer1.1": (64, 56), "layer2.1": (128, 28), "layer3.1": (256, 14), "layer4.1": (512, 7)}
"""Block of ResNet-50 -> channels of its middle convolution, and side of its images."""
EPS = 1e-5
BYTES, LAUNCHES = 41, 20
"""Bytes of a block's backward per element of its result: 12 of convolutions, 6 of the sum, 23 lowered of norms."""


class SecondStream:
    """Runs work beside the current stream, until join."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._work: list[Callable[[], Tensor]] = []

    def start(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work after what the current stream has been given; return its result, which join makes readable."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()
        # it holds tensors of the current stream, whose memory that stream would give to its next tensor
        self._work.append(work)
        return result

    def join(self) -> None:
        """Let the current stream wait for all work."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._work.clear()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A convolution and its norm, with what their forward keeps for backward."""

    images: Tensor
    weight: Tensor
    convolved: Tensor
    scale_C: Tensor
    shift_C: Tensor
    mean_C: Tensor
    inverse_std_C: Tensor

    def gradient(self, grad: Tensor, *, of_weight: bool) -> Tensor:
        """Return the gradient of the weight or of the images from that of the convolution's result."""
        padding = [self.weight.shape[2] // 2] * 2
        mask = [not of_weight, of_weight, False]
        grads = torch.ops.aten.convolution_backward(
            grad, self.images, self.weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1, mask
        )
        result: Tensor = grads[of_weight]
        return result

    @property
    def norm(self) -> tuple[Tensor, ...]:
        return self.convolved, self.mean_C, self.inverse_std_C, self.scale_C, self.shift_C


def wide(value: Tensor) -> Tensor:
    """Return a tensor in the dtype in which norms compute."""
    return value if value.dtype == torch.float64 else value.float()


def channels(value_C: Tensor) -> Tensor:
    return value_C[:, None, None]


def moments(convolved: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation (C) of a batch."""
    var_C, mean_C = torch.var_mean(wide(convolved), (0, 2, 3), correction=0)
    return mean_C, (var_C + EPS).rsqrt()


def normalized(convolved: Tensor, mean_C: Tensor, inverse_std_C: Tensor, scale_C: Tensor, shift_C: Tensor) -> Tensor:
    return (wide(convolved) - channels(mean_C)) * channels(inverse_std_C * scale_C) + channels(shift_C)


def norm_backward(
    grad: Tensor, convolved: Tensor, mean_C: Tensor, inverse_std_C: Tensor, scale_C: Tensor, shift_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a norm's input, scale and shift; grad is that of its result, in a wide dtype."""
    unit = (wide(convolved) - channels(mean_C)) * channels(inverse_std_C)
    grad_scale_C, grad_shift_C = (grad * unit).sum((0, 2, 3)), grad.sum((0, 2, 3))
    count = convolved.numel() // len(mean_C)
    grad = grad - (unit * channels(grad_scale_C) + channels(grad_shift_C)) / count
    return (grad * channels(inverse_std_C * scale_C)).to(convolved.dtype), grad_scale_C, grad_shift_C


def relu_norm_backward(grad: Tensor, *norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same through a ReLU behind the norm."""
    return norm_backward(torch.where(normalized(*norm) > 0, wide(grad), 0), *norm)


def end_backward(grad: Tensor, images: Tensor, *norm: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of the sum at a block's end, then the same as norm_backward; images are the block's input."""
    is_positive = normalized(*norm) + wide(images) > 0
    masked = torch.where(is_positive, grad, 0)
    return (masked, *norm_backward(wide(masked), *norm))


@dataclass(frozen=True, kw_only=True)
class Block:
    """A residual block after its forward, and the gradient of its result."""

    layers: tuple[Layer, Layer, Layer]
    grad: Tensor

    def backward(
        self,
        start: Start = lambda work: work(),
        *,
        middle: Callable[..., Any] = relu_norm_backward,
        end: Callable[..., Any] = end_backward,
    ) -> dict[str, Tensor]:
        """Return all gradients; those of weights are computed by start."""
        *first, last = self.layers
        masked, *grads = end(self.grad, first[0].images, *last.norm)
        found: dict[str, Tensor] = {}
        for number, layer in reversed([*enumerate(self.layers, 1)]):
            grad, *found_of_norm = grads
            found |= zip((f"bn{number}.weight", f"bn{number}.bias"), found_of_norm, strict=True)
            found[f"conv{number}.weight"] = start(partial(layer.gradient, grad, of_weight=True))
            grad = layer.gradient(grad, of_weight=False)
            grads = middle(grad, *self.layers[number - 2].norm) if number > 1 else [grad + masked]
        return found | {"images": grads[0]}


def block_of(images: Tensor, weights: list[Tensor], norms: list[tuple[Tensor, Tensor]], grad: Tensor) -> Block:
    """Compute a block's forward, up to its last norm."""
    layers: list[Layer] = []
    branch = images
    for weight, (scale_C, shift_C) in zip(weights, norms, strict=True):
        convolved = F.conv2d(branch, weight, padding=weight.shape[2] // 2)
        mean_C, inverse_std_C = moments(convolved)
        layers.append(
            Layer(
                images=branch,
                weight=weight,
                convolved=convolved,
                scale_C=scale_C,
                shift_C=shift_C,
                mean_C=mean_C,
                inverse_std_C=inverse_std_C,
            )
        )
        branch = normalized(*layers[-1].norm).relu().to(images.dtype)
    return Block(layers=(layers[0], layers[1], layers[2]), grad=grad)


def random_block(width: int, side: int, batch: int, *, dtype: torch.dtype, device: torch.device) -> Block:
    """Make a block whose norms leave some values positive and some negative."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, device=device)
        return values.to(dtype, memory_format=torch.channels_last) if len(shape) == 4 else values

    shapes = [(width, 4 * width, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
    weights = [draw(*shape) / (shape[1] * shape[2] ** 2) ** 0.5 for shape in shapes]
    norms = [(1 + 0.1 * draw(shape[0]), 0.1 * draw(shape[0])) for shape in shapes]
    return block_of(draw(batch, 4 * width, side, side).relu(), weights, norms, draw(batch, 4 * width, side, side))


def by_autograd(block: Block, dtype: torch.dtype) -> Values:
    """Compute the gradients of a block by torch's autograd."""
    first = block.layers[0]
    given = {"images": first.images}
    for number, layer in enumerate(block.layers, 1):
        own = {
            f"conv{number}.weight": layer.weight,
            f"bn{number}.weight": layer.scale_C,
            f"bn{number}.bias": layer.shift_C,
        }
        given |= own
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items()}
    branch = leaves["images"]
    for number in (1, 2, 3):
        weight = leaves[f"conv{number}.weight"]
        branch = F.conv2d(branch, weight, padding=weight.shape[2] // 2)
        branch = F.batch_norm(
            branch, None, None, leaves[f"bn{number}.weight"], leaves[f"bn{number}.bias"], True, eps=EPS
        )
        branch = branch.relu() if number < 3 else (branch + leaves["images"]).relu()
    grads = torch.autograd.grad(branch, list(leaves.values()), block.grad.to(dtype))
    return dict(zip(leaves, grads, strict=True))


def by_hand(device: torch.device) -> Comparison:
    """Compare a small block with autograd."""
    block = random_block(8, 6, 4, dtype=torch.float32, device=device)
    return Comparison(
        name="by hand and by autograd, 4 images of 6 x 6",
        today=partial(by_autograd, block, torch.float32),
        new=block.backward,
        exact=partial(by_autograd, block, torch.float64),
        elements=block.grad.numel(),
        today_bytes=BYTES,
        new_bytes=BYTES,
        today_launches=LAUNCHES,
        new_launches=LAUNCHES,
        # a GPU's kernels and the formula add the same fp32 values in different orders
        worst=3,
        enough_fp32=64,
        is_timed=False,
    )


def beside(name: str, batch: int, device: torch.device) -> Comparison:
    """Compare a block of ResNet-50 on two streams with one stream."""
    block = random_block(*LAYERS[name], batch, dtype=torch.bfloat16, device=device)
    compiled = {
        "middle": compiled_as_today(relu_norm_backward, device),
        "end": compiled_as_today(end_backward, device),
    }
    stream = SecondStream(device)

    def new() -> Values:
        found = block.backward(stream.start, **compiled)
        stream.join()
        return found

    return Comparison(
        name=f"{name}, {batch} images",
        today=partial(block.backward, **compiled),
        new=new,
        has_same_bits=True,
        elements=block.grad.numel(),
        today_bytes=BYTES,
        new_bytes=BYTES,
        today_launches=LAUNCHES,
        new_launches=LAUNCHES,
    )


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare with autograd, and on a GPU the blocks that differ on two streams with one."""
    yield by_hand(device)
    if device.type == "cuda":
        for batch in (2,) if is_small else (256, 32):
            for name in LAYERS:
                yield beside(name, batch, device)


PROTOTYPE = Prototype(
    name="weight_gradients",
    item=3,
    change="gradients of weights on a second stream of the captured step",
    expected_ms=(1.0, 3.0),
    comparisons=comparisons,
)

if __name__ == "__main__":
    main(PROTOTYPE)
