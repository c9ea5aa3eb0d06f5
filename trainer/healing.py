"""Healing in place: if a rank is lost, the others continue from the last step in the same processes; ranks may join."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import HEALING
from bigbatch.comm.connection import Connection, abort_connection
from bigbatch.comm.gradients.broadcast import send_object
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.regroup import Endpoint, Group, regroup
from bigbatch.errors import LOST, CaptureFailed, ConfigError, GoingBack, PeerLostError
from bigbatch.parts import load
from bigbatch.trainer.build.compute_mode import choose_as_launched
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.build.parts import can_keep_parts
from bigbatch.trainer.build_run import JobRank, RunStart
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.config.batch import divide_batch
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.folder.owner import Claim, newest_claim
from bigbatch.trainer.folder.ownership import Ownership, write_on_first
from bigbatch.trainer.loop import TrainingLoop
from bigbatch.trainer.recovery import Interruption, Restart, resuming
from bigbatch.trainer.step.stop_request import Joining
from bigbatch.words import count

Connected = tuple[Communicator, dict[str, Any] | None]
"""A group that this rank has connected, and the state on which its ranks have agreed."""


NEEDED_LATER = (
    "bigbatch.comm.algorithms.hierarchical.make_hierarchical",
    "bigbatch.trainer.models.exchange.from_foreign",
)
"""Imported at the start: when a rank is lost, the disk with their files may be lost, too."""


class InPlace:
    """Lets the remaining ranks of a job continue in the same processes, and other ranks join them; see Recovery."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership, self._restart = ownership, Restart(ownership)
        self._facts: Callable[[], dict[str, str]] = dict
        self._interruption: Interruption | None = None
        for path in NEEDED_LATER:
            load(path)

    def enter(self, start: RunStart) -> RunStart | None:
        if not start.job.env.joins:
            return None
        device, world_size = start.job.communicator.device, start.job.env.world_size
        start = replace(start, config=choose_as_launched(start.config, device, world_size=world_size).config)
        start, went_back = load("bigbatch.trainer.joining.join_running_job")(start, ownership=self._ownership)
        self._restart.back_at, self._restart.check_until = went_back
        return self._continue(start)

    def wants_join(self, start: RunStart) -> Callable[[], object]:
        facts_of, find = map(load, ("bigbatch.trainer.joining.facts_of", "bigbatch.trainer.joining.find_join_requests"))
        self._facts = cache(partial(facts_of, start.config, start.images))
        return partial(find, start.config, start.job.communicator.connection, self._facts)

    def accept(self, error: Interruption, start: RunStart, loop: TrainingLoop | None) -> None:
        self._interruption = None
        if isinstance(error, GoingBack | CaptureFailed):
            self._restart.accept(error, start, loop)
        elif isinstance(error, Joining):
            self._interruption = Joining(since=error.since)
        elif not can_heal(start.job, error) or (loop is None and start.state is None):
            raise error
        else:
            self._interruption = PeerLostError(*error.args)  # without frames
            self._interruption.lost_ranks = error.lost_ranks

    def keep(self, start: RunStart, loop: TrainingLoop | None) -> RunStart:
        if loop is None or self._interruption is None:
            return self._restart.keep(start, loop)
        state = loop.copy_state()
        parts = loop.parts if can_keep_parts(start.config) else None
        return replace(start, state=state, parts=parts, is_in_parts=parts is not None and state is not None)

    def recover(self, start: RunStart) -> RunStart:
        interruption, self._interruption = self._interruption, None
        if isinstance(interruption, PeerLostError):
            return self._continue(heal(start, interruption, ownership=self._ownership))
        if not isinstance(interruption, Joining):
            return self._restart.recover(start)
        start = load("bigbatch.trainer.joining.admit_ranks")(
            start,
            facts=self._facts,
            since=interruption.since,
            ownership=self._ownership,
            went_back=(self._restart.back_at, self._restart.check_until),
        )
        return self._continue(start)

    def _continue(self, start: RunStart) -> RunStart:
        """Return the start of a run in this group, which still checks its gradients if the former group did."""
        start, until = _continue(start), self._restart.check_until
        done = start.state["step"] if start.state else 0
        return replace(start, check_until=until if until > done else 0)


def _continue(start: RunStart) -> RunStart:
    """Return the start of a run in this group, from its state or else from the newest checkpoint. Collective."""
    if start.state is not None:
        return start
    control, seconds = start.job.communicator.connection.control, start.config.run.checkpoint_timeout_seconds
    # loggers may send for a minute: the other ranks wait here
    write_on_first(start.log.close, control, what="end of the former group's records", timeout_seconds=seconds)
    checkpoints = list_checkpoints(RunDir(Path(start.config.run.directory)).checkpoints)
    return resuming(start, "auto") if checkpoints else start


def require_running(claim: Claim | None, env: ProcessEnv) -> None:
    """Raise PeerLostError, of exit code 0, if this owner has finished the run, or was asked to stop."""
    if claim and claim.has_ended and not claim.has_failed:
        ended = PeerLostError(f"rank {env.launched_as} on {env.host}: the job has ended without this process")
        ended.exit_code = 0
        raise ended


