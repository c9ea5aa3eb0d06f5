"""Write a recipe for the user's images, which extends a packaged experiment."""

from collections.abc import Mapping

from bigbatch.tools.init.like import Stated, starting_point, words_of
from bigbatch.tools.init.measure import BACKGROUND, SampleStatistics
from bigbatch.trainer.config.batch_remedy import largest_divisor
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.datasets.check import Spread

MIN_STEPS = 8
"""Least updates per epoch: with fewer, the recipe has a smaller batch than its base."""
MIN_BATCH = 16
"""Smallest global batch, if there are as many images: a smaller one leaves batch norm too few."""


def recipe_text(
    like: str,
    measured: SampleStatistics,
    *,
    root: str,
    num_classes: int,
    counts: Mapping[str, int],
    seed: int,
    max_megapixels: float = DataConfig.max_megapixels,
) -> str:
    """Return the recipe's text. counts: split -> number of images; max_megapixels: the requested limit of an image.

    like: as for starting_point. Raises: ConfigError if it does not fit such images; as starting_point.
    """
    like, start = starting_point(like)
    base = load_config(["--config", like, *words_of(start)])
    batch = base.batch.global_batch_size
    sizes = _batch(base, num_train=counts["train"])
    stated: Stated = {
        **start,
        "data": {
            **start.get("data", {}),
            "root": (root, ""),
            "num_classes": (num_classes, ""),
            "image_size": _image_size(base, measured.short_side_pixels),
        },
        "batch": {
            "global_batch_size": (sizes[0], f"{counts['train'] // sizes[0]:,} steps in an epoch"),
            "microbatch_size": (sizes[1], ""),
            "bn_span": (sizes[2], ""),
        },
    }
    of = f"of {measured.num_usable:,} images"
    if measured.num_rotated:
        stated["data"]["exif_orientation"] = (True, f"{measured.num_rotated:,} {of} state a rotation")
    if measured.num_transparent:
        stated["data"]["background"] = (BACKGROUND, f"{measured.num_transparent:,} {of} are partly transparent")
    if max_megapixels != base.data.max_megapixels:
        stated["data"]["max_megapixels"] = (max_megapixels, "")
    constant = "; 1 for a channel that is the same everywhere" if min(measured.std) < 0.00005 else ""
    if base.model.weights is None:  # else weights need the mean and std that they were trained with
        stated["data"] |= {
            "mean": (
                [round(value, 4) for value in measured.mean],
                f"of {measured.num_averaged:,} training images, seed {seed}",
            ),
            # a channel that is constant stays so: 0 would divide by 0
            "std": ([round(value, 4) or 1.0 for value in measured.std], f"the same{constant}"),
        }
    if sizes[0] != batch:
        base_lr = base.schedule.base_lr
        stated["schedule"] = {"base_lr": (base_lr * sizes[0] / batch, f"{base_lr:g} x {sizes[0]} / {batch}")}
    load_config(["--config", like, *words_of(stated)])  # raises ConfigError before anything is written
    lines = [
        f"# {num_classes:,} classes, {counts['train']:,} training and {counts['val']:,} validation images, "
        "examined by `bigbatch init`.",
        f"base: {like}",
    ]
    for section, keys in stated.items():
        lines.append(f"{section}:")
        lines += [f"  {key}: {as_yaml(value)}{f' # {why}' if why else ''}" for key, (value, why) in keys.items()]
    return "\n".join(lines) + "\n"


def _image_size(base: Config, short_side: Spread) -> tuple[int, str]:
    """Return the base's size, or a smaller multiple of 32 to which half of the images need no enlarging; and why."""
    why = f"the median of the shorter sides is {short_side.median:,.0f} pixels"
    if base.data.crop == "padded" or base.data.train_sizes or short_side.median >= base.data.image_size:
        return base.data.image_size, f"the base's; {why}"
    return max(32, int(short_side.median) // 32 * 32), why


def _batch(base: Config, *, num_train: int) -> tuple[int, int, int]:
    """Return global batch, microbatch and bn_span: the base's, or smaller ones if an epoch would have too few steps."""
    batch = base.batch
    if num_train // batch.global_batch_size >= MIN_STEPS:
        return batch.global_batch_size, batch.microbatch_size, batch.bn_span
    # a power of two, so that one, two and more ranks can share it
    wanted = max(num_train // MIN_STEPS, min(MIN_BATCH, num_train), 1)
    size = 1 << (wanted.bit_length() - 1)
    micro = largest_divisor(size, min(batch.microbatch_size, max(1, size // 2)))
    return size, micro, largest_divisor(micro, min(batch.bn_span, micro))
