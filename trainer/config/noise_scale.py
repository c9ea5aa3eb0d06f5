"""Check that the gradient noise scale can be measured."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import BatchConfig, ComputeConfig, RunConfig


def check_noise_scale(run: RunConfig, batch: BatchConfig, compute: ComputeConfig) -> Iterator[str]:
    """Yield an error if the run has no gradients of two batch sizes, or hides them in a CUDA graph."""
    if not run.noise_scale_every_steps:
        return
    key = f"run.noise_scale_every_steps={run.noise_scale_every_steps}"
    if batch.bn_span > batch.microbatch_size:
        yield (
            f"{key} needs microbatches of whole ghost batches, as their parts are not independent: set batch.bn_span "
            f"to {batch.microbatch_size}, or batch.microbatch_size to {batch.bn_span}"
        )
    elif batch.global_batch_size < 2 * batch.microbatch_size:
        half = batch.microbatch_size // 2
        yield (
            f"{key} compares microbatches with the global batch, and batch.global_batch_size="
            f"{batch.global_batch_size} is one microbatch: set batch.microbatch_size (and a batch.bn_span above it) to "
            f"{half} or less"
            if half
            else f"{key} compares microbatches with the global batch, which is one image: raise it"
        )
    if compute.cuda_graph:
        yield (
            f"{key} cannot read gradients of replayed steps: set compute.cuda_graph to false, or "
            "run.noise_scale_every_steps to 0"
        )
