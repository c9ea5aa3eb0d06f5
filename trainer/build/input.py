"""Build the input of a run from its config: splits, loaders, batches and their preparation for the model."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.parts import load, load_named
from bigbatch.trainer.augment.crops import center_crop, padded_crop, random_resized_crop
from bigbatch.trainer.build.images import Images, data_root, num_generated, open_images, require_num_classes
from bigbatch.trainer.checkpoint.class_names import require_same_names
from bigbatch.trainer.config.dotted import is_import_path
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import READERS, AugmentConfig
from bigbatch.trainer.input import order as imagenet
from bigbatch.trainer.input.base import Batch, Crop, ImageSize, ImageSource, Loader, LoaderSetup, Request
from bigbatch.trainer.input.prepare_batch import Normalize, PrepareBatch, memory_format
from bigbatch.trainer.input.report import MeasuredInput, Rates, input_settings
from bigbatch.trainer.machine.host import cores_per_rank
from bigbatch.trainer.step.plan import Plan
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

if TYPE_CHECKING:
    from bigbatch.trainer.input.loaders.probe import ProbedInput

LOADERS = {
    "dali": "bigbatch.trainer.input.loaders.encoded.make_loader",
    "torchvision": "bigbatch.trainer.input.loaders.encoded.make_loader",
    "resident": "bigbatch.trainer.input.loaders.resident.ResidentLoader",
}
"""Loader of images -> import path of what makes it from a LoaderSetup."""
OWN_LOADER = "bigbatch.trainer.input.loaders.own.make_loader"
"""Import path of the same for a data.loader that is an import path."""
SYNTHETIC = "bigbatch.trainer.input.loaders.synthetic.SyntheticLoader"
BALANCED = "bigbatch.trainer.input.balanced.balanced_order"
SHOWN = "bigbatch.trainer.input.shown.ShownImages"
MIX = "bigbatch.trainer.augment.mix.Mix"
AUGMENT = "bigbatch.trainer.augment.pipeline.make_augment"
PROBE = "bigbatch.trainer.input.loaders.probe.probe_input"


@dataclass(frozen=True)
class Split:
    """Holds one part of the data: how many samples, and a loader for them (index is None for generated ones)."""

    num_samples: int
    loader: Loader
    index: ImageSource | None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Return the class names in the order of the labels; None for generated samples."""
        return None if self.index is None else self.index.classes

    def class_counts(self, num_classes: int) -> np.ndarray:
        """Return the number of samples of each class."""
        labels_N = np.arange(self.num_samples) % num_classes if self.index is None else self.index.labels_N
        return np.bincount(labels_N, minlength=num_classes)

    @property
    def digest(self) -> str | None:
        """Return a digest of class names and labels, equal for folders and packed copies; None for generated samples.

        If it differs, positions in an epoch's order refer to other images.
        """
        return None if self.index is None else _digest_of_labels(self.index).hexdigest()[:16]


class Splits(NamedTuple):
    """Training and validation split."""

    train: Split
    val: Split

    @property
    def images(self) -> Images | None:
        """Return the images of both splits; None for generated ones."""
        train, val = self.train.index, self.val.index
        return (train, val) if train is not None and val is not None else None

    def close(self) -> None:
        self.train.loader.close()
        self.val.loader.close()


def make_splits(config: Config, communicator: Communicator, *, listed: Images | None = None) -> Splits:
    """Return training and validation splits. Collective. Raises: DataError; ConfigError.

    listed: the images that an earlier run of the job listed, and on which its ranks agreed; None: list them.
    """
    if config.data.loader == "synthetic":
        return Splits(_synthetic_split(config, communicator, "train"), _synthetic_split(config, communicator, "val"))
    images = listed or list_images(config, communicator.connection)
    assert images is not None
    train_index, val_index = images
    data, seed = config.data, config.run.seed
    if data.crop == "padded":
        crop = padded_crop(seed=seed, size=data.image_size, flip=data.flip)
    else:
        assert data.crop_area_min is not None
        crop = random_resized_crop(seed=seed, scale=(data.crop_area_min, 1.0), flip=data.flip)
    train = _image_split(config, communicator, train_index, crop=crop, image_size=_train_size(config))
    return Splits(train, split_of(config, communicator, val_index))


