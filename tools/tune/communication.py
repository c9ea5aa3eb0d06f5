"""`bigbatch comm tune`: measure this cluster and this model in under a minute, and choose comm settings."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.algorithms.by_name import AUTO, choose_algorithm
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import BACKENDS
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.cluster import gather_cluster, gather_tuned
from bigbatch.comm.tuning.conditions import Conditions, gather_conditions
from bigbatch.comm.tuning.tuned import CHANGES, DEFAULT_FOLDER, Tuned, default_path, require_writable, write_tuned
from bigbatch.errors import FAILED, ConfigError, TunedError, print_line, print_lines
from bigbatch.paths import as_path, expand_path
from bigbatch.tools.measure.ddp_buckets import tune_script
from bigbatch.tools.measure.tune import TuneResults, tune
from bigbatch.tools.measure.whole_steps import StepCandidate
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.compute import make_loss
from bigbatch.trainer.build.job import fusion_sizes, join_job, without_choices
from bigbatch.trainer.build.model import make_model
from bigbatch.trainer.build.parts import make_precision
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.ownership import write_on_first
from bigbatch.trainer.models.norm import flatten_running_statistics
from bigbatch.words import at_least, positive

MODEL_CONFIG = "imagenet/resnet50_8k"
"""Experiment in which --model replaces the model."""

NULL_SIZES = "--comm.threshold_bytes null --comm.buffer_bytes null --comm.first_buffer_bytes null"
"""Options that set keys to null, so that the table gives the fusion plan."""


def main(argv: Sequence[str]) -> int:
    """Measure, choose, print why, and store; return the exit code, 1 if other work disturbed it. Collective.

    Raises: ConfigError; CommError; TunedError if the file cannot be written.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    if any(word.partition("=")[0] == "--ddp" for word in argv[:split]):
        return _tune_ddp(argv[:split], argv[split + 1 :])
    arguments, overrides = _parser().parse_known_args(argv)
    config = load_config(_config_argv(arguments, overrides), prog="bigbatch comm tune")
    env = read_process_env()
    communicator, _ = join_job(without_choices(config, world_size=env.world_size), env)
    command = shlex.join(["bigbatch", "comm", "tune", *argv])
    communicator.agree("the command line", command)
    conditions = gather_conditions(communicator)
    write_on_first(  # before anything takes long
        partial(require_writable, arguments.output or DEFAULT_FOLDER / "any"),
        communicator.connection.control,
        what="the tuned file",
        timeout_seconds=config.run.checkpoint_timeout_seconds,
    )
    say: Callable[[str], None] = print_lines if communicator.rank == 0 else lambda text: None
    say(f"{communicator}; {conditions.device}")
    parameters, forward = _make_forward(config, communicator)
    stated = _stated(config, communicator, say=say)
    seconds, force = arguments.budget_seconds, arguments.force
    findings = tune(communicator, parameters, forward, stated=stated, seconds=seconds, force=force, say=say)
    tuned = Tuned(
        cluster=gather_cluster(communicator),
        model=config.model.name,
        tensors=findings.tensors,
        table=findings.chosen.table,
        sizes=findings.chosen.sizes,
        command=command,
        evidence=_evidence(config, conditions, findings),
    )
    path = arguments.output or default_path(tuned.cluster, tuned.model, tuned.tensors)
    communicator.close()
    if findings.doubt:
        remedy = "end other work on the hosts, or raise --budget-seconds; --force stores the fastest anyway"
        say(f"nothing is stored: {findings.doubt}; {remedy}")
        return FAILED
    if communicator.rank == 0:
        write_tuned(tuned, path)
        print_line(f"stored in {path}; to train with it: --comm.algorithm hybrid --comm.table {path} {NULL_SIZES}")
        print_line(f"it changes {CHANGES}")
    return 0


def _tune_ddp(argv: Sequence[str], of_script: Sequence[str]) -> int:
    """Tune buckets and hook for a script that keeps DDP. of_script: its arguments."""
    arguments = _ddp_parser().parse_args(argv)
    if not arguments.ddp.is_file():
        raise ConfigError(f"--ddp {arguments.ddp} is not a file: name a Python script")
    for line in tune_script(arguments.ddp, of_script, steps=arguments.steps, say=print_line):
        print_line(line)
    return 0


