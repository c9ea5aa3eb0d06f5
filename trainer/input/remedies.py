"""Remedies for a slow input, derived from a run's settings."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import AugmentConfig
from bigbatch.trainer.input.storage import url_of

MEMORY = "/dev/shm"
AUGMENTATIONS = tuple(field.name for field in fields(AugmentConfig) if field.name != "randaugment_magnitude")
"""Keys of the section augment that cost time unless 0."""


def pixels_left(sizes: Iterable[tuple[int, int]], *, max_side: int) -> float:
    """Return the share of pixels left if images (height, width) are shrunk until no shorter side exceeds max_side."""
    pairs = [(height * width, min(1.0, max_side / min(height, width)) ** 2) for height, width in sizes]
    return sum(pixels * share for pixels, share in pairs) / sum(pixels for pixels, _ in pairs)


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Keys of the config and facts of the machine on which remedies depend."""

    loader: str
    num_threads: int
    num_cores: int
    """Cores that each rank may use alone."""
    is_on_gpu: bool
    is_packed: bool
    stage: str | None
    bind_numa: bool
    precision: str
    augmentations: tuple[str, ...]
    """Keys of active augmentations."""
    max_side: int
    """Shorter side to which larger images can be shrunk without harm to the model's image size."""
    pixels_left: float
    """Share of the stored pixels left after shrinking to max_side."""
    is_remote: bool = False
    """Whether the images lie in an object store or on a web server."""


def input_settings(
    config: Config, *, sizes: Iterable[tuple[int, int]], num_cores: int, is_on_gpu: bool, is_packed: bool
) -> InputSettings:
    """Return the settings. sizes: (height, width) of some stored images; is_packed: the images lie in shards."""
    data, some = config.data, list(sizes)
    max_side = 2 * max([data.image_size, *(size for _, size in data.train_sizes or ())])
    return InputSettings(
        loader=data.loader,
        num_threads=data.num_threads,
        num_cores=num_cores,
        is_on_gpu=is_on_gpu,
        is_packed=is_packed,
        is_remote=url_of(data.root) is not None,
        stage=data.stage,
        bind_numa=data.bind_numa,
        precision=config.optimizer.precision,
        augmentations=tuple(f"augment.{key}" for key in AUGMENTATIONS if getattr(config.augment, key)),
        max_side=max_side,
        pixels_left=pixels_left(some, max_side=max_side) if some else 1.0,
    )


def more_threads(settings: InputSettings) -> list[str]:
    """Return the remedy of more threads, if there are cores for them."""
    if settings.num_threads >= settings.num_cores:
        return []
    return [f"raise data.num_threads ({settings.num_threads} now; each rank may use {settings.num_cores} cores)"]


def remedies(stage: str, settings: InputSettings) -> list[str]:
    """Return the remedies of a slow stage, or of "share" if loader and model compete for cores."""
    more_cores = f"give each rank more cores ({settings.num_cores} now)"
    if stage == "read":
        if settings.is_remote:
            return [
                "keep what is read on a disk of each node by data.cache_dir, with a data.cache_gb that holds all of it"
            ]
        if not settings.is_packed:
            return ["pack the images into shards by `bigbatch data pack`, and copy those near the GPU by data.stage"]
        if settings.stage is None:
            return ["copy the shards near the GPU: name a folder of each node's own disk or memory in data.stage"]
        if not settings.stage.startswith(MEMORY):
            return [f"name a faster folder than {settings.stage} in data.stage, such as one in {MEMORY}"]
        # two threads are enough to read from memory
        return more_threads(settings) if settings.num_threads < 2 else [more_cores]
    if stage == "augment":
        some = "some of " if len(settings.augmentations) > 1 else ""
        fewer = [f"leave out {some}{', '.join(settings.augmentations)}"] if settings.augmentations else []
        if not settings.is_on_gpu:
            return fewer or [more_cores]
        return fewer + (["set optimizer.precision to bf16"] if settings.precision in ("fp32", "tf32") else [])
    can_use_gpu = settings.is_on_gpu and settings.loader != "dali"
    on_gpu = ["decode on the GPU by data.loader=dali"] if can_use_gpu else []
    if stage == "copy":
        return [*([] if settings.bind_numa else ["set data.bind_numa to true"]), *on_gpu]
    smaller = []
    if not settings.is_packed and settings.pixels_left <= 0.8:  # packing saves a fifth of the decoding, or more
        share = f"{100 * settings.pixels_left:.0f}% of their pixels are left"
        smaller = [f"shrink the images once by `bigbatch data pack --short-side {settings.max_side}` ({share})"]
    if stage == "decode":
        return [*more_threads(settings), *on_gpu, *smaller] or [more_cores]
    few = settings.num_threads > settings.num_cores
    fewer = [f"lower data.num_threads to {settings.num_cores} ({settings.num_threads} now)"] if few else []
    return [*fewer, *on_gpu, *smaller, more_cores]
