"""What goes together in the computation of forward and backward."""

from bigbatch.trainer.config_batch import ranks_per_ghost
from bigbatch.trainer.config_sections import BatchConfig, ComputeConfig
from bigbatch.trainer.errors import ConfigError

RESIDUAL_BLOCKS = {
    "resnet18": 8,
    "resnet34": 16,
    "resnet50": 16,
    "resnet101": 33,
    "resnet152": 50,
    "resnet9": 2,
    "alexnet_bn": 0,
}


def check_compute(compute: ComputeConfig, batch: BatchConfig, *, model: str) -> None:
    """Raises: ConfigError."""
    if compute.compile is None and compute.compile_fallback:
        raise ConfigError("compute.compile_fallback=True has no meaning without compute.compile: set it to false")
    if compute.compile is not None and ranks_per_ghost(batch) > 1:
        raise ConfigError(
            f"compute.compile={compute.compile} cannot have ranks exchange statistics within a graph, which "
            f"batch.bn_span={batch.bn_span} over ranks of batch.microbatch_size={batch.microbatch_size} needs: set "
            f"compute.compile to null, or batch.bn_span to at most {batch.microbatch_size}"
        )
    num_blocks = RESIDUAL_BLOCKS[model]
    if compute.recomputed_blocks > num_blocks:
        has = f"{num_blocks} residual blocks: give at most {num_blocks}" if num_blocks else "none: set it to 0"
        raise ConfigError(f"compute.recomputed_blocks={compute.recomputed_blocks}, but model.name={model} has {has}")
