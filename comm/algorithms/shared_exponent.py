"""fp32 values as int8 with a power of two for each block: a quarter of the bytes, and no state between steps."""

import torch
from torch import Tensor

BLOCK = 32
"""Values that share an exponent."""
NOT_FINITE = 255
"""The exponent's byte, as fp32 has it, of a block that holds infinity or NaN: all of it becomes one of them."""


def num_bytes(num_values: int) -> int:
    """Return the bytes of so many values: one each, and one for each block."""
    return num_values + -(-num_values // BLOCK)


def encode_(coded_C: Tensor, values_N: Tensor) -> Tensor:
    """Write values into coded_C (int8, of num_bytes), as multiples of the blocks' powers of two, then these.

    A value is off by at most 1/128 of the largest of its block; whole numbers up to 127 are exact, beside each other.
    The format is MXINT8's (OCP Microscaling Formats 1.0), but for the order of bytes and -128, which is not used.
    """
    count = values_N.numel()
    for start, end, first in _runs(count):
        values_BS = values_N[start:end].view(-1, min(BLOCK, end - start))
        # fp32's own exponent of the largest: [2^6, 2^7) times the block's power of two
        byte_B = (values_BS.abs().amax(dim=1).view(torch.int32) >> 23) & NOT_FINITE
        byte_B = torch.where(byte_B == NOT_FINITE, NOT_FINITE, (byte_B - 6).clamp_(min=1))
        inverse_B = _power(NOT_FINITE - 1 - byte_B.clamp(max=NOT_FINITE - 1))
        scaled_BS = (values_BS * inverse_B[:, None]).round_().clamp_(-127, 127)
        coded_C[start:end].view(scaled_BS.shape).copy_(scaled_BS)
        coded_C[count + first : count + first + len(byte_B)].view(torch.uint8).copy_(byte_B)
    return coded_C


def decode(values_N: Tensor, coded_C: Tensor) -> Tensor:
    """Write what coded_C holds into values_N: one product each, whose bits are the same everywhere."""
    count = values_N.numel()
    for start, end, first in _runs(count):
        byte_B = coded_C[count + first : count + first + -(-(end - start) // BLOCK)].view(torch.uint8)
        power_B = _power(byte_B.to(torch.int32))
        coded_BS = coded_C[start:end].view(len(power_B), -1)
        torch.mul(coded_BS, power_B[:, None], out=values_N[start:end].view(coded_BS.shape))
    return values_N


def _power(byte_B: Tensor) -> Tensor:
    """Return 2^(byte - 127) in fp32, of which the byte is the exponent; infinity for 255."""
    return (byte_B << 23).view(torch.float32)


def _runs(count: int) -> list[tuple[int, int, int]]:
    """Cut values into whole blocks and the rest: first value, end, first block."""
    whole = count // BLOCK * BLOCK
    return [run for run in ((0, whole, 0), (whole, count, whole // BLOCK)) if run[0] < run[1]]
