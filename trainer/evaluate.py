"""Accuracy of a finished or interrupted run: `bigbatch evaluate`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bigbatch.comm.environ import read_process_env
from bigbatch.trainer import build, build_input
from bigbatch.trainer.checkpoint import best_checkpoint, list_checkpoints, load_checkpoint, restoring
from bigbatch.trainer.config_file import load_config
from bigbatch.trainer.data.bad_pictures import require_few
from bigbatch.trainer.errors import CheckpointError
from bigbatch.trainer.evaluation import evaluate
from bigbatch.trainer.models.norm import flatten_running_statistics
from bigbatch.trainer.precision import Precision
from bigbatch.trainer.progress import describe_evaluation
from bigbatch.trainer.rundir import RunDir
from bigbatch.trainer.stage_data import stage_data


def main(argv: Sequence[str]) -> int:
    """Evaluate the checkpoint that argv names; the exit code. Collective over the job's ranks."""
    arguments, overrides = _parser().parse_known_args(argv)
    rundir = RunDir(arguments.run)
    if not rundir.config.is_file():
        raise CheckpointError(f"{rundir.path} is no run folder: it holds no {rundir.config.name}")
    config = load_config(["--config", str(rundir.config), *overrides], prog="bigbatch evaluate")
    path = arguments.checkpoint or _best_path(rundir)
    env = read_process_env()
    config = build.without_choices(config, world_size=env.world_size)
    build.bind_rank(config, env)
    communicator, _ = build.join_job(config, env)
    communicator.agree("the checkpoint to evaluate", str(path))
    model = build.make_model(config, communicator)
    precision = Precision(model, name=config.optimizer.precision, device=communicator.device)
    flatten_running_statistics(model)
    state = load_checkpoint(path)
    with restoring(path):
        precision.load_model_state(state["model"])
    skipped: dict[int, str] = {}
    config, _ = stage_data(config, communicator)
    split = build_input.make_eval_split(config, communicator)
    record = evaluate(
        model,
        build_input.eval_batches(config, communicator, split),
        normalize=build_input.make_normalize(config, communicator),
        communicator=communicator,
        num_samples=split.num_samples,
        flip=config.data.eval_flip,
        skipped=skipped.update,
    )
    split.loader.close()
    require_few(list(skipped.values()), max_skipped=config.data.max_skipped)
    if communicator.rank == 0:
        for reason in skipped.values():
            print(f"skipped: {reason}")
        print(f"{path}: {describe_evaluation(record)}")
        if arguments.json:
            print(json.dumps({"checkpoint": str(path), **record}))
    communicator.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch evaluate",
        description="Count the correct answers of a run's best checkpoint on the validation pictures. Any key of "
        "the run's config can be overridden, such as --data.root or --batch.microbatch_size.",
    )
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart")
    parser.add_argument("--checkpoint", type=Path, help="another checkpoint than the run's best")
    parser.add_argument("--json", action="store_true", help="also print the record as JSON")
    return parser


def _best_path(rundir: RunDir) -> Path:
    found = list_checkpoints(rundir.checkpoints)
    best = best_checkpoint(found) or (found[-1] if found else None)
    if best is None:
        raise CheckpointError(f"{rundir.checkpoints} holds no checkpoint: train the run first, or give --checkpoint")
    return best.path
