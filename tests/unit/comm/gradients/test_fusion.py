"""Which gradients share a buffer."""

import random

import pytest

from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, PlanSizes, TensorSpec


def spec(name: str, num_bytes: int, dtype: str = "float32") -> TensorSpec:
    element_bytes = {"float32": 4, "float16": 2}[dtype]
    return TensorSpec(name, num_bytes // element_bytes, element_bytes, dtype)


def names(plan: FusionPlan) -> list[str]:
    """Each buffer as one word: the names of its gradients, which are single letters here."""
    return ["".join(tensor.name for tensor in buffer.tensors) for buffer in plan.buffers]


@pytest.mark.parametrize(
    ("tensors", "sizes", "expected"),
    [
        ([], (100, 100), []),
        ([spec("a", 40), spec("b", 40)], (100, 100), ["ab"]),
        ([spec("a", 40), spec("b", 60)], (100, 100), ["ab"]),  # exactly full
        ([spec("a", 40), spec("b", 64)], (100, 100), ["a", "b"]),
        ([spec(c, 40) for c in "abcde"], (100, 100), ["ab", "cd", "e"]),
        # at the threshold a gradient still shares, above it goes alone, and at once: the shared buffer, which
        # is full later, follows
        ([spec("a", 20), spec("b", 48), spec("c", 20)], (48, 100), ["abc"]),
        ([spec("a", 20), spec("b", 52), spec("c", 20)], (48, 100), ["b", "ac"]),
        ([spec("a", 20), spec("b", 20), spec("c", 52)], (48, 100), ["ab", "c"]),
        # one dtype per buffer, ordered by the gradient that is ready last
        ([spec(c, 20, "float16" if c in "bd" else "float32") for c in "abcde"], (100, 100), ["bd", "ace"]),
        # larger than a whole buffer, though not than the threshold
        ([spec("a", 20), spec("b", 200), spec("c", 20)], (400, 100), ["a", "b", "c"]),
        # a smaller first buffer
        ([spec(c, 40) for c in "abcde"], (60, 100, 40), ["a", "bc", "de"]),
        ([spec(c, 40) for c in "abcde"], (60, 100, 79), ["a", "bc", "de"]),
        ([spec(c, 40) for c in "abcde"], (60, 100, 80), ["ab", "cd", "e"]),
        ([spec(c, 40) for c in "abcde"], (60, 100, 1000), ["ab", "cd", "e"]),  # never larger than the others
        ([spec(c, 40) for c in "ab"], (60, 100, 4), ["a", "b"]),  # a gradient is not cut
        # one that goes alone is not the first to be shared
        ([spec("a", 80), spec("b", 20), spec("c", 20), spec("d", 20)], (60, 100, 40), ["a", "bc", "d"]),
        # only one of several dtypes starts with a small buffer
        ([spec(c, 40, "float16" if c in "bd" else "float32") for c in "abcd"], (60, 100, 40), ["a", "c", "bd"]),
    ],
)
def test_plan_puts_neighbours_together(tensors: list[TensorSpec], sizes: tuple[int, ...], expected: list[str]) -> None:
    assert names(PlanSizes(*sizes).plan(tensors)) == expected


@pytest.mark.parametrize("seed", range(12))
def test_plan_keeps_its_rules_for_any_tensors(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [4 * draw.choice((1, 7, 30, 200)) for _ in range(draw.randrange(40))]
    tensors = [spec(f"t{i}", size, draw.choice(("float32", "float16"))) for i, size in enumerate(sizes)]
    threshold, limit = draw.choice((50, 100, 1000)), draw.choice((100, 300))
    first = draw.choice((None, 8, 120))
    place = {tensor.name: i for i, tensor in enumerate(tensors)}
    plan = PlanSizes(threshold, limit, first).plan(tensors)

    sent = [tensor for buffer in plan.buffers for tensor in buffer.tensors]
    assert sorted(sent, key=lambda t: place[t.name]) == tensors  # every gradient exactly once, unchanged
    last_ready = []
    for buffer in plan.buffers:
        order = [place[tensor.name] for tensor in buffer.tensors]
        assert order == sorted(order)
        last_ready.append(order[-1])
        assert len({tensor.dtype for tensor in buffer.tensors}) == 1
        if len(buffer.tensors) > 1:
            assert sum(tensor.num_elements * tensor.element_bytes for tensor in buffer.tensors) <= limit
            assert all(tensor.num_bytes <= threshold for tensor in buffer.tensors)
    assert last_ready == sorted(last_ready)
    sharing = [tensor for tensor in tensors if tensor.num_bytes <= threshold]
    if first and sharing and len({tensor.dtype for tensor in sharing}) == 1:
        opener = next(buffer for buffer in plan.buffers if sharing[0] in buffer.tensors)
        assert opener.num_bytes <= max(first, sharing[0].num_bytes)


def test_fusion_plan_has_sizes_and_text() -> None:
    buffer = BufferPlan((spec("fc.weight", 2_000_000), spec("fc.bias", 4_000)))
    assert (buffer.num_bytes, buffer.num_elements) == (2_004_000, 501_000)
    assert str(buffer) == "fc.weight and 1 more, 2 MB float32"
    assert str(FusionPlan((BufferPlan((spec("w", 4_000, "float16"),)), buffer))) == (
        "buffer 0: w, 0.004 MB float16\nbuffer 1: fc.weight and 1 more, 2 MB float32"
    )


@pytest.mark.parametrize("name", ["threshold_bytes", "buffer_bytes", "first_buffer_bytes"])
def test_plan_refuses_sizes_that_are_not_positive(name: str) -> None:
    sizes = {"threshold_bytes": 1, "buffer_bytes": 1, "first_buffer_bytes": 1, name: 0}
    with pytest.raises(ValueError, match=rf"^{name}=0\b"):
        PlanSizes(**sizes)