def make_eval_split(
    config: Config, communicator: Communicator, *, trained: Sequence[str] | None = None, source: str = ""
) -> Split:
    """Return the validation split only, for weights of source that were trained on classes of these names.

    Without trained, labels index the class names of the training split, if there is one.
    Collective. Raises: DataError; ConfigError; CheckpointError if the data has other classes than trained.
    """
    if config.data.loader == "synthetic":
        return _synthetic_split(config, communicator, "val")
    root = data_root(config)
    index = root.open("val", classes=None if trained else root.classes("train"))
    communicator.agree(f"the images in {root.name}", f"{len(index)} validation images ({_digest(index)})")
    if trained:
        require_same_names(
            trained,
            index.classes,
            source=source,
            root=config.data.root,
            remedy="Name data of the same classes in data.root",
        )
    require_num_classes(config, index)
    return split_of(config, communicator, index)


def list_images(config: Config, connection: Connection) -> Images | None:
    """List the images of both splits; None for generated ones. Collective. Raises: DataError; ConfigError."""
    images = open_images(config)
    if images is not None:
        require_num_classes(config, images[0])
        connection.agree(f"the images in {data_root(config).name}", describe_images(images))
    return images


def describe_images(images: Images | None) -> str:
    """Return the counts and digests of both splits; "" for generated images."""
    if images is None:
        return ""
    train, val = images
    return f"{len(train)} training images ({_digest(train)}), {len(val)} validation images ({_digest(val)})"


def _digest(index: ImageSource) -> str:
    """Return a digest of class names, labels and known sizes: equal counts do not prove equal copies."""
    digest = _digest_of_labels(index)
    sizes_N2 = index.sizes(np.arange(len(index)))
    if sizes_N2 is not None:
        digest.update(sizes_N2.tobytes())
    return digest.hexdigest()[:16]


def _digest_of_labels(index: ImageSource) -> "hashlib._Hash":
    digest = hashlib.sha256("\0".join(index.classes).encode("utf-8", "surrogateescape"))
    digest.update(index.labels_N.tobytes())
    return digest


def _train_size(config: Config) -> ImageSize:
    pairs = config.data.train_sizes or ((0, config.data.image_size),)
    return lambda epoch: [size for first, size in pairs if first <= epoch][-1]


def _eval_size(config: Config) -> ImageSize:
    return lambda epoch: config.data.image_size


def _synthetic_split(config: Config, communicator: Communicator, split: Literal["train", "val"]) -> Split:
    loader = load(SYNTHETIC)(
        num_classes=config.data.num_classes,
        image_size=_train_size(config) if split == "train" else _eval_size(config),
        microbatch_size=config.batch.microbatch_size,
        device=communicator.device,
        seed=config.run.seed,
    )
    return Split(num_generated(config, split), loader, None)


def split_of(config: Config, communicator: Communicator, index: ImageSource) -> Split:
    """Make a split of the images of index, cropped and resized as for evaluation."""
    crop = center_crop(fraction=config.data.eval_crop_fraction)
    return _image_split(config, communicator, index, crop=crop, image_size=_eval_size(config))


def _image_split(
    config: Config, communicator: Communicator, index: ImageSource, *, crop: Crop, image_size: ImageSize
) -> Split:
    data, source = config.data, index
    if data.exif_orientation or data.background:
        source = load(SHOWN)(index, data, is_turned=data.loader not in READERS)  # which turn boxes
    setup = LoaderSetup(
        source=source,
        crop=crop,
        image_size=image_size,
        microbatch_size=config.batch.microbatch_size,
        device=communicator.device,
        data=data,
    )
    name = data.loader
    make = load(OWN_LOADER) if is_import_path(name) else load_named(LOADERS, name, key="data.loader")
    return Split(len(index), make(setup), index)


def make_normalize(config: Config, communicator: Communicator) -> Normalize:
    return Normalize(
        mean=config.data.mean,
        std=config.data.std,
        device=communicator.device,
        dtype=COMPUTE_DTYPES[config.optimizer.precision],
        memory_format=memory_format(config.compute),
    )