def can_heal(job: JobRank, error: PeerLostError) -> bool:
    """Return whether the remaining ranks can continue: the run heals, and no rank ended by an error for the user."""
    return job.communicator.connection.endpoints is not None and error.exit_code == LOST


def can_regroup(error: PeerLostError) -> bool:
    """Return whether ranks that lose one while they form a group may form another group."""
    return error.exit_code == LOST and bool(error.lost_ranks)


def group_of(connection: Connection) -> Group:
    """Return the group of a connection whose run heals in place."""
    control, endpoints = connection.control, connection.endpoints
    assert isinstance(control, JobControl)
    assert endpoints is not None
    return Group(connection.env, control, endpoints)


def heal(
    start: RunStart,
    error: PeerLostError | None = None,
    *,
    ownership: Ownership,
    group: Group | None = None,
    connected: Connected | None = None,
    message: str = "",
    since: float | None = None,
) -> RunStart:
    """Connect a group (after a failure, of the remaining ranks); return where its run continues. Collective.

    Its state is equal on all ranks; None if no remaining rank holds all of it.
    start: with this rank's copy of the state after its last step, if it has all of it. error: the failure, if this rank
    has noticed one. group: None for the job's. connected: result of connect_group() for it, if called already.
    message: beginning of the line for the log. since: awake_seconds() at the boundary at which ranks joined.
    Raises: PeerLostError if this rank is not in the group, or the group cannot share the batch; CommError; ConfigError;
    RunFolderError.
    """
    config, job, kept = start.config, start.job, start.state
    group, lost_endpoints = group or group_of(job.communicator.connection), list[Endpoint]()
    while True:
        if error:
            abort_connection(group.control)
            # ranks that have finished are not lost: a process that was stopped may wake after the job's end
            require_running(newest_claim(Path(config.run.directory)), group.env)
            before, group = group.endpoints.all, regroup(group, error.lost_ranks)
            lost_endpoints += [each for each in before if each not in group.endpoints.all]
            try:
                divide_batch(config.batch, world_size=group.env.world_size)
            except ConfigError as misfit:
                raise PeerLostError(f"{error}; the remaining ranks cannot share the batch: {misfit}") from error
        try:
            communicator, kept = connected or connect_group(config, group, kept=kept, device=job.communicator.device)
            connected = None
            ids = [(each.kernel, each.pid, f"{each.born or ''}") for each in lost_endpoints]
            ownership.take_over(communicator.connection.control, lost=ids)
            if group.env.stopped_file is not None:
                load("bigbatch.comm.rendezvous.exit_record.record_begin")(group.env)
        except PeerLostError as again:  # another rank was lost meanwhile
            if not can_regroup(again):
                raise
            error = again
        else:
            where = f"from step {kept['step']}" if kept else "from the newest checkpoint"
            ranks = count(group.env.world_size, "rank")
            names = ", ".join(f"rank {each.rank} on {each.host}" for each in lost_endpoints)
            lost = f"lost: {names or 'a connection'}; " if error and (names or not message) else ""
            return replace(
                start,
                job=replace(job, communicator=communicator, env=group.env, tuned=None),
                state=kept,
                parts=None if kept is None else start.parts,
                is_in_parts=start.is_in_parts and kept is start.state,
                message=f"{message}{lost}continuing {where} with {ranks}",
                since=since,
            )


def connect_group(config: Config, group: Group, *, kept: dict[str, Any] | None, device: torch.device) -> Connected:
    """Connect a group and agree on the state to continue from. Collective. Uses no former table.

    Raises: PeerLostError; CommError.
    """
    comm = replace(config.comm, table=None)
    if comm.algorithm == "hybrid":
        comm = replace(comm, algorithm="auto")
    communicator, _ = join_job(replace(config_to_compare(config), comm=comm), group.env, group=group, device=device)
    return communicator, _agree_on_state(kept, communicator)


def config_to_compare(config: Config) -> Config:
    """Return the config to compare between ranks: run.resume may have changed since a joining rank was started."""
    return replace(config, run=replace(config.run, resume="auto"))


def _agree_on_state(kept: dict[str, Any] | None, communicator: Communicator) -> dict[str, Any] | None:
    """Return the state of the rank that is furthest: it may have got all sums of a step that other ranks lack."""
    place = [kept["step"], len(kept["evaluations"])] if kept else [-1, 0]
    places = communicator.gather(place)
    furthest = max(places)
    if furthest[0] < 0:
        return None
    behind = [rank for rank, each in enumerate(places) if each != furthest]
    if not behind:
        return kept
    state: dict[str, Any] = send_object(kept, communicator, source=places.index(furthest), to=behind)
    return state


def why_not_healing(config: Config, backend: str) -> str:
    """Return the log line that says why this run cannot heal in place."""
    if backend not in HEALING:
        why, remedy = f"{backend} cannot continue without a rank", f"comm.backend {' or '.join(HEALING)} can"
    elif config.compute.cuda_graph:
        why, remedy = "a captured step cannot be interrupted", "compute.cuda_graph=false can"
    elif config.comm.buffers != "torch":
        why, remedy = f"NCCL cannot abort sums in {config.comm.buffers} buffers", "comm.buffers=torch can"
    else:
        why, remedy = "the ranks met in a process group of the script's own", "without one they can"
    return f"run.heal=in_place: {why}, so a lost rank ends the job, as with restart; {remedy}"
