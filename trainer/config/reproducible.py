"""Check that run.reproducible can give the same bits."""

from collections.abc import Iterator

from bigbatch.trainer.config.batch import ranks_per_ghost
from bigbatch.trainer.config.sections import BatchConfig, CommConfig, ComputeConfig, RunConfig


def check_reproducible(run: RunConfig, batch: BatchConfig, compute: ComputeConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error for each setting that gives other bits on another number of ranks."""
    if not run.reproducible:
        return
    if ranks_per_ghost(batch) > 1:
        yield (
            f"run.reproducible=True needs each ghost batch on one rank: set batch.bn_span={batch.bn_span} to at most "
            f"batch.microbatch_size={batch.microbatch_size}"
        )
    refused = (
        ("compute.compile", compute.compile, "null", "chooses kernels by the machine"),
        ("compute.cuda_graph", compute.cuda_graph or None, "false", "has not been tried with sums on a grid"),
        ("comm.wire_dtype", comm.wire_dtype, "null", "rounds gradients, and sums of integers must not be rounded"),
    )
    for key, value, remedy, why in refused:
        if value is not None:
            yield f"run.reproducible=True cannot keep {key}={value}, which {why}: set it to {remedy}"
