"""One training run, for `bigbatch train` and for `bigbatch.train` in Python."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ProcessEnv, measured_folder, read_process_env
from bigbatch.errors import OutOfMemory, PeerLostError, ReplicasDiffer, add_note, notes_of
from bigbatch.trainer.build.input import Images, Split, list_images, num_train_samples
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.build.staging import stage_data, using_staged
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.doctor.mode import choose_mode
from bigbatch.trainer.healing import Ownership, can_heal, heal
from bigbatch.trainer.joining import Facts, arrive, connect_alone, facts_of, failing_alone, find_waiting, take_in
from bigbatch.trainer.machine.host import skip_compiler_import
from bigbatch.trainer.machine.memory import is_out_of_memory
from bigbatch.trainer.memory.largest_batch import free_memory
from bigbatch.trainer.memory.out_of_memory import explain
from bigbatch.trainer.run.checkpoint import list_checkpoints, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.metrics import MetricsLog
from bigbatch.trainer.step.stop_request import Joining, StopRequest, leave_stopped
from bigbatch.trainer.training_loop import TrainingHooks
from bigbatch.trainer.training_run import JoinedRank, TrainingRun


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; return the exit code. Collective over the job's ranks.

    Raises: UserError, such as OutOfMemory.
    """
    env = read_process_env()
    with failing_alone(env):
        config = load_config(argv)
    is_dry_run = "--dry-run" in argv
    if is_dry_run:  # a dry run copies nothing, and neither measures nor stores anything
        config = replace(
            config,
            data=replace(config.data, stage=None),
            comm=replace(config.comm, calibrate="never"),
        )
    skip_compiler_import()  # only here: bigbatch.train does not change a script's process
    job = join(config, env)
    gc.freeze()  # else each collection scans all objects of torch's imports, also while other ranks wait
    summary = lead(config, job, is_dry_run=is_dry_run, is_quiet="--quiet" in argv)
    return leave_stopped(env) if summary is None else 0


def join(config: Config, env: ProcessEnv) -> JoinedRank:
    """Connect to the other ranks; a process that joins a running job stays alone for now. Collective.

    Raises: ConfigError; CommError; TunedError.
    """
    bound = bind_rank(config, env)
    if env.joins:
        with failing_alone(env):
            return JoinedRank(connect_alone(config, env), env, None, bound)
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
    """Run the training and leave the job; return the summary: empty for a dry run, None if stopped. Collective.

    Raises: UserError, such as OutOfMemory, without leaving the job.
    """
    communicator = job.communicator
    groups = [communicator]
    try:
        with ExitStack() as stack:
            stack.enter_context(using_staged(config))
            ownership = stack.enter_context(Ownership(config))
            if not (is_dry_run or job.env.joins):
                ownership.take(communicator.control)
            listed: Images | None = None
            if not job.env.joins:
                local, staged = stage_data(config, communicator)
                listed = list_images(local, communicator)
                chosen = choose_mode(
                    config,
                    communicator,
                    num_samples=num_train_samples(config, listed),
                    kept=RunDir(Path(config.run.directory)).mode,
                    folder=measured_folder("modes"),
                    is_dry_run=is_dry_run,
                )
                config, job = chosen.config, replace(job, staged=staged, mode_told=chosen.told, mode_record=chosen.text)
            make_run = partial(TrainingRun, hooks=hooks or TrainingHooks(), is_quiet=is_quiet)
            if is_dry_run:
                stop = StopRequest(takes_signals=False)
                run = make_run(config, job=job, owner=None, stop=stop, listed=listed)
                summary: dict[str, Any] | None = run.describe()
            else:
                summary = _run_agreed(make_run, config, job, ownership, groups=groups, listed=listed)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason, notes = str(error), notes_of(error)
    else:
        groups[-1].close()
        return summary
    # outside of the except block: the error's frames hold the run's tensors
    failure = OutOfMemory(explain(config, reason, world_size=groups[-1].world_size, device=communicator.device))
    add_note(failure, *notes)
    raise failure


