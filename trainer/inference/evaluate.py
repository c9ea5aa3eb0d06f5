"""Accuracy of a run's checkpoint or of other weights: `bigbatch evaluate`."""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import FAILED, RunFolderError, print_line, print_lines, tell
from bigbatch.files import as_json
from bigbatch.parts import load
from bigbatch.paths import as_path
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.compute import make_score
from bigbatch.trainer.build.images import stage_data
from bigbatch.trainer.build.job import bind_rank, join_job, without_choices
from bigbatch.trainer.build.model import explain_refusal_
from bigbatch.trainer.checkpoint.class_names import describe
from bigbatch.trainer.checkpoint.weights import digest
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.inference.accuracy import evaluate, predict
from bigbatch.trainer.inference.answers import Answers
from bigbatch.trainer.inference.arguments import read_trained, trained_parser
from bigbatch.trainer.inference.folding import compile_, for_inference, forward_rate, num_norms
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.input.base import require_few_bad_images
from bigbatch.trainer.input.order import describe_left_out
from bigbatch.trainer.report.progress import MAX_WITHOUT_TOP5, describe_evaluation
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, in_forward

IMPORTS = ("model.name", "data.root", "data.loader", "optimizer.loss", "run.metrics")
"""Keys whose code an evaluation imports."""
REPORT, FILES = "bigbatch.tools.evaluation.EvaluationReport", "bigbatch.tools.evaluation.written_files"
"""Import paths of what makes the tables, plots and page of an evaluation."""


def main(argv: Sequence[str]) -> int:
    """Evaluate the weights that argv names; return the exit code. Collective over the job's ranks."""
    arguments, config, path = read_trained(_parser(), argv, imports=IMPORTS)
    require_own_list(config, arguments.words)
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
    answers = Answers(split.num_samples, device=communicator.device)
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
        answered=answers.add,
    )
    split.loader.close()
    require_few_bad_images(list(skipped.values()), max_skipped=config.data.max_skipped)
    answered = answers.gather(communicator, num_classes=config.data.num_classes)
    communicator.close()
    if communicator.rank:
        return 0
    for reason in skipped.values():
        print_line(f"skipped: {reason}")
    record |= {"images_per_second": record["count"] / record["seconds"], **speed}
    title = f"{path} at {config.data.image_size} x {config.data.image_size} pixels"
    print_line(f"{title}: {describe_evaluation(record, num_classes=config.data.num_classes)}")
    print_lines(_describe_speed(record))
    names = split.classes or tuple(map(str, range(config.data.num_classes)))
    report = load(REPORT)(answered, names, index=split.index and load(build_input.SHOWN)(split.index, config.data))
    report.show()
    record = {"checkpoint": str(path), **record, **report.record}
    if config.data.num_classes <= MAX_WITHOUT_TOP5:
        del record["top5"]
    write = partial(report.write, record=record, title=title, max_pixels=round(1e6 * config.data.max_megapixels))
    code = _write_files(write, out=arguments.out, run=arguments.run)
    if arguments.json:
        print(as_json(record))
    return code


def _write_files(write: Callable[[RunDir], None], *, out: Path | None, run: Path | None) -> int:
    """Write the files of an evaluation to out, else into the run folder, and print where they are; return the code.

    A folder that the user named must be writable; a run folder may be read-only.
    """
    folder = out or (run and run / "evaluation")
    if folder is None:
        print_line("with --out FOLDER the page of wrong images, and the tables and plots of classes, are written there")
        return 0
    try:
        if run and not out:
            RunDir(run).make_folder(folder)
        write(RunDir(folder))
    except RunFolderError as error:
        tell(error if out else f"{error}; --out FOLDER names another")
        return FAILED if out else 0
    for line in load(FILES)(folder):
        print_line(line)
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
    parser.add_argument("--out", type=as_path, help="folder for page, tables and plots (default: evaluation in RUN)")
    parser.add_argument("--json", action="store_true", help="also print the record as JSON")
    return parser
