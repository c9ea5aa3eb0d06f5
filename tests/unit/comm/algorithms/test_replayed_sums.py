"""The replay of sums over many ranks, held against the algorithms themselves over ranks that are threads."""

from itertools import product

import pytest
import replayed_sums
import torch
from replayed_sums import draw
from thread_ranks import sum_by_threads

from bigbatch.comm.algorithms.hierarchical import doubling_allreduce_
from bigbatch.comm.algorithms.ring import ring_allreduce_
from bigbatch.comm.algorithms.wire import Wire

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WIRES = [
    (dtype, Wire(wire_dtype, predivide, in_fp32=in_fp32))
    for dtype, wire_dtype, predivide in ((BF16, None, 1.0), (FP16, None, 1.0), (FP32, BF16, 1.0), (FP32, FP16, 3.0))
    for in_fp32 in (False, True)
]


@pytest.mark.parametrize(("dtype", "wire"), WIRES, ids=str)
@pytest.mark.parametrize("name", ["ring", "doubling"])
def test_replay_ends_with_the_bits_of_the_algorithm(name: str, dtype: torch.dtype, wire: Wire) -> None:
    algorithm = {"ring": ring_allreduce_, "doubling": doubling_allreduce_}[name]
    for num_ranks, num_others in product((1, 2, 3, 4, 7), (0, 2)):
        own_MN = draw(num_ranks, 101, noise=1.0).to(dtype)
        # sum_by_threads gives all ranks the same others
        others = [other_N.to(dtype) for other_N in draw(num_others + 1, 101, noise=2.0)[1:]]
        spread = [other_N.expand(num_ranks, -1).clone() for other_N in others]
        replayed_N = getattr(replayed_sums, name)(own_MN.clone(), spread, wire=wire)
        sum_by_threads(algorithm, ranks := list(own_MN.clone()), wire=wire, others=others)
        for rank_N in ranks:
            assert torch.equal(rank_N, replayed_N), f"{num_ranks} ranks, {num_others} others"
