"""Check that the settings of forward and backward fit each other."""

from collections.abc import Iterator

from bigbatch.trainer.config.batch import ranks_per_ghost
from bigbatch.trainer.config.optimizer import is_foreign
from bigbatch.trainer.config.sections import BatchConfig, CommConfig, ComputeConfig, OptimizerConfig

RESIDUAL_BLOCKS = {
    "resnet18": 8,
    "resnet34": 16,
    "resnet50": 16,
    "resnet101": 33,
    "resnet152": 50,
    "resnet9": 2,
    "alexnet_bn": 0,
}


def check_compute(compute: ComputeConfig, batch: BatchConfig, *, model: str) -> Iterator[str]:
    """Yield an error for each setting that compilation or recomputation cannot have."""
    if compute.compile is None and compute.compile_fallback:
        yield "compute.compile_fallback=True has no meaning without compute.compile: set it to false"
    if compute.compile is not None and ranks_per_ghost(batch) > 1:
        yield (
            f"compute.compile={compute.compile} cannot have ranks exchange statistics within a graph, which "
            f"batch.bn_span={batch.bn_span} over ranks of batch.microbatch_size={batch.microbatch_size} needs: set "
            f"compute.compile to null, or batch.bn_span to at most {batch.microbatch_size}"
        )
    num_blocks = RESIDUAL_BLOCKS.get(model, 0)
    if compute.recomputed_blocks > num_blocks:
        has = f"{num_blocks} residual blocks: give at most {num_blocks}" if num_blocks else "none: set it to 0"
        yield f"compute.recomputed_blocks={compute.recomputed_blocks}, but model.name={model} has {has}"


def check_cuda_graph(compute: ComputeConfig, optimizer: OptimizerConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error for each setting that a captured step cannot have."""
    if not compute.cuda_graph:
        return
    if is_foreign(optimizer.name):
        yield (
            f"compute.cuda_graph=True cannot capture optimizer.name={optimizer.name}: the host waits for it every "
            "step: set compute.cuda_graph to false"
        )
    if optimizer.name == "shampoo":
        yield (
            "compute.cuda_graph=True cannot capture optimizer.name=shampoo, which computes roots in some steps only: "
            "set it to false"
        )
    if comm.timeline_steps is not None:
        yield (
            f"comm.timeline_steps={list(comm.timeline_steps)} cannot record the steps of compute.cuda_graph=True: "
            "set one of them to null or false"
        )
