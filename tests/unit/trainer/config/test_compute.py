"""Which settings of the computation go together, and that each remedy is legal."""

import re

import pytest
from error_texts import naming

from bigbatch.trainer.config.checks import RESIDUAL_BLOCKS
from tests.unit.trainer.config.test_schema import make_config, refusal

ALEXNET = {"model.name": "alexnet_bn", "data.image_size": 63}


@pytest.mark.parametrize("name", ["resnet9", "resnet18", "resnet50", "resnet152"])
def test_recomputed_blocks_are_at_most_all(name):
    model = {"model.name": name}
    most = RESIDUAL_BLOCKS[name]
    text = refusal(model | {"compute.recomputed_blocks": most + 1})
    assert re.search(naming(f"compute.recomputed_blocks={most + 1},", f"model.name={name} "), text)
    assert text.endswith(f" {most}")
    make_config(model | {"compute.recomputed_blocks": most})


def test_recomputed_blocks_of_alexnet_are_none():
    text = refusal(ALEXNET | {"compute.recomputed_blocks": 1})
    assert re.search(naming("compute.recomputed_blocks=1", "model.name=alexnet_bn"), text)
    assert text.endswith(" 0")
    make_config(ALEXNET | {"compute.recomputed_blocks": 0})


def test_compile_fallback_is_of_what_is_compiled():
    text = refusal({"compute.compile_fallback": True})
    assert text.startswith("compute.compile_fallback=True ")
    assert text.endswith(" false")
    make_config({"compute.compile_fallback": True, "compute.compile": "max-autotune"})


def test_compile_refuses_ranks_that_share_ghost_batches():
    """BASE has microbatches of 64 images."""
    shared = {"batch.bn_span": 128}
    text = refusal({"compute.compile": "default"} | shared)
    assert re.search(naming("compute.compile to null", "batch.bn_span to at most 64"), text)
    make_config(shared)
    make_config({"compute.compile": "default", "batch.bn_span": 64})
