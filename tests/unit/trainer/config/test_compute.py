"""Which settings of the computation go together, and that each remedy is legal."""

import pytest

from bigbatch.trainer.config.compute import RESIDUAL_BLOCKS
from tests.unit.trainer.config.test_schema import make_config, refusal

RESNET = {
    **dict.fromkeys(("model.width", "model.pool_first", "model.logit_scale")),
    "model.zero_gamma": True,
    "model.blurpool": False,
}
ALEXNET = {
    **dict.fromkeys(("model.width", "model.pool_first", "model.logit_scale")),
    "model.name": "alexnet_bn",
    "data.image_size": 63,
}


@pytest.mark.parametrize("name", ["resnet9", "resnet18", "resnet50", "resnet152"])
def test_at_most_all_blocks_are_recomputed(name):
    model = {"model.name": name, **(RESNET if name != "resnet9" else {})}
    most = RESIDUAL_BLOCKS[name]
    assert f"{most} residual blocks: give at most {most}" in refusal(model | {"compute.recomputed_blocks": most + 1})
    make_config(model | {"compute.recomputed_blocks": most})


def test_alexnet_has_no_block_to_recompute():
    text = refusal(ALEXNET | {"compute.recomputed_blocks": 1})
    assert text == "compute.recomputed_blocks=1, but model.name=alexnet_bn has none: set it to 0"
    make_config(ALEXNET | {"compute.recomputed_blocks": 0})


def test_what_is_not_compiled_needs_no_fallback():
    assert refusal({"compute.compile_fallback": True}).endswith("set it to false")
    make_config({"compute.compile_fallback": True, "compute.compile": "max-autotune"})


def test_ranks_that_share_ghost_batches_are_not_compiled():
    """BASE has microbatches of 64 pictures."""
    shared = {"batch.bn_span": 128}
    text = refusal({"compute.compile": "default"} | shared)
    assert text.endswith("set compute.compile to null, or batch.bn_span to at most 64")
    make_config(shared)
    make_config({"compute.compile": "default", "batch.bn_span": 64})
