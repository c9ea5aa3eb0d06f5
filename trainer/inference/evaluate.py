"""Accuracy of a run's checkpoint or of other weights: `bigbatch evaluate`."""

from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import print_line, print_lines, tell
from bigbatch.files import as_json
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.compute import make_score
from bigbatch.trainer.build.images import stage_data
from bigbatch.trainer.build.job import bind_rank, join_job, without_choices
from bigbatch.trainer.build.model import explain_refusal_
from bigbatch.trainer.checkpoint.class_names import describe
from bigbatch.trainer.checkpoint.weights import digest
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.inference.accuracy import evaluate, predict
from bigbatch.trainer.inference.arguments import read_trained, trained_parser
from bigbatch.trainer.inference.folding import compile_, for_inference, forward_rate, num_norms
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.input.base import require_few_bad_images
from bigbatch.trainer.input.order import describe_left_out
from bigbatch.trainer.report.progress import describe_evaluation
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, in_forward


def main(argv: Sequence[str]) -> int:
    """Evaluate the weights that argv names; return the exit code. Collective over the job's ranks."""
    arguments, config, path = read_trained(_parser(), argv)
    env = read_process_env()
    config = without_choices(config, world_size=env.world_size)
    bind_rank(config, env)
    communicator, _ = join_job(config, env)
    score = make_score(config, communicator.device)
    plain, loaded = make_plain_model(config, weights=path)
    classes = loaded.classes
    communicator.agree("the weights to evaluate", f"{path}, SHA-256 {digest(plain)}, {describe(classes)}")
    if loaded.note and communicator.rank == 0:
        tell(loaded.note)
    if classes is None and communicator.rank == 0:
        tell(f"{path} keeps no class names: those of {config.data.root} are not compared")
    config, _ = stage_data(config, communicator.connection)
    split = build_input.make_eval_split(config, communicator, trained=classes, source=str(path))
    if communicator.rank == 0 and (left_out := describe_left_out(config.data.root, split.index)):
        print_line(left_out)
    precision = config.optimizer.precision
    model = for_inference(
        plain,
        device=communicator.device,
        dtype=COMPUTE_DTYPES[precision],
        fold=arguments.fold,
        channels_last=config.compute.channels_last,
    )
    if not arguments.compile:
        explain_refusal_(model, name=config.model.name)
    speed = {
        "model_images_per_second": _model_rate(model, config, communicator, is_compiled=arguments.compile),
        "precision": precision,
        "num_norms": num_norms(plain),
        "num_folded": num_norms(plain) - num_norms(model),
        "compiled": arguments.compile,
    }
    skipped: dict[int, str] = {}
    record = evaluate(
        model,
        build_input.eval_batches(config, communicator, split),
        normalize=build_input.make_normalize(config, communicator),
        communicator=communicator,
        num_samples=split.num_samples,
        forward=partial(in_forward, precision, device=communicator.device),
        flip=config.data.eval_flip,
        score=score,
        skipped=skipped.update,
    )
    split.loader.close()
    require_few_bad_images(list(skipped.values()), max_skipped=config.data.max_skipped)
    if communicator.rank == 0:
        for reason in skipped.values():
            print_line(f"skipped: {reason}")
        record |= {"images_per_second": record["count"] / record["seconds"], **speed}
        size = config.data.image_size
        print_line(f"{path} at {size} x {size} pixels: {describe_evaluation(record)}")
        print_lines(_describe_speed(record))
        if arguments.json:
            print(as_json({"checkpoint": str(path), **record}))
    communicator.close()
    return 0


def _model_rate(model: nn.Module, config: Config, communicator: Communicator, *, is_compiled: bool) -> float:
    """Return images per second of the model without input: the slowest rank's rate times world size. Collective.

    is_compiled: compile the model before. Raises: ComputeError.
    """
    size, count, device = config.data.image_size, config.batch.microbatch_size, communicator.device
    pixels_BHWC = torch.randint(256, (count, size, size, 3), dtype=torch.uint8)
    images_BCHW = build_input.make_normalize(config, communicator)(pixels_BHWC.permute(0, 3, 1, 2))
    with in_forward(config.optimizer.precision, device=device):
        if is_compiled:
            compile_(model, images_BCHW)
        rate = forward_rate(
            lambda: predict(model, images_BCHW, flip=config.data.eval_flip), num_images=count, device=device
        )
    # ranks have equal numbers of images, so the slowest one ends last
    return communicator.world_size * min(communicator.gather(rate))


def _describe_speed(record: dict[str, Any]) -> str:
    """Return a line with the rates with and without input, and the optimizations of the model."""
    done = [record["precision"]]
    if record["num_folded"]:
        done.append(f"{record['num_folded']} of {record['num_norms']} norms folded")
    if record["compiled"]:
        done.append("compiled")
    return (
        f"speed: {record['images_per_second']:,.0f} images/s, of the model alone "
        f"{record['model_images_per_second']:,.0f} ({', '.join(done)})"
    )


def _parser() -> ArgumentParser:
    parser = trained_parser(
        "bigbatch evaluate",
        description="Measure the accuracy of a run's best checkpoint, or of other weights, on the validation images.",
    )
    parser.add_argument("--fold", action="store_true", help="fold batch norms into the convolutions before them")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--json", action="store_true", help="also print the record as JSON")
    return parser
