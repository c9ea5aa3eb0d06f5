"""`bigbatch tune range`: one training in which the learning rate rises until the loss explodes."""

import argparse
import dataclasses
import math
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.colours import new_figure
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import ConfigError, TrainingDiverged, TuneError, print_line, printable
from bigbatch.paths import as_path, expand_path
from bigbatch.tools.tune.few_steps import few_steps
from bigbatch.tools.tune.range.curve import (
    EXPLODED,
    MAX_STEPS,
    MIN_STEPS,
    SmoothedLoss,
    Suggestion,
    exponential,
    smooth,
    suggest,
)
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import RANGE_TEST
from bigbatch.trainer.config.short_run import to_the_last_epoch
from bigbatch.trainer.folder.folder import RunDir, require_writable
from bigbatch.trainer.folder.ownership import write_on_first
from bigbatch.trainer.step.stop_request import leave_stopped
from bigbatch.words import decimal, whole

LINES = 20
"""Lines of progress over all steps."""


def main(argv: Sequence[str]) -> int:
    """Run the test that argv states; return the exit code. Collective over the job's ranks.

    Raises: ConfigError; TuneError if the loss explodes too soon to read anything.
    """
    arguments, overrides = parse_beside_keys(_parser(), argv)
    low, high, steps = arguments.low, arguments.high, arguments.steps
    if not 0 < low < high < math.inf:
        raise ConfigError(f"--from {low:g} --to {high:g}: give two learning rates above 0, the second one larger")
    if not MIN_STEPS <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps {steps} give no curve to read: give {MIN_STEPS} to {MAX_STEPS}")
    overrides = [word for word in overrides if not word.startswith(f"--{RANGE_TEST}=")]
    # the config's earlier range test may be of another recipe: this test replaces it
    words = ["--config", arguments.config, *overrides, f"--{RANGE_TEST}=null"]
    config = require_own_list(load_config(words, prog="bigbatch tune range"), words)
    to_its_end = dataclasses.replace(to_the_last_epoch(config.run), divergence_steps=None)  # the test detects it
    config = dataclasses.replace(config, run=to_its_end)
    env = read_process_env()
    bind_rank(config, env)
    communicator, tuned = join_job(config, env)
    communicator.agree("the range test", f"{low} {high} {steps}")
    curve = _Curve(communicator, num_steps=steps)
    write_on_first(
        partial(require_writable, arguments.out),
        communicator.connection.control,
        what="range.json",
        timeout_seconds=config.run.checkpoint_timeout_seconds,
    )
    lr, stopped_by = exponential(low, high, steps=steps), None
    with few_steps(config, communicator, num_steps=steps, say=curve.say, schedule=lr, tuned=tuned) as (_, run):
        try:
            stopped_by = run(curve.add)
        except TrainingDiverged as end:
            # the exploded step was not added: its index is the number of added steps
            curve.exploded_lr = lr(len(curve.lrs))
            curve.say(f"{str(end).partition(':')[0]}, at a learning rate of {curve.exploded_lr:.4g}")
    if stopped_by:
        curve.say(f"stopped by {stopped_by}; nothing was written")
    elif communicator.rank == 0:
        _finish(curve, config, arguments=arguments, overrides=overrides)
    communicator.close()
    return leave_stopped(env) if stopped_by else 0


