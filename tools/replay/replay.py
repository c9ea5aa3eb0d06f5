"""`bigbatch replay`: compute a step of a run again in one process, and compare it with the run's digests."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import DIFFERENT, DataError, RunFolderError, print_line
from bigbatch.paths import as_path
from bigbatch.tools.replay.diff import KEY, RecordedRun, find_difference, read_run
from bigbatch.tools.replay.difference import likely_cause
from bigbatch.trainer.build.input import step_requests, train_batches
from bigbatch.trainer.build.job import fusion_sizes
from bigbatch.trainer.build_run import RunStart, build_run
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.checkpoint.resume import changes
from bigbatch.trainer.config.batch import ranks_per_ghost
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir, load_run_config
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.observe.digests import (
    PHASES,
    STATE,
    SUMMED,
    Row,
    by_microbatch,
    by_place,
    chosen_layers,
    digests_of_update,
    positions_of,
)
from bigbatch.trainer.observe.gradient_audit import recompute
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.summary import describe_job
from bigbatch.trainer.run import TrainingRun
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Plan
from bigbatch.trainer.step.stop_request import StopRequest
from bigbatch.trainer.train import join
from bigbatch.words import count, whole

SAME_BITS = ("device", "bigbatch", "torch", "instructions", "threads")
"""Facts about a job that decide how numbers are rounded even in one process."""


def main(argv: Sequence[str]) -> int:
    """Replay a step; return 0 if its digests are equal, else DIFFERENT. Raises: UserError, such as RunFolderError."""
    arguments, overrides = parse_beside_keys(_make_parser(), argv)
    run = read_run(arguments.run)
    config = load_run_config(RunDir(run.path), overrides, prog="bigbatch replay")
    require_own_list(config, ["--config", str(RunDir(run.path).config), *overrides])
    return replay(run, config, step=arguments.step)


def replay(run: RecordedRun, config: Config, *, step: int) -> int:
    """Compute a step, counted from 1, again, and print how its digests differ from the run's; return the exit code.

    config: of the run, whose folder is not changed.
    Raises: RunFolderError if the digests cannot be compared; UserError, such as DataError.
    """
    recorded = _recorded(run, config, step=step)
    paths = {c.step: c.path for c in list_checkpoints(RunDir(run.path).checkpoints) if c.step < step}
    first_step = max(paths, default=run.first_step)
    if first_step and not paths:
        raise RunFolderError(
            f"{run.path} has no checkpoint before step {step}, and began at step {first_step} with a checkpoint of "
            "another run: keep more checkpoints (run.keep_checkpoints)"
        )
    jobs = run.jobs_between(first_step, step) or [run.job]
    made_by = jobs[-1]
    several = [each.get("world_size") for each in jobs if each.get("world_size") != 1]
    is_exact = config.run.reproducible or not several
    if not is_exact and first_step != step - 1:
        raise RunFolderError(
            f"{run.path} was trained without run.reproducible, and one process rounds the sums of its "
            f"{several[-1]} ranks differently: only the step after a checkpoint can be replayed, and the "
            f"newest one before step {step} is of step {first_step}"
        )
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="bigbatch-replay-"))
        resume = str(paths[first_step]) if paths else "auto"
        own = _for_one_process(config, folder=folder, resume=resume, num_threads=made_by.get("threads"))
        job = join(own, ALONE)
        stack.enter_context(closing(job.communicator))
        stop = StopRequest(takes_signals=False)  # there is no checkpoint to save before a stop
        begin = RunStart(config=own, job=job, log=MetricsLog(RunDir(Path(folder))), stop=stop)
        training = TrainingRun(build_run(begin, is_quiet=True))
        stack.callback(training.close)
        again = _compute(training, recorded, step=step, is_exact=is_exact)
        here = describe_job(job.communicator, training.parts, plan=training.plan, num_train=0, num_val=0)
    facts = {key: (made_by[key], here[key]) for key in SAME_BITS if key in made_by and made_by[key] != here[key]}
    difference = find_difference(run, RecordedRun(Path("the replay"), {step: again}, here, ""), steps=[step])
    changed_keys = changes(training.start.config, dump_config(config)) if training.start.config else {}
    for key, text in changed_keys.items():
        print_line(f"config: {key}={text}")
    for key, (theirs, ours) in facts.items():
        print_line(f"job: {key} is {theirs} in {run.path}, {ours} here")
    if difference:
        print_line(str(difference))
        cause = likely_cause(difference, [*changed_keys, *facts], is_step_before_equal=first_step == step - 1)
        print_line(f"likely cause: {cause}")
        return DIFFERENT
    phases = [phase for phase in PHASES if recorded.get(phase) and again[phase]]
    ranks = recorded.get("ranks", [])
    start = f"the checkpoint of step {first_step}" if first_step else "the start of the run"
    print_line(
        f"step {step}: {', '.join(phases)} are equal, of {count(len(ranks), 'microbatch')} on "
        f"{count(len(set(ranks)), 'rank')}, computed again from {start}"
    )
    return 0


def _recorded(run: RecordedRun, config: Config, *, step: int) -> Mapping[str, Any]:
    """Return the digests of a step. Raises: RunFolderError if there are none that one process can compare."""
    if not run.digests:
        raise RunFolderError(f"{run.path} has no digests to compare with: train with --{KEY} 1")
    if step not in run.digests:
        nearest = min(run.digests, key=lambda each: abs(each - step))
        raise RunFolderError(
            f"{run.path} has no digests of step {step}: the nearest step that it recorded is {nearest}"
        )
    if ranks_per_ghost(config.batch) > 1:
        raise RunFolderError(
            f"{run.path} has ghost batches on several ranks (batch.bn_span={config.batch.bn_span}), whose statistics "
            "one process does not compute"
        )
    found = run.digests[step]
    size, rest = divmod(config.batch.global_batch_size, len(found.get("ranks", [])) or 1)
    if "ranks" in found and (rest or size != config.batch.microbatch_size):
        raise RunFolderError(
            f"step {step} of {run.path} had {count(len(found['ranks']), 'microbatch')}, and its config now gives "
            f"another number: set --batch.microbatch_size {size}"
        )
    return found


def _for_one_process(config: Config, *, folder: str, resume: str, num_threads: int | None) -> Config:
    """Return the config for one process, which reads the run's data in place. num_threads: of a rank of the run."""
    comm = replace(config.comm, algorithm="native", table=None, group_size=None, timeline_steps=None, buffers="torch")
    return replace(
        config,
        run=replace(config.run, directory=folder, resume=resume, digest_values=None),
        data=replace(config.data, stage=None, bind_numa=False),
        batch=replace(config.batch, virtual_ranks=None),
        compute=replace(config.compute, cuda_graph=False, cpu_threads=config.compute.cpu_threads or num_threads),
        comm=replace(comm, **asdict(fusion_sizes(config))),
    )


