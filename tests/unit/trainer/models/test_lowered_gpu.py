"""Code that the compiler writes for a GPU, on a machine without one: it compiles, with few launches and bytes."""

from pathlib import Path

import pytest
import torch
from lowered_regions import IS_PINNED, lowered
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace
from torch.utils._triton import has_triton_package

from benchmarks.gpu.prototypes import settings, two_blocks

MOST = {
    "stem": ((9, 1.984), (7, 2.209)),
    "layer1.0": ((21, 2.672), (17, 4.624)),
    "layer1.1": ((17, 2.466), (16, 4.933)),
    "layer2.0": ((21, 1.798), (17, 4.162)),
    "layer2.1": ((17, 1.233), (16, 2.466)),
    "layer3.0": ((19, 0.900), (17, 2.081)),
    "layer3.1": ((15, 0.617), (16, 1.233)),
    "layer4.0": ((19, 0.450), (17, 1.041)),
    "layer4.1": ((15, 0.308), (16, 0.617)),
    "head": ((1, 0.051), (5, 0.051)),
    "layer1.1+layer1.2": ((34, 4.727), (31, 10.893)),
}
"""Region of ResNet-50 -> most launches and GB of its own kernels, in forward and in backward.

256 images in bf16, four ghost batches; layerN.1 is a residual block with three norms, layerN.0 has a fourth one. The
last row is two blocks as one region, which no run compiles: benchmarks/gpu/prototypes/two_blocks.py compares it.
Convolutions and products are of libraries and not counted. A change that lowers a number lowers its limit here.
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["stem"], marks=pytest.mark.long),
        pytest.param([name for name in MOST if name != "stem"], marks=pytest.mark.weekly),
    ],
)
@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
@pytest.mark.skipif(not IS_PINNED, reason="the limits are those of the pinned torch")
def test_regions_for_a_gpu_have_at_most_these_launches_and_bytes(names: list[str], tmp_path: Path) -> None:
    rows = lowered("cubins=1", *names, num_regions=len(names), folder=tmp_path)
    assert list(rows) == names
    for name in names:
        for way, (most_launches, most_gb) in zip(("forward", "backward"), MOST[name], strict=True):
            counted = rows[name][way]
            assert 0 < counted["cubins"] <= counted["launches"], "one for each kernel, which may be launched again"
            assert 0 < counted["launches"] <= most_launches, (name, way, counted)
            assert 0 < counted["gb"] <= most_gb * 1.001, (name, way, counted)


@pytest.mark.skipif(not IS_PINNED, reason="a decision states what the pinned torch does")
def test_compilers_key_holds_the_index_of_the_gpu() -> None:
    """So ranks that see several GPUs compile each for its own; one that sees a single GPU loads what another wrote."""
    keys = []
    for index in (0, 0, 1):
        with FakeTensorMode(allow_non_fake_inputs=True):
            images = torch.empty(4, device=f"cuda:{index}")
            keys.append(compiled_fx_graph_hash(symbolic_trace(lambda images: images.relu()), [images], {}, [])[0])
    assert keys[0] == keys[1] != keys[2]


def test_prototype_of_two_blocks_states_what_is_lowered() -> None:
    one, two = ([sum(way[kind] for way in MOST[name]) for kind in (0, 1)] for name in ("layer1.1", "layer1.1+layer1.2"))
    bytes_per_element = [1e9 * each[1] / (256 * 256 * 56 * 56) for each in (one, two)]
    assert (one[0], pytest.approx(bytes_per_element[0], rel=1e-3)) == two_blocks.ONE
    more = pytest.approx(bytes_per_element[1] - 2 * bytes_per_element[0], abs=0.05)
    assert (two[0] - 2 * one[0], more) == two_blocks.BORDER


@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
def test_prototype_of_a_blocks_end_states_what_is_lowered() -> None:
    """layer3.1 has three norms of as many launches, and in backward the border's."""
    from benchmarks.gpu.prototypes.block_end import TODAY, TODAY_BYTES

    (forward, _), (backward, _) = MOST["layer3.1"]
    assert (forward, backward) == (3 * TODAY[4][0], 3 * (TODAY[4][1] - 1) + 1)
    # the two other norms have a quarter of the channels; each is read twice and written, in bf16, and in backward with
    # its gradient
    others = (2 * 6 / 4, 2 * 10 / 4)
    for name, elements in (("layer1.1", 256 * 256 * 56**2), ("layer3.1", 256 * 1024 * 14**2)):
        for way, own, rest in zip(MOST[name], TODAY_BYTES, others, strict=True):
            assert own + rest == pytest.approx(1e9 * way[1] / elements, rel=2e-3)
    assert sum(TODAY_BYTES) + sum(others) == settings.BYTES
