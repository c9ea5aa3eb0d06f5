"""One trained model, its validation pictures through three pipelines: the accuracy of each, and where they disagree.

    bigbatch launch mpirun --ranks 2 -- train --config imagenette
    python -m benchmarks.input.parity runs/imagenette --out benchmarks/results/input-parity.json

dali and torchvision are the values of data.loader. reference is what most evaluation scripts do and shares no code with
them: torchvision's ImageFolder, Resize and CenterCrop of Pillow pictures. Its Resize rounds the size of the whole
picture, ours cuts the box first, so its crop can lie up to a pixel elsewhere.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.arguments import at_least, run
from benchmarks.record import conditions, write_record
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import DataError
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.job import join_job, without_choices
from bigbatch.trainer.build.model import make_model
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.inference.accuracy import predict
from bigbatch.trainer.run.checkpoint import best_checkpoint, list_checkpoints, load_checkpoint
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.step.ema import evaluated_weights
from bigbatch.trainer.step.precision import Precision


def main() -> None:
    """Evaluate and write the record."""
    options = parse()
    facts = conditions(options)
    config = without_choices(load_config(["--config", str(RunDir(options.run).config)]), world_size=1)
    communicator, _ = join_job(config, read_process_env())
    model = load_model(config, communicator, options.run)
    normalize = build_input.make_normalize(config, communicator)
    answers = {
        name: ask(model, our_batches(config, communicator, name=name), normalize) for name in ("dali", "torchvision")
    }
    answers["reference"] = ask(model, reference_batches(config, batch=options.batch), normalize)
    communicator.close()
    record = {"benchmark": "parity", "conditions": facts, **describe(answers)}
    for name, percent in record["top1_percent"].items():
        print(f"{name:32} {percent:10.3f} %", file=sys.stderr)
    for name, number in record["other_answers"].items():
        print(f"{name:32} {number:10d} of {record['pictures']} pictures", file=sys.stderr)
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of the reference (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def load_model(config: Config, communicator: Communicator, folder: Path) -> nn.Module:
    """Load the run's best checkpoint, in evaluation mode. Raises: DataError if there is none."""
    best = best_checkpoint(list_checkpoints(RunDir(folder).checkpoints))
    if best is None:
        raise DataError(f"{folder}: holds no evaluated checkpoint; train first")
    model = make_model(config, communicator)
    precision = Precision(model, name=config.optimizer.precision, device=communicator.device)
    precision.load_model_state(evaluated_weights(load_checkpoint(best.path)))
    return model.eval()


def our_batches(config: Config, communicator: Communicator, *, name: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield uint8 pictures and labels of the whole split, by data.loader=name."""
    own = replace(config, data=replace(config.data, loader=name))
    split = build_input.make_eval_split(own, communicator)
    for batch in build_input.eval_batches(own, communicator, split):
        yield batch.images_BCHW[batch.valid_B], batch.labels_B[batch.valid_B]
    split.loader.close()


def reference_batches(config: Config, *, batch: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield the same by torchvision alone."""
    size = config.data.image_size
    steps = [
        transforms.Resize(round(size / config.data.eval_crop_fraction)),
        transforms.CenterCrop(size),
        transforms.PILToTensor(),
    ]
    return DataLoader(ImageFolder(f"{config.data.root}/val", transforms.Compose(steps)), batch_size=batch)


@torch.no_grad()
def ask(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], normalize: Any) -> Tensor:
    """Return predicted class and label of every picture (2, N)."""
    found = []
    for images_BCHW, labels_B in batches:
        logits_BK = predict(model, normalize(images_BCHW.contiguous(memory_format=torch.channels_last)), flip=False)
        found.append(torch.stack([logits_BK.argmax(1).cpu(), labels_B.cpu()]))
    return torch.cat(found, dim=1)


def describe(answers: dict[str, Tensor]) -> dict[str, Any]:
    """Describe accuracies, their largest difference in points, and how often two pipelines answer differently."""
    percents = {name: 100 * (each[0] == each[1]).double().mean().item() for name, each in answers.items()}
    return {
        "pictures": next(iter(answers.values())).shape[1],
        "top1_percent": percents,
        "largest_difference_points": max(percents.values()) - min(percents.values()),
        "other_answers": {
            f"{one} / {other}": int((answers[one][0] != answers[other][0]).sum())
            for one, other in combinations(answers, 2)
        },
    }


if __name__ == "__main__":
    run(main)
