"""`bigbatch train --dry-run`: what a training would do. It trains, stages and writes nothing."""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import print_line
from bigbatch.trainer.build.compute_mode import choose_mode, describe_mode
from bigbatch.trainer.build_run import build_run, failing_as_lost_rank
from bigbatch.trainer.checkpoint.rank_memory import checkpoint_bytes, rank_bytes
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.options import GPUS
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir, read_curves
from bigbatch.trainer.machine.host import list_own_gpu_first, skip_compiler_import
from bigbatch.trainer.run import Training, TrainingRun, prepare
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.stop_request import StopRequest
from bigbatch.trainer.train import join, run_training
from bigbatch.words import count, has_numbers


def main(argv: Sequence[str], env: ProcessEnv) -> int:
    """Print what argv would train, or with --gpus N the compute mode of N GPUs; return the exit code. Collective.

    Raises: UserError, such as OutOfMemory.
    """
    with failing_as_lost_rank(env):
        config = require_own_list(load_config(argv), argv)
    if (num_gpus := gpus_of(argv)) is not None:
        note = choose_mode(config, world_size=num_gpus).note
        print_line(note or f"compute.mode eager: {describe_mode(config)}, as stated")
        return 0
    skip_compiler_import()
    if env.local_rank:
        list_own_gpu_first(env, backend=config.comm.backend)
    config = replace(config, data=replace(config.data, stage=None))  # a dry run copies nothing
    run_training(config, join(config, env), is_quiet="--quiet" in argv, work=describe)
    return 0


def gpus_of(argv: Sequence[str]) -> int | None:
    """Return N of --gpus N in words that load_config accepts; None without."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(GPUS, type=int)
    number: int | None = parser.parse_known_args(argv)[0].gpus
    return number


def describe(training: Training) -> dict[str, Any]:
    """Print what train() prints before its first step, and what it would do next; return an empty summary.

    Collective. Raises: UserError.
    """
    training.start = start = replace(prepare(training.start), stop=StopRequest(takes_signals=False))
    run = TrainingRun(build_run(start, is_quiet=training.is_quiet))
    try:
        run.introduce()
        for line in lines(run.config, run.parts, plan=run.plan):
            run.output.say(line)
    finally:
        run.close()
    return {}


def lines(config: Config, parts: Parts, *, plan: Plan) -> Iterator[str]:
    """Yield the lines about a run that a dry run describes."""
    rundir, steps = RunDir(Path(config.run.directory)), range(plan.first_step + 1, plan.num_steps + 1)
    yield (
        f"dry run: {count(len(steps), 'step')}, {plan.steps_per_epoch} in an epoch, with "
        f"{count(sum(map(plan.is_evaluation, steps)), 'evaluation')}, would go to {rundir.path}; nothing is trained, "
        "staged or written"
    )
    yield (
        f"memory of a rank: {rank_bytes(config, parts) / 1e6:.3g} MB of weights, gradients and optimizer state, "
        f"plus activations (not estimated); of a checkpoint: {checkpoint_bytes(config, parts) / 1e6:.3g} MB"
    )
    rates = [r["images_per_second"] for r in read_curves(rundir.metrics) if has_numbers(r, "images_per_second")]
    per_epoch = plan.steps_per_epoch * plan.global_batch_size
    known = f"{per_epoch / statistics.median(rates):.3g} s, by its reports so far" if rates else "not known yet"
    yield f"time of an epoch's steps: {known}"