def _run_agreed(
    make_run: Callable[..., TrainingRun],
    config: Config,
    job: JoinedRank,
    ownership: Ownership,
    *,
    groups: list[Communicator],
    listed: Images | None,
) -> dict[str, Any] | None:
    """Train to the end or to a stop signal; return the summary, or None if stopped. Collective.

    If the ranks' weights differ during the run, go back to the newest checkpoint on which they agreed, or to the start
    of the run. If the run heals in place, continue without a lost rank, or with a rank that joins; append each new
    communicator to groups. A process that joins a running job does so first.
    Raises: PeerLostError; ReplicasDiffer if they differ at the start, or again after the run went back to that step.
    """
    been_back_at: int | None = None
    came_back, since = "", None
    stop: StopRequest | None = None  # one for all runs: its handlers also record signals between two runs
    kept: dict[str, Any] | None = None
    log = MetricsLog(RunDir(Path(config.run.directory)))
    splits: tuple[Split, Split] | None = None  # only of a rank that joins
    if job.env.joins:
        arrived = arrive(config, job, ownership=ownership)
        healed, splits, been_back_at = arrived.healed, arrived.splits, arrived.back_at
        job, kept, came_back, since = healed.job, healed.state, healed.told, healed.since
        groups.append(job.communicator)
    while True:
        run: TrainingRun | None = None
        difference, lost, left_at = "", None, None
        facts: Facts = dict
        try:
            if len(groups) > 1 and kept is None:  # loggers may send for a minute: the others wait here
                control, seconds = job.communicator.control, config.run.checkpoint_timeout_seconds
                write_on_first(log.close, control, what="end of the former group's records", timeout_seconds=seconds)
            run = make_run(
                config,
                job=job,
                owner=ownership.owner,
                kept=kept,
                stop=stop,
                listed=listed,
                splits=splits,
                log=log,
            )
            stop, listed, splits = run.parts.stop, run.listed, None
            facts = cache(partial(facts_of, config, listed))
            wants_join = partial(find_waiting, config, job.communicator, facts)
            return run.run(came_back=came_back, since=since, wants_join=wants_join)
        except Joining as joining:
            left_at = joining.since
        except ReplicasDiffer as error:
            if run is None:
                raise
            difference = str(error)
        except PeerLostError as error:
            if not can_heal(job, error) or (run is None and kept is None):
                raise
            lost = PeerLostError(*error.args)
            lost.lost_ranks = error.lost_ranks
        except BaseException:
            if run is None:  # loggers of a former run may be open
                log.close()
            raise
        # outside of the except block: the error's frames hold the run's tensors
        folder, device = RunDir(Path(config.run.directory)), job.communicator.device
        if lost or left_at is not None:
            kept = run.loop.copy_state() if run else kept
            del run
            free_memory(device)
            if lost:
                healed = heal(config, job, lost, kept=kept, ownership=ownership)
            else:
                assert left_at is not None
                healed = take_in(
                    config,
                    job,
                    kept=kept,
                    facts=facts,
                    close=log.close,
                    since=left_at,
                    ownership=ownership,
                    back_at=been_back_at,
                )
            job, kept, came_back, since = healed.job, healed.state, healed.told, healed.since
            groups.append(job.communicator)
            if kept is None and list_checkpoints(folder.checkpoints):
                config = replace(config, run=replace(config.run, resume="auto"))
            continue
        assert run is not None
        newest = next((c for c in reversed(list_checkpoints(folder.checkpoints)) if c.is_agreed), None)
        back_at = newest.step if newest else run.plan.first_step
        if back_at == been_back_at:
            raise ReplicasDiffer(f"{difference}; it is so again since the run went back to step {back_at}")
        been_back_at = back_at
        came_back, since = f"{difference}; going back to step {back_at}", None
        if newest:
            config, kept = replace(config, run=replace(config.run, resume=str(newest.path))), None
        del run
        free_memory(device)
