"""`bigbatch comm tune`: what this cluster and this model ask of communication, measured in under a minute."""

import argparse
import dataclasses
import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.algorithms import travelling_dtype
from bigbatch.comm.algorithms.auto import AUTO, choose_algorithm
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import BACKENDS
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.conditions import Conditions, gather_conditions
from bigbatch.comm.tuning.measure import MeasuredLinks, measure_links
from bigbatch.comm.tuning.plan_search import Backward
from bigbatch.comm.tuning.ranking import BEST_FEW, Ranking, cluster_model, rank
from bigbatch.comm.tuning.ready_times import in_ready_order, measure_backward
from bigbatch.comm.tuning.report import (
    explain,
    explain_links,
    explain_ranking,
    explain_steps,
    times_head,
    times_line,
)
from bigbatch.comm.tuning.sweep import elapsed_seconds, measure_times, tune_sizes
from bigbatch.comm.tuning.tuned import CHANGES, DEFAULT_FOLDER, Tuned, default_path, require_folder, write_tuned
from bigbatch.comm.tuning.tuner import TuningFindings, best_candidates, choose
from bigbatch.comm.tuning.whole_steps import affordable, measure_steps
from bigbatch.errors import ConfigError, TunedError, print_line
from bigbatch.numbers import decimal, whole
from bigbatch.paths import as_path, expand_path
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.job import gather_tuned, join_job, stated_sizes, without_choices
from bigbatch.trainer.build.model import make_model
from bigbatch.trainer.build.parts import make_precision
from bigbatch.trainer.build.score import make_loss
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import RESNETS
from bigbatch.trainer.models.norm import flatten_running_statistics

MODEL_CONFIG = "imagenet/resnet50_8k"
"""What --model changes the model of."""

NULL_SIZES = "--comm.threshold_bytes null --comm.buffer_bytes null --comm.first_buffer_bytes null"
"""What leaves the fusion plan to the table."""

NO_MODEL = (
    "nothing is simulated: without messages between several ranks there is no model of this cluster; all is measured"
)
"""Said where algorithms cannot be ranked before they are measured."""

LINKS_SHARE, BACKWARD_SHARE, STEPS_SHARE = 0.1, 0.25, 0.2
"""Of the budget; the all-reduces by size get the rest."""


def main(argv: Sequence[str]) -> int:
    """Measure, choose, print why, and store; return the exit code. Collective over the job's ranks.

    Raises: ConfigError; CommError; TunedError where the file cannot be written.
    """
    arguments, overrides = _parser().parse_known_args(argv)
    if not 0 < arguments.budget_seconds < float("inf"):
        raise ConfigError(f"--budget-seconds {arguments.budget_seconds:g} is no length of time; give some seconds")
    if arguments.best < 1:
        raise ConfigError(f"--best {arguments.best} measures nothing: give 1 or more")
    config = load_config(_config_argv(arguments, overrides), prog="bigbatch comm tune")
    env = read_process_env()
    communicator, _ = join_job(without_choices(config, world_size=env.world_size), env)
    command = shlex.join(["bigbatch", "comm", "tune", *argv])
    communicator.agree("the command line", command)
    conditions = gather_conditions(communicator)
    _require_folder(arguments.output.parent if arguments.output else DEFAULT_FOLDER, communicator)
    say: Callable[[str], None] = print if communicator.rank == 0 else lambda text: None
    say(f"{communicator}; {conditions.device}")
    findings, ranking = _measure(
        config, communicator, budget_seconds=arguments.budget_seconds, count=arguments.best, say=say
    )
    tuned = _make_tuned(config, conditions, findings, ranking, command=command)
    path = arguments.output or default_path(tuned.cluster, tuned.model, tuned.tensors)
    communicator.close()
    if communicator.rank == 0:
        write_tuned(tuned, path)
        print_line(f"stored in {path}; to train with it: --comm.algorithm hybrid --comm.table {path} {NULL_SIZES}")
        print_line(f"it changes {CHANGES}")
    return 0


def _require_folder(folder: Path, communicator: Communicator) -> None:
    """Check the folder before anything takes long; all ranks hear of it. Collective."""
    problem = ""
    if communicator.rank == 0:
        try:
            require_folder(folder)
        except TunedError as error:
            problem = str(error)
    if told := communicator.gather_text(problem)[0]:
        raise TunedError(told)


