"""One training run, for `bigbatch train` and for `bigbatch.train` in Python."""

from collections.abc import Callable, Sequence
from typing import Any

from bigbatch.comm.connection import abort_connection
from bigbatch.comm.rendezvous.environ import ProcessEnv, read_process_env
from bigbatch.errors import LOST, OutOfMemory, PeerLostError, add_note, notes_of, tell
from bigbatch.parts import load
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.build_run import JobRank, failing_as_lost_rank
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.machine.host import is_out_of_memory, list_own_gpu_first, skip_compiler_import
from bigbatch.trainer.observe.observer import Observer
from bigbatch.trainer.run import Training
from bigbatch.trainer.step.stop_request import leave_stopped

DRY_RUN = "bigbatch.trainer.dry_run.main"


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; return the exit code. Collective over the job's ranks.

    Raises: UserError, such as OutOfMemory.
    """
    env = read_process_env()
    if "--dry-run" in argv:
        return int(load(DRY_RUN)(argv, env))
    with failing_as_lost_rank(env):
        config = load_config(argv)
    # only here: bigbatch.train does not change a script's process
    skip_compiler_import()
    if env.local_rank:
        list_own_gpu_first(env, backend=config.comm.backend)
    summary = run_training(config, join(config, env), is_quiet="--quiet" in argv)
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
    is_quiet: bool = False,
    work: Callable[[Training], dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """Run the training and leave the job; return the summary, or None if stopped. Collective.

    work: called with the Training in place of train(), such as a dry run.
    Raises: UserError, such as OutOfMemory, without leaving the job.
    """
    training = Training(config, job, observers=observers, is_quiet=is_quiet)
    try:
        summary = work(training) if work else training.train()
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