def _config_argv(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    named = ["--config", arguments.config] if arguments.config else []
    if arguments.model and arguments.config:
        raise ConfigError(
            f"--model {arguments.model} and --config {arguments.config} both name a model: keep one, and override the "
            "config's by --model.name"
        )
    if arguments.model:
        named = ["--config", MODEL_CONFIG, "--model.name", arguments.model]
    backend = ["--comm.backend", arguments.backend] if arguments.backend else []
    return [*named, *backend, *overrides]


def _stated(config: Config, communicator: Communicator, *, say: Callable[[str], None]) -> StepCandidate:
    """Return the config's table and sizes, completed from comm.table unless it is of another cluster. Collective."""
    try:
        tuned = gather_tuned(Path(config.comm.table), communicator) if config.comm.table else None
    except TunedError as error:
        say(f"the stated table is not compared: {error}")
        tuned = None
    algorithm = config.comm.algorithm
    if tuned and algorithm in (AUTO, "hybrid"):
        table = tuned.table
    else:
        choice = choose_algorithm(communicator.transport.backend, table=None).algorithm
        table = HybridTable((HybridRow(None, choice if algorithm in (AUTO, "hybrid") else algorithm),))
    return StepCandidate(table, fusion_sizes(config, tuned))


def _make_forward(
    config: Config, communicator: Communicator
) -> tuple[dict[str, torch.nn.Parameter], Callable[[], Tensor]]:
    """Return the parameters, and a forward that returns the loss of random images as the training loop computes it."""
    # without collectives in forward: each rank repeats it as often as its time allows
    model = make_model(without_choices(config, world_size=communicator.world_size), communicator)
    precision = make_precision(config, model, device=communicator.device)
    flatten_running_statistics(model)
    model.train()
    normalize = build_input.make_normalize(config, communicator)
    size, count = config.data.image_size, config.batch.microbatch_size
    pixels_BCHW = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    images_BCHW = normalize(pixels_BCHW.contiguous(memory_format=torch.channels_last))
    labels_B = torch.randint(config.data.num_classes, (count,)).to(communicator.device)
    loss = make_loss(config, communicator.device)

    def forward() -> Tensor:
        with precision.forward():
            logits_BK = model(images_BCHW).float()
        return precision.scaled(loss(logits_BK, labels_B) / count)

    return {name: p for name, p in model.named_parameters() if p.requires_grad}, forward


def _evidence(config: Config, conditions: Conditions, findings: TuneResults) -> dict[str, Any]:
    """Return the measurements behind the choice, as plain values, for readers."""
    f = findings
    return {
        "conditions": dataclasses.asdict(conditions),
        "microbatch_size": config.batch.microbatch_size,
        "image_size": config.data.image_size,
        "precision": config.optimizer.precision,
        "message_seconds": {
            where: hops and {str(size): list(measured.seconds) for size, measured in hops.times}
            for where, hops in (("inside", f.links.inside), ("across", f.links.across))
        },
        "all_reduce_seconds": {
            str(size): {name: list(measured.seconds) for name, measured in at_size.items()}
            for size, at_size in f.times.items()
        },
        "fastest_table": f.fastest.as_rows(),
        "backward_seconds": f.backward.seconds,
        "ready_seconds": dict(f.backward.ready_seconds),
        # the config's own candidate comes first
        "whole_steps": [
            {
                "table": candidate.table.as_rows(),
                "fusion": dataclasses.asdict(candidate.sizes),
                "seconds": list(times.seconds),
            }
            for candidate, times in f.steps.items()
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch comm tune",
        usage="bigbatch comm tune {--config NAME_OR_FILE | --model NAME} [OPTION ...] [--section.key VALUE ...]\n"
        "       bigbatch comm tune --ddp SCRIPT [--steps N] [-- ARGUMENTS]: for a script with DistributedDataParallel",
        description="Measure the links between the ranks of this job, every all-reduce algorithm by size, and whole "
        "training steps of a model with several sizes of fusion buffers; choose the fastest, say why, and store it. "
        "Any key of the config can be overridden, such as --batch.microbatch_size.",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm tune --config quickstart",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, help="experiment to tune for: YAML file, or name of a packaged one")
    add("--model", help=f"instead: this model in the experiment {MODEL_CONFIG}")
    add("--output", type=as_path, metavar="FILE.json", help="default: tuned/MODEL-BACKEND-NODES-FINGERPRINT.json")
    add("--budget-seconds", type=positive, default=60.0, help="how long to measure (default: %(default)s)")
    add("--force", action="store_true", help="store the result even if other work disturbed the measurement")
    add("--backend", choices=BACKENDS, help="same as --comm.backend")
    return parser


def _ddp_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch comm tune --ddp",
        usage="bigbatch comm tune --ddp SCRIPT [--steps N] [-- ARGUMENTS OF THE SCRIPT]",
        description="Run a script that trains with DistributedDataParallel, time its steps with other sizes of buckets "
        "and with our hook, end it, and say what is faster.",
        allow_abbrev=False,
    )
    parser.add_argument("--ddp", type=as_path, required=True, metavar="SCRIPT", help="script to run on every rank")
    parser.add_argument(
        "--steps", type=at_least(1), default=10, help="steps that each turn times (default: %(default)s)"
    )
    return parser
