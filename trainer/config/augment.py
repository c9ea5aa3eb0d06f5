"""Check that the augmentations fit each other, the batch and the image sizes."""

from collections.abc import Iterator

from bigbatch.trainer.config.batch import ranks_per_ghost
from bigbatch.trainer.config.sections import AugmentConfig, BatchConfig, DataConfig

SMALLEST_SHARPENED = 3
"""Smallest side, in pixels, for one of RandAugment's operations."""

SMALLEST_IMAGE = {"resnet9": 8, "alexnet_bn": 63}
"""Smallest side, in pixels, that reaches a model's last pooling; the ResNets take any."""


def check_augment(augment: AugmentConfig, batch: BatchConfig) -> Iterator[str]:
    """Yield an error for each augmentation that contradicts another or the batch."""
    if (augment.randaugment_ops == 0) != (augment.randaugment_magnitude is None):
        remedy = "give one, 9 is usual" if augment.randaugment_ops else "set it to null"
        yield (
            f"augment.randaugment_magnitude={augment.randaugment_magnitude} does not go with "
            f"augment.randaugment_ops={augment.randaugment_ops}: {remedy}"
        )
    if (augment.randaugment_magnitude or 0) > 30:
        yield f"augment.randaugment_magnitude={augment.randaugment_magnitude} must be at most 30"
    if augment.cutout_size % 2:
        yield f"augment.cutout_size={augment.cutout_size} must be even: {augment.cutout_size + 1} is"
    if (augment.mixup_alpha or augment.cutmix_alpha) and batch.bn_span < 2:
        yield "augment.mixup_alpha and augment.cutmix_alpha mix within a ghost batch: batch.bn_span=1 leaves none"
    if (augment.mixup_alpha or augment.cutmix_alpha) and ranks_per_ghost(batch) > 1:
        yield (
            f"augment.mixup_alpha={augment.mixup_alpha} and augment.cutmix_alpha={augment.cutmix_alpha} mix within a "
            f"ghost batch, which batch.bn_span={batch.bn_span} spreads over ranks of "
            f"batch.microbatch_size={batch.microbatch_size}: set both to 0"
        )


def check_image_size(data: DataConfig, augment: AugmentConfig, *, model: str) -> Iterator[str]:
    """Yield an error for each image size that is too small for the model or an augmentation."""
    needs = [(SMALLEST_IMAGE.get(model, 1), f"model.name={model}")]
    if augment.randaugment_ops:
        needs.append((SMALLEST_SHARPENED, f"augment.randaugment_ops={augment.randaugment_ops}"))
    train_sizes = [("train_sizes", size) for _, size in data.train_sizes or () if size > 0]
    for key, size in [("image_size", data.image_size), *train_sizes]:
        for smallest, who in needs:
            if size < smallest:
                yield f"data.{key}={size} is too small for {who}: give at least {smallest}"