class _Curve:
    """Holds the learning rate and the loss over all ranks of each step, and the rate at which the loss exploded."""

    def __init__(self, communicator: Communicator, *, num_steps: int) -> None:
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.exploded_lr: float | None = None
        self._mean = SmoothedLoss()
        self._is_first = communicator.rank == 0
        self._num_steps = num_steps

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self._is_first:
            print_line(text)

    def add(self, record: dict[str, Any]) -> None:
        """Add a report, equal on all ranks. Raises: TrainingDiverged if the loss exploded, on all ranks alike."""
        mean = self._mean.add(record["loss"])
        if self._mean.has_exploded(mean):
            raise TrainingDiverged(f"the loss is {EXPLODED:g} times its lowest at step {record['step']}")
        self.lrs.append(record["lr"])
        self.losses.append(record["loss"])
        if record["step"] % max(1, self._num_steps // LINES) == 0:
            self.say(f"step {record['step']}  lr {record['lr']:.4g}  loss {record['loss']:.4f}  smoothed {mean:.4f}")


def _finish(curve: _Curve, config: Config, *, arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write range.json and range.png, and print the readings even if that fails. Raises: TuneError; RunFolderError."""
    if curve.exploded_lr and not curve.lrs:
        raise TuneError(
            "the loss is not finite at the first step, before any update: look for an error in data and model"
        )
    if curve.exploded_lr and len(curve.lrs) < MIN_STEPS // 2:
        raise TuneError(
            f"the loss exploded at step {len(curve.lrs) + 1}, at a learning rate of {curve.exploded_lr:.4g}: start "
            f"lower than --from {arguments.low:g}"
        )
    found = suggest(curve.lrs, curve.losses, exploded_lr=curve.exploded_lr)
    folder = RunDir(arguments.out)
    record = range_record(curve.lrs, curve.losses, found, config=dump_config(config))
    try:
        folder.write_json(folder.path / "range.json", record)
        plot_range(curve.lrs, curve.losses, found, folder.path / "range.png", title=f"{arguments.config}, range test")
    finally:  # a full disk must not lose the result
        for line in explain(found, high=arguments.high, experiment=[arguments.config, *overrides]):
            curve.say(line)
    curve.say(f"plot: {folder.path / 'range.png'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch tune range",
        usage="bigbatch tune range --config NAME --from LR --to LR --steps N --out FOLDER [--section.key VALUE ...]",
        description="Train a config for a few steps while the learning rate rises by the same factor each step, and "
        "find from the loss which rates are too small and which too large. Runs as one rank of a job.",
        epilog="example: bigbatch launch mpirun --ranks 2 -- tune range --config quickstart --from 0.1 --to 100 "
        "--steps 60 --out runs/range",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, required=True, help="YAML file, or name of a packaged experiment")
    add("--from", dest="low", type=decimal, required=True, metavar="LR", help="learning rate of the first step")
    add("--to", dest="high", type=decimal, required=True, metavar="LR", help="learning rate of the last step")
    add("--steps", type=whole, required=True, help=f"updates, {MIN_STEPS} at least; 100 is usual")
    add("--out", type=as_path, required=True, metavar="FOLDER", help="folder for range.json and range.png")
    return parser


def range_record(lrs: Sequence[float], losses: Sequence[float], found: Suggestion, *, config: str) -> dict[str, Any]:
    """Return the content of range.json; losses in nats, one per step."""
    return {
        "suggested_lr": found.suggested_lr,
        "steepest_lr": found.steepest_lr,
        "exploded_lr": found.exploded_lr,
        "tenth_of_exploded_lr": found.tenth_lr,
        "lr": list(lrs),
        "loss": list(losses),
        "smoothed_loss": smooth(losses),
        "config": config,
    }


def explain(found: Suggestion, *, high: float, experiment: Sequence[str]) -> list[str]:
    """Return the reading and the next steps. experiment: the words that follow --config, with overrides."""
    if found.suggested_lr is None:
        return ["the loss never fell: raise --to, take more --steps, or look for an error in data and model"]
    lines = [f"steepest descent at a learning rate of {found.steepest_lr:.4g}"]
    if found.exploded_lr is None:
        lines.append(f"the loss did not explode up to {high:g}: raise --to to find the rate at which it does")
    else:
        lines.append(f"exploded at {found.exploded_lr:.4g}; a tenth of that is {found.tenth_lr:.4g}")
    limit = found.exploded_lr or high
    lines.append(f"suggested: {found.suggested_lr:.4g}; start a search from it:")
    space = f"schedule.base_lr=log:{found.suggested_lr / 4:.4g}:{limit:.4g}"
    config = shlex.join(experiment)
    lines.append(f"  bigbatch tune search --config {config} --space {space} --trials 12 --epochs 3 --study FOLDER")
    return lines


def plot_range(lrs: Sequence[float], losses: Sequence[float], found: Suggestion, path: Path, *, title: str) -> None:
    """Plot loss over the learning rate (log), raw and smoothed, with the readings as lines, as a PNG."""
    figure, (axes,) = new_figure(7, 4.2)
    axes.plot(lrs, losses, color="0.75", label="loss of a step")
    axes.plot(lrs, smooth(losses), color="#0072B2", label="running mean")
    for lr, color, label in (
        (found.steepest_lr, "#009E73", "steepest descent"),
        (found.tenth_lr, "#E69F00", "a tenth of the exploding rate"),
        (found.exploded_lr, "#D55E00", "exploded"),
    ):
        if lr is not None:
            axes.axvline(lr, color=color, linestyle="--", label=f"{label}: {lr:.4g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="cross-entropy (nats)")
    axes.set_title(printable(title), parse_math=False)  # a path may have two dollar signs
    first, low = losses[0], min(losses)
    room = max(first - low, abs(first) / 2)
    if max(losses) > first + room:  # an explosion is many times as high as the descent that is to be seen
        axes.set_ylim(low - room / 10, first + room)
    axes.legend(fontsize=8)
    RunDir(path.parent).save_plot(path, figure)
