"""One training run, for `bigbatch train` and for `bigbatch.train` in Python."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import ProcessEnv, measured_folder, read_process_env
from bigbatch.errors import OutOfMemory, ReplicasDiffer
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.build.staging import using_staged
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.doctor.mode import choose_mode
from bigbatch.trainer.machine.host import leave_compiler_out
from bigbatch.trainer.machine.memory import is_out_of_memory
from bigbatch.trainer.memory.largest_batch import free_memory
from bigbatch.trainer.memory.out_of_memory import explain
from bigbatch.trainer.run.checkpoint import list_checkpoints, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.hooks import TrainingHooks
from bigbatch.trainer.run.owner import Owner, owning
from bigbatch.trainer.step.stop_request import leave_stopped
from bigbatch.trainer.training_run import JoinedRank, TrainingRun


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; return the exit code. Collective over the job's ranks.

    Raises: UserError, such as OutOfMemory.
    """
    config = load_config(argv)
    is_dry_run = "--dry-run" in argv
    if is_dry_run:  # what would be copied, or measured and kept, is left alone
        config = replace(
            config,
            run=replace(config.run, memory_every_steps=0),
            data=replace(config.data, stage=None),
            comm=replace(config.comm, calibrate="never"),
        )
    leave_compiler_out()  # the process is the command's: bigbatch.train leaves a script's own as it is
    env = read_process_env()
    job = join(config, env)
    summary = lead(config, job, is_dry_run=is_dry_run, is_quiet="--quiet" in argv)
    return leave_stopped(env) if summary is None else 0


def join(config: Config, env: ProcessEnv) -> JoinedRank:
    """Meet the other ranks. Collective. Raises: ConfigError; CommError; TunedError."""
    bound = bind_rank(config, env)
    kept = RunDir(Path(config.run.directory)).calibration
    communicator, tuned = join_job(config, env, kept_calibration=kept)
    return JoinedRank(communicator, env, tuned, bound)


def lead(
    config: Config,
    job: JoinedRank,
    *,
    hooks: TrainingHooks | None = None,
    is_dry_run: bool = False,
    is_quiet: bool = False,
) -> dict[str, Any] | None:
    """Do the run and leave the job; return its summary, empty for a dry run, None if stopped. Collective.

    Raises: UserError, such as OutOfMemory; the job is not left then.
    """
    communicator = job.communicator
    try:
        with ExitStack() as stack:
            stack.enter_context(using_staged(config, communicator))
            owners: list[Owner] = []
            if not is_dry_run:  # lock the run folder on the first rank; the others wait for that
                write_on_first(
                    lambda: owners.append(stack.enter_context(owning(Path(config.run.directory)))),
                    communicator.control,
                    what="claim of the run folder",
                    timeout_seconds=config.run.checkpoint_timeout_seconds,
                )
            owner = next(iter(owners), None)
            chosen = choose_mode(
                config,
                communicator,
                kept=RunDir(Path(config.run.directory)).mode,
                folder=measured_folder("modes"),
                is_dry_run=is_dry_run,
            )
            config, job = chosen.config, replace(job, mode_told=chosen.told, mode_record=chosen.text)
            make_run = partial(TrainingRun, job=job, owner=owner, hooks=hooks or TrainingHooks(), is_quiet=is_quiet)
            summary = make_run(config).describe() if is_dry_run else _run_agreed(make_run, config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    else:
        communicator.close()
        return summary
    # outside of the except block: the error's frames hold the run's tensors
    raise OutOfMemory(explain(config, reason, world_size=communicator.world_size, device=communicator.device))


def _run_agreed(make_run: Callable[[Config], TrainingRun], config: Config) -> dict[str, Any] | None:
    """Train to the end or to a stop signal; return the summary, or None if stopped. Collective.

    If the ranks' weights differ during the run, go back to the newest checkpoint on which they agreed, or to the start
    of the run.
    Raises: ReplicasDiffer if they differ at the start, or again after the run went back to the same step.
    """
    been_back_at: int | None = None
    came_back, asked_by = "", None
    while True:
        run = make_run(config)
        if asked_by:
            run.parts.stop.ask(asked_by)
        try:
            return run.run(came_back=came_back)
        except ReplicasDiffer as error:
            difference = str(error)
        # outside of the except block: the error's frames hold the run's tensors
        asked_by = run.parts.stop.signal_name
        newest = next((c for c in reversed(list_checkpoints(run.rundir.checkpoints)) if c.is_agreed), None)
        back_at = newest.step if newest else run.plan.first_step
        if back_at == been_back_at:
            raise ReplicasDiffer(f"{difference}; it is so again since the run went back to step {back_at}")
        been_back_at = back_at
        came_back = f"{difference}; going back to step {back_at}"
        if newest:
            config = replace(config, run=replace(config.run, resume=str(newest.path)))
        device = run.communicator.device
        del run
        free_memory(device)
