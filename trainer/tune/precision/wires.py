"""What each wire does to a gradient: rounded there and back, as the ranks' sums are."""

import math

import torch
from torch import Tensor

from bigbatch.trainer.tune.precision.choices import WireRow
from bigbatch.trainer.tune.precision.magnitudes import FP16_LARGEST

MIN_LARGEST = 2.0**-149
"""Of a gradient that is 0 throughout: the smallest number of fp32."""


def measure_wires(gradient_N: Tensor, *, predivide: float, num_ranks: int) -> list[WireRow]:
    """Round a rank's term of a flat fp32 sum to every wire, and compare.

    predivide: of a second row for fp16, where it is not 1.
    """
    term_N = gradient_N / num_ranks
    rows = [WireRow(None, 1.0, 4.0, 0.0, 0.0, None)]
    for divisor in dict.fromkeys((1.0, predivide)):
        sent_N = (term_N / divisor).to(torch.float16).float() * divisor
        # the sum, which travels last, is the largest
        room = math.log2(FP16_LARGEST * divisor / float(gradient_N.abs().max().clamp_min(MIN_LARGEST)))
        rows.append(_row("float16", divisor, 2.0, term_N, sent_N, headroom=room))
    rows.append(_row("bfloat16", 1.0, 2.0, term_N, term_N.to(torch.bfloat16).float(), headroom=None))
    return rows


def _row(
    wire_dtype: str, predivide: float, num_bytes: float, before_N: Tensor, after_N: Tensor, *, headroom: float | None
) -> WireRow:
    lost = ((after_N == 0) & (before_N != 0)).sum() / max(1, int((before_N != 0).sum()))
    # of fp16 an infinity stays one: its row says so
    error = torch.linalg.vector_norm(after_N - before_N) / torch.linalg.vector_norm(before_N).clamp_min(MIN_LARGEST)
    return WireRow(wire_dtype, predivide, num_bytes, float(lost), float(error), headroom)
