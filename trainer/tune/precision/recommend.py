"""`bigbatch tune precision`: loss scale, wire and ghost batch by the underflow of a few steps' gradients."""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import ConfigError, TrainingDiverged, TuneError, print_line
from bigbatch.numbers import whole
from bigbatch.paths import as_path, expand_path
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import find_config, load_config
from bigbatch.trainer.config.schema import Config, with_values
from bigbatch.trainer.config.sections import SCALED
from bigbatch.trainer.config.strict_yaml import as_yaml, dump_yaml
from bigbatch.trainer.run.checkpoint import write_on_first
from bigbatch.trainer.run.folder import RunDir, require_writable
from bigbatch.trainer.step.precision import COMPUTE_DTYPES
from bigbatch.trainer.step.stop_request import Stopped, leave_stopped
from bigbatch.trainer.tune.precision.choices import (
    Choice,
    SpanRow,
    WireRow,
    choose_predivide,
    choose_scale,
    scale_choice,
    span_choice,
    wire_choice,
)
from bigbatch.trainer.tune.precision.magnitudes import NotFiniteError
from bigbatch.trainer.tune.precision.report import Answer, explain, plot_answer
from bigbatch.trainer.tune.precision.steps import Counted, count_gradients, try_choice
from bigbatch.trainer.tune.precision.wires import measure_wires

STEPS, TRY_STEPS = 8, 2


def main(argv: Sequence[str]) -> int:
    """Measure and recommend as argv states; return the exit code. Collective over the job's ranks.

    Raises: ConfigError; TuneError where fp32 itself is not finite.
    """
    arguments, overrides = _parser().parse_known_args(argv)
    if arguments.steps < 1 or arguments.try_steps < 0:
        stated = f"--steps {arguments.steps} --try-steps {arguments.try_steps}"
        raise ConfigError(f"{stated}: give at least 1 step to measure, and 0 or more to try")
    config = load_config(["--config", arguments.config, *overrides], prog="bigbatch tune precision")
    env = read_process_env()
    accumulation_steps(config.batch, world_size=env.world_size)
    num_ranks = env.world_size if arguments.num_ranks is None else arguments.num_ranks
    if num_ranks < 1:
        raise ConfigError(f"--num-ranks {num_ranks} must be a number from 1 on")
    spans = legal_spans(config, arguments.spans, world_size=env.world_size)
    if arguments.dry_run:
        for line in plan_lines(config, spans, steps=arguments.steps, try_steps=arguments.try_steps, out=arguments.out):
            print_line(line)
        return 0
    bind_rank(config, env)
    communicator, _ = join_job(config, env)
    communicator.agree("the search", f"{arguments.steps} {spans} {num_ranks}")
    writes = partial(
        write_on_first,
        control=communicator.control,
        what="precision.json",
        timeout_seconds=config.run.checkpoint_timeout_seconds,
    )
    writes(partial(require_writable, arguments.out))
    answer, stop = None, None
    try:
        answer = search(config, communicator, spans, steps=arguments.steps, num_ranks=num_ranks)
        if arguments.try_steps:
            answer = confirm(answer, config, communicator, steps=arguments.try_steps)
    except Stopped as stopped:
        stop = stopped
    if answer is not None:
        writes(partial(_write, answer, arguments.out, base=arguments.config, overrides=overrides))
    if stop:
        _say(communicator, f"stopped by {stop}; {'not tried' if answer else 'nothing was written'}")
    communicator.close()
    return leave_stopped(env) if stop else 0


