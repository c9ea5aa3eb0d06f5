"""Classify images with a trained model: `bigbatch predict`, and the same in Python."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import ConfigError, DataError, print_line, tell
from bigbatch.files import as_json
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.job import join_job, without_choices
from bigbatch.trainer.build.model import explain_refusal_
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.inference import accuracy as evaluation
from bigbatch.trainer.inference.arguments import read_trained, trained_parser
from bigbatch.trainer.inference.folding import for_inference
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, in_forward
from bigbatch.words import whole


@dataclass(frozen=True)
class Prediction:
    """Lists the most probable classes of one image, the first one first, and their probabilities."""

    image: Path
    classes: tuple[str, ...]
    """Names that the run keeps in its checkpoints; numbers from 0 if the weights come without."""
    probabilities: tuple[float, ...]


class Classifier:
    """A trained model with the preprocessing of the validation images."""

    def __init__(self, config: Config, weights: Path) -> None:
        """Load the weights and join a job of one rank. Raises: ConfigError; CheckpointError."""
        if config.data.loader == "synthetic":
            raise ConfigError("data.loader=synthetic reads no images: give the keys of data as for real ones")
        env = read_process_env()
        if env.world_size > 1:
            raise ConfigError(
                f"predict works in one process, this job has {env.world_size}: start it without a launcher"
            )
        # max_skipped replaces a bad image by another one, whose prediction would be reported for it
        self._config = without_choices(replace(config, data=replace(config.data, max_skipped=None)), world_size=1)
        plain, loaded = make_plain_model(config, weights=weights)
        if loaded.note:
            tell(loaded.note)
        if loaded.classes is None:
            tell(f"{weights} keeps no class names: classes are numbers, from 0")
        self._names = loaded.classes or tuple(map(str, range(config.data.num_classes)))
        self._communicator: Communicator = join_job(self._config, env)[0]
        self._model: nn.Module = for_inference(
            plain,
            device=self._communicator.device,
            dtype=COMPUTE_DTYPES[config.optimizer.precision],
            channels_last=config.compute.channels_last,
        )
        explain_refusal_(self._model, name=config.model.name)

    def __call__(self, images: Sequence[Path | str], *, top: int = 5) -> Iterator[Prediction]:
        """Return the top classes of each image, in order. Raises: DataError naming an image that cannot be read."""
        paths = [Path(image) for image in images]
        for path in paths:
            if not path.is_file():
                raise DataError(f"{path}: {'is a folder: name its images' if path.is_dir() else 'no such image'}")
        return self._predict(paths, top=min(top, len(self._names))) if paths else iter(())

    @torch.no_grad()
    def _predict(self, paths: list[Path], *, top: int) -> Iterator[Prediction]:
        config = self._config
        size = min(config.batch.microbatch_size, len(paths))  # no padding is decoded
        config = replace(
            config,
            batch=replace(config.batch, microbatch_size=size, global_batch_size=size, bn_span=size),
            augment=replace(config.augment, mixup_alpha=0.0, cutmix_alpha=0.0),  # nothing to mix a single image with
        )
        index = ImageIndex(  # of single images: below /, without known classes
            root="",
            classes=(),
            paths=[str(path.absolute()).lstrip("/") for path in paths],
            labels_N=np.zeros(len(paths), np.int64),
        )
        split = build_input.split_of(config, self._communicator, index)
        normalize, found = build_input.make_normalize(config, self._communicator), iter(paths)
        with closing(split.loader):
            for batch in build_input.eval_batches(config, self._communicator, split):
                # valid images come first, then padding
                images_BCHW = normalize(batch.images_BCHW)[: int(batch.valid_B.sum())]
                with in_forward(config.optimizer.precision, device=self._communicator.device):
                    logits_BK = evaluation.predict(self._model, images_BCHW, flip=config.data.eval_flip)
                shares_BT, classes_BT = logits_BK.softmax(1).topk(top)
                for shares, classes in zip(shares_BT.tolist(), classes_BT.tolist(), strict=True):
                    yield Prediction(next(found), tuple(self._names[each] for each in classes), tuple(shares))

    def close(self) -> None:
        """Close the communicator."""
        self._communicator.close()


def load_classifier(*argv: str) -> Classifier:
    """Load a classifier from the command line's words: a run folder, then keys of its config to override.

    Example: load_classifier("runs/quickstart", "--optimizer.precision=bf16"). Raises: as read_trained and Classifier.
    """
    _, config, weights = read_trained(_parser(), argv)
    return Classifier(config, weights)


def main(argv: Sequence[str]) -> int:
    """Print the classes of the images that argv names; return the exit code."""
    parser = _parser()
    arguments, config, weights = read_trained(parser, argv)
    if not arguments.images:
        parser.error("name one or more images")
    if arguments.top < 1:
        parser.error(f"--top {arguments.top} is not possible: give 1 or more")
    classify = Classifier(config, weights)
    for found in classify(arguments.images, top=arguments.top):
        answers = list(zip(found.classes, found.probabilities, strict=True))
        if arguments.json:
            facts = [{"class": name, "probability": share} for name, share in answers]
            print(as_json({"image": str(found.image), "classes": facts}))
        else:
            print_line(f"{found.image}: {', '.join(f'{name} {100 * share:.1f}%' for name, share in answers)}")
    classify.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = trained_parser(
        "bigbatch predict",
        description="Predict the classes of images, which are resized and cropped as in evaluation. Prints class "
        "names, or numbers if the weights have no names.",
        takes_images=True,
    )
    parser.add_argument("--top", type=whole, default=5, help="classes to print of each image (default 5)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each image")
    return parser