def make_prepare(config: Config, communicator: Communicator, *, normalize: Normalize) -> PrepareBatch:
    augment = config.augment
    mix = None
    if augment.mixup_alpha or augment.cutmix_alpha:
        mix = load(MIX)(
            seed=config.run.seed,
            num_classes=config.data.num_classes,
            bn_span=config.batch.bn_span,
            mixup_alpha=augment.mixup_alpha,
            cutmix_alpha=augment.cutmix_alpha,
        )
    change = None
    if augment != AugmentConfig():
        fill = tuple(round(255 * mean) for mean in config.data.mean)
        change = load(AUGMENT)(
            augment, seed=config.run.seed, fill=fill, device=communicator.device, image_size=config.data.image_size
        )
    return PrepareBatch(normalize=normalize, device=communicator.device, augment=change, mix=mix)


def train_requests(
    config: Config, split: Split, *, plan: Plan, extra: Callable[[int], Sequence[int]] | None = None
) -> Iterator[Request]:
    """Return the requests of this rank's microbatches from first_step to the end of the run, and of extra ones."""
    order = None
    if config.data.balance and split.index:
        order = load(BALANCED)(split.index.labels_N, seed=config.run.seed, balance=config.data.balance)
    return imagenet.train_requests(
        seed=config.run.seed,
        num_samples=split.num_samples,
        global_batch_size=config.batch.global_batch_size,
        microbatch_size=config.batch.microbatch_size,
        microbatches=plan.microbatches,
        start_step=plan.first_step,
        end_step=plan.num_steps,
        extra=extra,
        order=order,
    )


def step_requests(
    config: Config, split: Split, *, plan: Plan, step: int, microbatches: Sequence[int]
) -> Iterator[Request]:
    """Return the requests of these microbatches of a step, counted from 0, by their numbers in the global batch."""
    part = replace(plan, first_step=step, num_steps=step + 1, microbatches=microbatches)
    return train_requests(config, split, plan=part)


def read_microbatch(config: Config, split: Split, plan: Plan, step: int, number: int) -> Batch:
    """Return a microbatch of a step, by its number in the global batch; may end an iterator of the split's loader."""
    return next(split.loader.load(step_requests(config, split, plan=plan, step=step, microbatches=[number])))


def train_batches(
    config: Config, split: Split, *, plan: Plan, extra: Callable[[int], Sequence[int]] | None = None
) -> Iterator[Batch]:
    """Return this rank's microbatches from first_step to the end of the run, across epochs without a pause.

    extra: as for order.train_requests.
    """
    return split.loader.load(train_requests(config, split, plan=plan, extra=extra))


def eval_batches(config: Config, communicator: Communicator, split: Split) -> Iterator[Batch]:
    """Return this rank's share of a split, in whole microbatches with padding marked."""
    return split.loader.load(
        imagenet.eval_requests(
            num_samples=split.num_samples,
            microbatch_size=config.batch.microbatch_size,
            rank=communicator.rank,
            world_size=communicator.world_size,
        )
    )


def measure_input(
    config: Config, communicator: Communicator, split: Split, *, plan: Plan, prepare: PrepareBatch
) -> MeasuredInput | None:
    """Return the input rate without training, measured on all ranks. Collective.

    None if no step follows, or a rank met a bad image.
    """
    if config.data.probe_seconds == 0 or plan.first_step == plan.num_steps:
        return None
    num_cores = cores_per_rank(communicator.connection)  # a collective: after it, all ranks start the probe together
    probe: ProbedInput | None = load(PROBE)(
        split.loader,
        partial(train_requests, config, split, plan=plan),
        prepare=prepare,
        seconds=config.data.probe_seconds,
        num_fill=2 * config.data.prefetch_batches,
    )
    # a rank that could not measure calls it too: it is a collective
    ranks = gather_rates(probe, communicator.connection)
    if probe is None or ranks is None:
        return None
    is_on_gpu = communicator.device.type == "cuda"
    is_packed = not isinstance(split.index, imagenet.ImageIndex)
    settings = input_settings(config, sizes=probe.sizes, num_cores=num_cores, is_on_gpu=is_on_gpu, is_packed=is_packed)
    return MeasuredInput(ranks, settings)


def gather_rates(probe: "ProbedInput | None", connection: Connection) -> tuple[Rates, ...] | None:
    """Return the rates of every rank, in rank order; None if a rank could not measure. Collective."""
    rates = connection.gather(probe and probe.rates)
    return None if None in rates else tuple(rates)