def legal_spans(config: Config, asked: Sequence[int] | None, *, world_size: int) -> list[int]:
    """List ghost batches to compare, the config's own first: by default half of it and twice. Raises: ConfigError."""
    own = config.batch.bn_span
    found = [own]
    for span in asked if asked is not None else (own // 2, 2 * own):
        try:
            batch = with_values(config, {"batch.bn_span": span}).batch
            accumulation_steps(batch, world_size=world_size)
        except ConfigError as error:
            if asked is not None:
                raise ConfigError(*(f"--spans {span}: {line}" for line in error.args)) from error
            continue
        found.append(span)
    return list(dict.fromkeys(found))


def plan_lines(config: Config, spans: Sequence[int], *, steps: int, try_steps: int, out: Path) -> list[str]:
    """Say what would be done."""
    size = config.batch.global_batch_size
    runs = [f"  {steps} steps of {size} pictures in fp32, with batch.bn_span={span}" for span in spans]
    if try_steps:
        runs.append(f"  {try_steps} steps of {size} pictures in {config.optimizer.precision}, with what is recommended")
    return ["would train, from new weights each:", *runs, f"and write precision.yaml, .json and .png to {out}"]


def search(config: Config, communicator: Communicator, spans: Sequence[int], *, steps: int, num_ranks: int) -> Answer:
    """Measure gradients with each ghost batch, and choose. Raises: TuneError; Stopped."""
    counted: dict[int, Counted] = {}
    for span in spans:
        _say(communicator, f"{steps} steps in fp32, batch.bn_span={span}")
        changed = with_values(config, {"batch.bn_span": span})
        try:
            counted[span] = count_gradients(
                changed, communicator, num_steps=steps, say=lambda text: _say(communicator, f"  {text}")
            )
        except NotFiniteError as error:
            raise TuneError(f"{error} in fp32 with batch.bn_span={span}: lower schedule.base_lr") from error
    own, precision = spans[0], config.optimizer.precision
    gradients = {span: each.gradients for span, each in counted.items()}
    power, reason = choose_scale(gradients[own])
    is_scaled = precision in SCALED
    scale = (
        scale_choice(gradients[own], growth_steps=config.optimizer.loss_scale_growth_steps)
        if is_scaled
        else Choice({}, f"optimizer.precision={precision} has no loss scale; of fp16 it would be: {reason}")
    )
    power = power or 0
    rows = [
        SpanRow(span, found.short(power), found.headroom(power), counted[span].losses[-1])
        for span, found in gradients.items()
    ]
    # of gradients that travel as fp32: those of an autocast with the loss scale
    travel_power = power if is_scaled else 0
    predivide = choose_predivide(gradients[own].weights, num_ranks=num_ranks, scale_power=travel_power)
    gradient_N = counted[own].gradient_N
    assert gradient_N is not None
    wires = measure_wires(gradient_N * 2.0**travel_power, predivide=predivide, num_ranks=num_ranks)
    return Answer(
        precision=precision,
        num_steps=steps,
        num_ranks=num_ranks,
        gradients=gradients[own],
        largest=tuple(each.largest for each in counted[own].weights),
        losses=tuple(counted[own].losses),
        spans=tuple(rows),
        wires=tuple(wires),
        choices={
            "loss scale": scale,
            "wire": _legal_wire(config, wires, num_ranks=num_ranks),
            "ghost batch": span_choice(rows, own=own),
        },
    )


def _legal_wire(config: Config, wires: Sequence[WireRow], *, num_ranks: int) -> Choice:
    """Choose a wire where gradients travel as fp32, and none that the config's other settings refuse."""
    precision = config.optimizer.precision
    if COMPUTE_DTYPES[precision].itemsize == 2:
        return Choice({}, f"gradients are {precision} and travel so: comm.wire_dtype is for fp32 gradients")
    choice = wire_choice(wires, num_ranks=num_ranks)
    try:
        with_values(config, choice.values)
    except ConfigError as error:
        return Choice({}, f"no other is legal: {error}")
    return choice


def confirm(answer: Answer, config: Config, communicator: Communicator, *, steps: int) -> Answer:
    """Train with what is recommended, in the config's own precision, or say why that failed. Raises: Stopped."""
    chosen = with_values(config, answer.values)
    _say(communicator, f"{steps} steps in {answer.precision} with what is recommended")
    try:
        tried = try_choice(chosen, communicator, num_steps=steps, say=lambda text: _say(communicator, f"  {text}"))
    except (TrainingDiverged, ConfigError) as error:  # what was measured holds all the same
        return dataclasses.replace(answer, failure=str(error))
    return dataclasses.replace(answer, tried=tried)


def _write(answer: Answer, out: Path, *, base: str, overrides: Sequence[str]) -> None:
    """Write precision.json, .png and .yaml, and print the answer in any case. Raises: RunFolderError."""
    folder = RunDir(out)
    try:
        _write_files(answer, folder, base=base)
    finally:  # a full disk does not take away what was measured
        for line in explain(answer):
            print_line(line)
    words = ["bigbatch", "train", "--config", str(folder.path / "precision.yaml"), *overrides]
    stated = {word.partition("=")[0] for word in overrides}
    for key, value in answer.values.items():
        if f"--{key}" in stated:  # and would go before the file's
            words += [f"--{key}", as_yaml(value)]
    print_line(f"left in {folder.path}: precision.yaml, precision.json, precision.png")
    print_line(f"take it by {shlex.join(words)}")


def _write_files(answer: Answer, folder: RunDir, *, base: str) -> None:
    folder.write_text(folder.path / "precision.json", json.dumps(answer.record(), indent=1) + "\n")
    sections: dict[str, object] = {"base": _base(base)}
    for key, value in answer.values.items():
        section, _, name = key.partition(".")
        held = sections.setdefault(section, {})
        assert isinstance(held, dict)
        held[name] = value
    folder.write_text(folder.path / "precision.yaml", dump_yaml(sections))
    plot_answer(answer, folder.path / "precision.png", title=f"{base}: gradients of {answer.num_steps} steps")


def _base(config: str) -> str:
    """Name the experiment so that a file elsewhere finds it."""
    return str(find_config(config).resolve()) if Path(config).exists() else config


def _say(communicator: Communicator, text: str) -> None:
    if communicator.rank == 0:
        print_line(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch tune precision",
        usage="bigbatch tune precision --config NAME --out FOLDER [--steps N] [--spans N ...] [--num-ranks N] "
        "[--try-steps N] [--dry-run] [--section.key VALUE ...]",
        description="Train a config for a few steps in fp32, count its gradients by size, and say from their underflow "
        "which loss scale, wire between ranks and ghost batch to take; then try that for --try-steps. Runs as one "
        "rank of a job.",
        epilog="example: bigbatch tune precision --config quickstart --optimizer.precision fp16 --out runs/precision",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, required=True, help="YAML file, or name of a packaged experiment")
    add(
        "--out", type=as_path, required=True, metavar="FOLDER", help="for precision.yaml, precision.json, precision.png"
    )
    add(
        "--steps",
        type=whole,
        default=STEPS,
        metavar="N",
        help=f"in fp32, with each ghost batch (default: {STEPS})",
    )
    add(
        "--spans",
        type=whole,
        nargs="+",
        metavar="N",
        help="ghost batches to compare (default: half the own, twice it)",
    )
    add("--num-ranks", type=whole, metavar="N", help="of the job to choose a wire for (default: of this one)")
    add(
        "--try-steps",
        type=whole,
        default=TRY_STEPS,
        metavar="N",
        help=f"with what is recommended, 0 for none (default: {TRY_STEPS}: a CPU may take minutes for a step of fp16)",
    )
    add("--dry-run", action="store_true", help="say what would be trained, and end")
    return parser