def _compute(training: TrainingRun, recorded: Mapping[str, Any], *, step: int, is_exact: bool) -> dict[str, Any]:
    """Return a record of the step's digests; is_exact False leaves out sums and weights."""
    config, parts, split = training.config, training.parts, training.splits.train
    parts.model.train()
    train_step = TrainStep(training.plan, parts)

    def make_steps(plan: Plan) -> None:
        stream = InputStream(train_batches(config, split, plan=plan))
        for number in range(plan.first_step, plan.num_steps):
            train_step(number, stream)
            if stream.failure:
                raise DataError(stream.failure.reason)
        parts.precision.wait_for_weights()

    make_steps(replace(training.plan, num_steps=step - 1))
    layers = chosen_layers(parts.model, config.run.digest_layers or ())
    images: list[tuple[int, int]] = []
    rows: list[Row] = []
    numbers = range(training.plan.division.num_microbatches)
    before = [(buffer, buffer.clone()) for buffer in parts.model.buffers()]
    requests = step_requests(config, split, plan=training.plan, step=step - 1, microbatches=numbers)
    for number, batch in enumerate(split.loader.load(requests)):
        found, of_gradients = recompute(parts, training.plan, batch, step=step - 1, microbatch=number, layers=layers)
        images += zip(found, positions_of(batch), strict=True)
        rows += of_gradients
    for buffer, value in before:  # a forward may change buffers, as spectral norm's does
        buffer.copy_(value)
    if is_exact:
        make_steps(replace(training.plan, first_step=step - 1, num_steps=step))
    return {
        "step": step,
        "ranks": recorded.get("ranks", []),  # those that computed the microbatches
        **by_place(images),
        **by_microbatch(rows, num_microbatches=len(numbers)),
        **(
            digests_of_update(parts, done=step, is_sharded=config.optimizer.sharded)
            if is_exact
            else {SUMMED: {}, STATE: {}}
        ),
    }


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch replay",
        usage="bigbatch replay RUN --step K [--section.key VALUE ...]",
        description="Compute step K of a run again in one process, whatever number of ranks trained it, and compare "
        f"it with the digests that the run recorded (--{KEY} N): images, each microbatch's gradients, their sums, "
        "weights. It begins at the newest checkpoint before K, or at the start of the run, and writes nothing. The "
        "first rank, microbatch and tensor that differ are named. More than one step from a checkpoint needs "
        "run.reproducible, or a run of one rank. If the data have moved, give --data.root.",
        epilog=f"The exit code is 0 if all digests are equal, {DIFFERENT} if one differs, and 1 if the step cannot be "
        "replayed. example: bigbatch replay runs/quickstart --step 12",
    )
    parser.add_argument("run", type=as_path, metavar="RUN", help="a run folder")
    parser.add_argument("--step", type=whole, required=True, metavar="K", help="a step, counted from 1")
    return parser
