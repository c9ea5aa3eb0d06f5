"""One training run, for `bigbatch train` and for `bigbatch.train` in Python."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bigbatch.comm.connection import abort_connection
from bigbatch.comm.rendezvous.environ import ProcessEnv, read_process_env
from bigbatch.errors import LOST, OutOfMemory, PeerLostError, add_note, notes_of, print_line, tell
from bigbatch.parts import load
from bigbatch.trainer.build.compute_mode import choose_mode, describe_mode
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.build_run import JobRank, failing_as_lost_rank
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.options import dry_run_gpus
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.machine.host import is_out_of_memory, list_own_gpu_first, skip_compiler_import
from bigbatch.trainer.observe.observer import Observer
from bigbatch.trainer.run import Training
from bigbatch.trainer.step.stop_request import leave_stopped

REQUIRE_OWN_LIST = "bigbatch.trainer.config.moved.require_own_list"


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; return the exit code. Collective over the job's ranks.

    Raises: UserError, such as OutOfMemory.
    """
    env = read_process_env()
    is_dry_run = "--dry-run" in argv
    with failing_as_lost_rank(env):
        config = load_config(argv)
        if is_dry_run:
            load(REQUIRE_OWN_LIST)(config, argv)
    if is_dry_run:
        if (num_gpus := dry_run_gpus(argv)) is not None:
            note = choose_mode(config, world_size=num_gpus).note
            print_line(note or f"compute.mode eager: {describe_mode(config)}, as stated")
            return 0
        config = replace(config, data=replace(config.data, stage=None))  # a dry run copies nothing
    # only here: bigbatch.train does not change a script's process
    skip_compiler_import()
    list_own_gpu_first(env)
    job = join(config, env)
    is_quiet = "--quiet" in argv
    summary = run_training(config, job, is_dry_run=is_dry_run, is_quiet=is_quiet)
    return leave_stopped(env) if summary is None else 0


def join(config: Config, env: ProcessEnv) -> JobRank:
    """Connect to the other ranks; a process that joins a running job stays alone for now. Collective.

    Raises: ConfigError; CommError; TunedError.
    """
    bound = bind_rank(config, env)
    if env.joins:
        with failing_as_lost_rank(env):
            alone = load("bigbatch.trainer.joining.connect_alone")(config, env)
            return JobRank(alone, env, None, bound)
    communicator, tuned = join_job(config, env)
    return JobRank(communicator, env, tuned, bound)


def run_training(
    config: Config,
    job: JobRank,
    *,
    observers: Sequence[Observer] = (),
    is_dry_run: bool = False,
    is_quiet: bool = False,
) -> dict[str, Any] | None:
    """Run the training and leave the job; return the summary: empty for a dry run, None if stopped. Collective.

    Raises: UserError, such as OutOfMemory, without leaving the job.
    """
    training = Training(config, job, observers=observers, is_quiet=is_quiet)
    try:
        summary = training.describe() if is_dry_run else training.train()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason, notes = str(error), notes_of(error)
    else:
        last = training.start.job.communicator.connection
        try:
            last.close()
        except PeerLostError as lost:
            if last.endpoints is None or lost.exit_code != LOST:
                raise
            tell(f"{lost}; the run was finished before")
            abort_connection(last.control)
        return summary
    # outside of the except block: the error's frames hold the run's tensors
    chosen, group = training.start.config, training.start.job.communicator
    del training
    from bigbatch.trainer.memory.out_of_memory import explain  # only a failed run searches for what fits

    failure = OutOfMemory(explain(chosen, reason, stated=config, world_size=group.world_size, device=group.device))
    add_note(failure, *notes)
    raise failure
