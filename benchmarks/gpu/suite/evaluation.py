"""An evaluation of a whole validation set beside its decoding alone."""

from contextlib import closing

from benchmarks.gpu.suite.context import Context, Found
from benchmarks.gpu.suite.images import like_imagenet, small_images
from benchmarks.gpu.suite.job import Job, seconds_of, settings_for
from benchmarks.gpu.suite.torchvision_peer import num_workers
from benchmarks.record import ratios
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.inference.accuracy import evaluate
from bigbatch.trainer.input.loaders import dali
from bigbatch.trainer.input.shards import open_split

ROUNDS = 3
"""Most rounds: each takes a minute or more."""


def measure(context: Context) -> Found:
    """Time the loader alone, and the evaluation, in turn; the first round is discarded."""
    found, size = Found(), context.size
    made = small_images if context.is_small else lambda scratch: like_imagenet(scratch, num_images=size.eval_images)
    root = context.data or made(context.scratch)
    loader = "dali" if dali.is_installed() else "torchvision"
    images = {
        "data.loader": loader,
        "data.root": str(root),
        "data.num_synthetic_samples": None,
        "data.num_classes": len(open_split(root, "train").classes),
        "data.num_threads": num_workers(context),
    }
    job = Job(settings_for(size, batch=size.batch, precision=context.precision) | images)

    def drain() -> None:
        for _ in build_input.eval_batches(job.config, job.communicator, job.eval_split):
            pass

    def whole() -> None:
        evaluate(
            job.parts.model,
            build_input.eval_batches(job.config, job.communicator, job.eval_split),
            normalize=job.parts.normalize,
            communicator=job.communicator,
            num_samples=job.eval_split.num_samples,
        )

    with closing(job):
        rounds = [
            [seconds_of(action, device=context.device) for action in (drain, whole)]
            for _ in range(1 + min(ROUNDS, size.rounds))
        ]
    drained, evaluated = zip(*rounds[1:], strict=True)
    num = job.eval_split.num_samples
    found.add(f"{loader} alone, {num:,} images", drained, unit="s")
    found.add(f"evaluation with {loader}, {num:,} images", evaluated, unit="s")
    found.add("evaluation / decoding", ratios(evaluated, drained), unit="ratio")
    return found
