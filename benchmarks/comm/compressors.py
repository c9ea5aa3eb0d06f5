"""Ways to sum gradients with fewer bytes than bf16, played in one process: what every rank would hold after the sum.

A share is what one node brings into a sum, as flat fp32 buffers. int8 here is the product's code; all others are
prototypes that were measured and left out (docs/decisions/100-an-int8-wire.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bigbatch.comm.algorithms import shared_exponent
from bigbatch.comm.gradients.fusion import TensorSpec

Shape = tuple[int, ...]
Code = Callable[[Tensor], Tensor]
"""Rounds values to what the wire carries, and back to fp32."""


def rounded_to(dtype: torch.dtype, values_N: Tensor) -> Tensor:
    """Round to a narrower dtype of torch's, such as bfloat16."""
    return values_N.to(dtype).float()


def shared_int8(values_N: Tensor) -> Tensor:
    """Round by the product's int8."""
    coded_C = torch.empty(shared_exponent.num_bytes(values_N.numel()), dtype=torch.int8)
    return shared_exponent.decode(torch.empty_like(values_N), shared_exponent.encode_(coded_C, values_N))


def scaled_blocks(values_N: Tensor, *, block: int, largest: float, rounded: Code) -> Tensor:
    """Round in blocks, each scaled so that its largest value becomes the largest of the format; an fp32 scale each."""
    padded_BS = torch.nn.functional.pad(values_N, (0, -values_N.numel() % block)).view(-1, block)
    scale_B1 = padded_BS.abs().amax(1, keepdim=True).clamp_min(1e-38) / largest
    return (rounded(padded_BS / scale_B1) * scale_B1).flatten()[: values_N.numel()]


def at_random(values_BS: Tensor) -> Tensor:
    """Round up or down by chance, so that the expected value is exact."""
    return torch.floor(values_BS + torch.rand_like(values_BS))


CODES: dict[str, tuple[Code, float]] = {
    "float32": (lambda values_N: values_N.clone(), 4.0),
    "float16": (partial(rounded_to, torch.float16), 2.0),
    "bfloat16": (partial(rounded_to, torch.bfloat16), 2.0),
    "int8": (shared_int8, shared_exponent.num_bytes(2**20) / 2**20),
    "int8 scaled": (partial(scaled_blocks, block=128, largest=127.0, rounded=torch.round), 1 + 4 / 128),
    "int8 stochastic": (partial(scaled_blocks, block=128, largest=127.0, rounded=at_random), 1 + 4 / 128),
    "e4m3": (
        partial(scaled_blocks, block=128, largest=448.0, rounded=partial(rounded_to, torch.float8_e4m3fn)),
        1 + 4 / 128,
    ),
    "e5m2": (
        partial(scaled_blocks, block=128, largest=57344.0, rounded=partial(rounded_to, torch.float8_e5m2)),
        1 + 4 / 128,
    ),
}
"""Name -> how it rounds, and bytes of a value."""


@dataclass
class Direct:
    """Sums as the product does: each share rounded once, added in fp32, and the sum rounded once.

    feedback: what rounding lost is kept, and added to the next step's share, or sum, of the same place.
    """

    code: Code
    feedback: bool = False
    kept: list[list[Tensor]] = field(default_factory=list)
    """Of each node, and last of the sum: what was lost of each buffer."""

    def __call__(self, shares: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums of the nodes' buffers, as all ranks get them."""
        if self.feedback and not self.kept:
            self.kept = [[torch.zeros_like(buffer_N) for buffer_N in shares[0]] for _ in range(len(shares) + 1)]
        sums = []
        for index in range(len(shares[0])):
            total_N = torch.zeros_like(shares[0][index])
            for node, share in enumerate(shares):
                total_N += self._rounded(share[index], node, index)
            sums.append(self._rounded(total_N, len(shares), index))
        return sums

    def _rounded(self, values_N: Tensor, place: int, index: int) -> Tensor:
        if not self.feedback:
            return self.code(values_N)
        wanted_N = values_N + self.kept[place][index]
        coded_N = self.code(wanted_N)
        torch.sub(wanted_N, coded_N, out=self.kept[place][index])
        return coded_N


@dataclass
class HopByHop:
    """Sums along a ring that decodes, adds and encodes again at each hop."""

    code: Code

    def __call__(self, shares: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums; every part is taken to start at the first node, which changes nothing for its error."""
        sums = [self.code(buffer_N) for buffer_N in shares[0]]
        for share in shares[1:]:
            sums = [self.code(sum_N + buffer_N) for sum_N, buffer_N in zip(sums, share, strict=True)]
        return sums


@dataclass
class Gathered:
    """Gathers all rounded shares on all nodes, which add them: the sum is not rounded, at n / 2 times the bytes."""

    code: Code

    def __call__(self, shares: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums."""
        return [
            torch.stack([self.code(buffer_N) for buffer_N in column]).sum(0) for column in zip(*shares, strict=True)
        ]


@dataclass
class PowerSgd:
    """Sums matrices as products of two thin factors (Vogels et al. 2019, arXiv 1905.13727), with error feedback.

    Both factors are linear in the shares, so what all ranks get depends on the sum of shares and of kept errors alone:
    that sum is what is kept here. Vectors, and matrices that would not shrink, travel in fp32.
    tensors: of each buffer, the shapes of what lies in it, in order.
    """

    tensors: Sequence[Sequence[Shape]]
    rank: int
    factors: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __call__(self, shares: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums."""
        sums = [torch.stack(list(column)).sum(0) for column in zip(*shares, strict=True)]
        for index, (sum_N, shapes) in enumerate(zip(sums, self.tensors, strict=True)):
            parts_N = sum_N.split([numel(shape) for shape in shapes])
            for number, (part_N, shape) in enumerate(zip(parts_N, shapes, strict=True)):
                if shrinks(shape, self.rank):
                    self._approximate_(part_N.view(shape[0], -1), (index, number))
        return sums

    def _approximate_(self, matrix_NM: Tensor, key: tuple[int, int]) -> None:
        if key not in self.kept:
            generator = torch.Generator().manual_seed(key[0] << 16 | key[1])
            self.factors[key] = torch.randn(matrix_NM.shape[1], self.rank, generator=generator)
            self.kept[key] = torch.zeros_like(matrix_NM)
        wanted_NM = matrix_NM + self.kept[key]
        left_NR = torch.linalg.qr(wanted_NM @ self.factors[key]).Q
        self.factors[key] = wanted_NM.T @ left_NR
        matrix_NM.copy_(left_NR @ self.factors[key].T)
        torch.sub(wanted_NM, matrix_NM, out=self.kept[key])


def numel(shape: Shape) -> int:
    """Count the values of a shape."""
    return int(torch.Size(shape).numel())


def shrinks(shape: Shape, rank: int) -> bool:
    """Tell whether two factors of that rank are smaller than the matrix: rows are the first dimension."""
    return len(shape) > 1 and rank * (shape[0] + numel(shape) // shape[0]) < numel(shape)


def power_sgd_bytes(shapes: Sequence[Shape], rank: int) -> int:
    """Count the bytes that stand for all gradients once: both factors, and what is not factored, in fp32."""
    return sum(
        4 * (rank * (shape[0] + numel(shape) // shape[0]) if shrinks(shape, rank) else numel(shape)) for shape in shapes
    )


def matrix_shapes(specs: Sequence[TensorSpec], shapes: dict[str, Shape]) -> list[Shape]:
    """List the shapes of a buffer's tensors, in their order."""
    return [shapes[spec.name] for spec in specs]