def _config_argv(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    named = ["--config", arguments.config] if arguments.config else []
    if arguments.model and arguments.config:
        raise ConfigError(
            f"--model {arguments.model} and --config {arguments.config} both name a model: keep one, and override the "
            "config's by --model.name"
        )
    if arguments.model:
        named = ["--config", MODEL_CONFIG, "--model.name", arguments.model]
        if arguments.model not in RESNETS:
            named += ["--model.zero_gamma", "null", "--model.blurpool", "null"]
    backend = ["--comm.backend", arguments.backend] if arguments.backend else []
    return [*named, *backend, *overrides]


def _measure(
    config: Config, communicator: Communicator, *, budget_seconds: float, count: int, say: Callable[[str], None]
) -> tuple[TuningFindings, Ranking | None]:
    """Measure, simulate, measure the count best, and make the choice. Collective."""
    start = time.perf_counter()
    links = measure_links(communicator, seconds=LINKS_SHARE * budget_seconds)
    say(explain_links(links))
    parameters, forward = _make_forward(config, communicator)
    backward = measure_backward(parameters, forward, communicator, seconds=BACKWARD_SHARE * budget_seconds)
    tensors = in_ready_order(parameters, backward)
    dtype = _main_dtype(tensors)
    table, sizes = _stated(config, communicator, say=say)
    ranking = _rank(communicator, links, backward, tensors, stated=sizes, dtype=getattr(torch, dtype))
    for line in explain_ranking(ranking, count=count) if ranking else [NO_MODEL]:
        say(line)

    def worth_measuring(size: int, names: Sequence[str]) -> Sequence[str]:
        if ranking is None:
            return names
        kept = ranking.worth_measuring(size, names, count=count)
        return [name for name in names if name in kept or name == table.choose(size)]

    say(f"time of an all-reduce of {dtype}:")
    say(times_head(communicator.algorithms))
    times = measure_times(
        communicator,
        tune_sizes(sum(tensor.num_bytes for tensor in tensors)),
        dtype=getattr(torch, dtype),
        seconds=(1 - STEPS_SHARE) * budget_seconds - elapsed_seconds(communicator, start),
        on_size=lambda size, at_size: say(times_line(size, at_size, communicator.algorithms)),
        worth_measuring=worth_measuring,
    )
    findings = choose(links, times, backward, tensors, stated=sizes, stated_table=table)
    for line in explain(findings):
        say(line)
    left = budget_seconds - elapsed_seconds(communicator, start)
    findings = _measure_steps(findings, communicator, parameters, forward, seconds=left, count=count, say=say)
    for line in explain_steps(findings):
        say(line)
    return findings, ranking


def _measure_steps(
    findings: TuningFindings,
    communicator: Communicator,
    parameters: Mapping[str, torch.nn.Parameter],
    forward: Callable[[], Tensor],
    *,
    seconds: float,
    count: int,
    say: Callable[[str], None],
) -> TuningFindings:
    """Add whole steps of what the config states and of the count best simulated, if there is time. Collective."""
    if communicator.world_size == 1:
        return findings
    candidates = best_candidates(findings, count=count)
    affordable_count = affordable(candidates, backward_seconds=findings.backward.seconds, seconds=seconds)
    if not affordable_count:
        if len(candidates) > 1:
            say(f"no whole step is measured in the {seconds:.1f} s that are left: give more --budget-seconds")
        return findings
    steps = measure_steps(
        candidates[:affordable_count],
        parameters,
        forward,
        communicator,
        order=[tensor.name for tensor in findings.tensors],
        seconds=seconds,
    )
    return dataclasses.replace(findings, steps=steps)


def _rank(
    communicator: Communicator,
    links: MeasuredLinks,
    backward: Backward,
    tensors: Sequence[TensorSpec],
    *,
    stated: PlanSizes,
    dtype: torch.dtype,
) -> Ranking | None:
    """Simulate all plans by all algorithms on these links; None where there is no model of the cluster."""
    cluster = cluster_model(
        communicator.topology.groups,
        inside=links.inside.link if links.inside else None,
        across=links.across.link if links.across else None,
    )
    if cluster is None:
        return None
    nothing_N, names = torch.empty(0, dtype=dtype), communicator.algorithms
    travels_as = partial(travelling_dtype, tensor_N=nothing_N, wire=communicator.wire, backend=communicator.backend)
    return rank(
        cluster,
        tensors,
        backward,
        algorithms=names,
        stated=stated,
        wire_shares={name: travels_as(name).itemsize / dtype.itemsize for name in names},
        shares_memory=communicator.memory is not None,
    )


def _stated(config: Config, communicator: Communicator, *, say: Callable[[str], None]) -> tuple[HybridTable, PlanSizes]:
    """Return what the config states, with what it leaves to comm.table; to nothing where that is of elsewhere."""
    try:
        tuned = gather_tuned(config, communicator)
    except TunedError as error:
        say(f"not compared with: {error}")
        tuned = None
    algorithm = config.comm.algorithm
    if tuned and algorithm in (AUTO, "hybrid"):
        table = tuned.table
    else:
        choice = choose_algorithm(communicator.backend, table=None).algorithm
        table = HybridTable((HybridRow(None, choice if algorithm in (AUTO, "hybrid") else algorithm),))
    return table, stated_sizes(config, tuned)


def _make_forward(
    config: Config, communicator: Communicator
) -> tuple[dict[str, torch.nn.Parameter], Callable[[], Tensor]]:
    """Return the model's parameters, and a microbatch's loss as the training loop computes it, of random pictures."""
    # without gathers inside of it: ranks repeat it as often as each has time for
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


def _main_dtype(tensors: Sequence[TensorSpec]) -> str:
    """Find the dtype of most bytes."""
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[tensor.dtype] += tensor.num_bytes
    return num_bytes.most_common(1)[0][0]


def _make_tuned(
    config: Config, conditions: Conditions, findings: TuningFindings, ranking: Ranking | None, *, command: str
) -> Tuned:
    return Tuned(
        cluster=conditions.cluster,
        model=config.model.name,
        tensors=findings.tensors,
        table=findings.table,
        sizes=findings.chosen.sizes,
        command=command,
        evidence=_evidence(config, conditions, findings, ranking),
    )


def _evidence(
    config: Config, conditions: Conditions, findings: TuningFindings, ranking: Ranking | None
) -> dict[str, Any]:
    """State what the choice rests on, as plain values: for people, and for a simulator."""
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
        "fastest_table": json.loads(f.fastest.to_json()),
        "backward_seconds": f.backward.seconds,
        "ready_seconds": dict(f.backward.ready_seconds),
        "exposed_seconds": {
            "stated": f.stated.exposed_seconds,
            "stated_with_fastest": f.stated_with_fastest.exposed_seconds,
            "searched": f.searched.exposed_seconds,
            "noise": f.noise_seconds,
            "chosen": f.chosen.exposed_seconds,
            "least": f.least_exposed_seconds,
        },
        "simulated": ranking
        and {
            "steps": ranking.num_simulated,
            "seconds": ranking.seconds,
            "exposed_seconds": {name: choice.exposed_seconds for name, choice in ranking.best.items()},
        },
        # of what the config states, then of the best simulated
        "whole_steps": [
            {
                "table": json.loads(step.candidate.table.to_json()),
                "fusion": dataclasses.asdict(step.candidate.choice.sizes),
                "exposed_seconds": step.candidate.choice.exposed_seconds,
                "seconds": list(step.measured.seconds),
            }
            for step in f.steps
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch comm tune",
        usage="bigbatch comm tune {--config NAME_OR_FILE | --model NAME} [OPTION ...] [--section.key VALUE ...]",
        description="Measure the links between the ranks of this job, every all-reduce algorithm by size and the "
        "backward pass of a model; choose the algorithm by size and the fusion plan, say why, and store both. Any key "
        "of the config can be overridden, such as --batch.microbatch_size.",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm tune --config quickstart",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, help="experiment to tune for: YAML file, or name of a packaged one")
    add("--model", help=f"instead: this model in the experiment {MODEL_CONFIG}")
    add("--output", type=as_path, metavar="FILE.json", help="default: tuned/MODEL-BACKEND-NODES-FINGERPRINT.json")
    add("--budget-seconds", type=decimal, default=60.0, help="how long to measure (default: %(default)s)")
    add(
        "--best",
        type=whole,
        default=BEST_FEW,
        help="measure so many of the best simulated (default: %(default)s)",
    )
    add("--backend", choices=BACKENDS, help="same as --comm.backend")
    return parser
