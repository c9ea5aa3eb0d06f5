"""Healing in place: if a rank is lost, the others continue from the last step in the same processes; ranks may join."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import send_object
from bigbatch.comm.lifetime import abort_connection
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.regroup import Endpoint, Group, regroup
from bigbatch.errors import ConfigError, PeerLostError
from bigbatch.exit_codes import LOST
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.config.batch import divide_batch
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.joined_rank import JoinedRank
from bigbatch.trainer.run.checkpoint import write_on_first
from bigbatch.trainer.run.owner import Owner, own_claim, take, take_over
from bigbatch.words import count

Connected = tuple[Communicator, dict[str, Any] | None]
"""A group that this rank has connected, and the state on which its ranks have agreed."""


class Ownership:
    """Ownership of the run folder by the first rank of each group of a job, until the block ends."""

    def __init__(self, config: Config) -> None:
        self._folder = Path(config.run.directory)
        self._seconds = config.run.checkpoint_timeout_seconds
        self.number = 0
        """Number of the owner's claim, equal on all ranks."""
        self.owner: Owner | None = None
        """Owner of the run folder, on the first rank only."""

    def take(self, control: Control) -> None:
        """Take the folder on the first rank, while the other ranks wait. Collective. Raises: RunFolderError."""
        self._hold(control, lambda: take(self._folder, own_claim(store=control.master)))

    def take_over(self, control: Control, *, lost: Sequence[Endpoint] = ()) -> None:
        """Take the folder over from the former group, or from a lost rank. Collective. Raises: RunFolderError."""
        ids = [(each.kernel, each.pid, f"{each.born or ''}") for each in lost]
        self._hold(control, lambda: take_over(self._folder, number=self.number, store=control.master, lost=ids))

    def _hold(self, control: Control, make: Callable[[], Owner]) -> None:
        def hold() -> str:
            former, self.owner = self.owner, make()
            self.number = self.owner.number  # if telling it fails, this rank claims again
            if former:
                former.release()
            return str(self.owner.number)

        what = "claim of the run folder"
        self.number = int(write_on_first(hold, control, what=what, timeout_seconds=self._seconds))
        if control.rank != 0 and self.owner:  # this was the first rank of the former group
            self.owner.release()
            self.owner = None

    def __enter__(self) -> "Ownership":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.owner:
            self.owner.release(has_failed=error is not None)


@dataclass(frozen=True)
class Healed:
    """A job after a rank is lost, or after one has joined."""

    job: JoinedRank
    state: dict[str, Any] | None
    """State to continue from, equal on all ranks; None if no remaining rank holds all of it."""
    message: str
    """Line for the log."""
    since: float | None = None
    """awake_seconds() at the boundary at which ranks joined."""


def can_heal(job: JoinedRank, error: PeerLostError) -> bool:
    """Return whether the remaining ranks can continue: the run heals, and no rank ended by an error for the user."""
    return job.communicator.endpoints is not None and error.exit_code == LOST


def can_regroup(error: PeerLostError) -> bool:
    """Return whether ranks that lose one while they form a group may form another group."""
    return error.exit_code == LOST and bool(error.lost_ranks)


def group_of(communicator: Communicator) -> Group:
    """Return the group of a communicator whose run heals in place."""
    control, endpoints = communicator.control, communicator.endpoints
    assert isinstance(control, JobControl)
    assert endpoints is not None
    return Group(communicator.env, control, endpoints)


def heal(
    config: Config,
    job: JoinedRank,
    error: PeerLostError | None = None,
    *,
    kept: dict[str, Any] | None,
    ownership: Ownership,
    group: Group | None = None,
    connected: Connected | None = None,
    message: str = "",
    since: float | None = None,
) -> Healed:
    """Connect a group (after a failure, of the remaining ranks) and agree on the state to continue from. Collective.

    error: the failure, if this rank has noticed one. kept: its copy of the state after its last step; None if it lacks
    a part. group: None for the job's. connected: result of connect_group() for the group, if it was called already.
    message: beginning of the line for the log. since: as for Healed.
    Raises: PeerLostError if this rank is not in the group, or the group cannot share the batch; CommError; ConfigError;
    RunFolderError.
    """
    group, lost_endpoints = group or group_of(job.communicator), list[Endpoint]()
    while True:
        if error:
            abort_connection(group.control)
            before, group = group.endpoints.all, regroup(group, error.lost_ranks)
            lost_endpoints += [each for each in before if each not in group.endpoints.all]
            try:
                divide_batch(config.batch, world_size=group.env.world_size)
            except ConfigError as misfit:
                raise PeerLostError(f"{error}; the remaining ranks cannot share the batch: {misfit}") from error
        try:
            communicator, kept = connected or connect_group(config, group, kept=kept, device=job.communicator.device)
            connected = None
            ownership.take_over(communicator.control, lost=lost_endpoints)
        except PeerLostError as again:  # another rank was lost meanwhile
            if not can_regroup(again):
                raise
            error = again
        else:
            where = f"from step {kept['step']}" if kept else "from the newest checkpoint"
            ranks = count(group.env.world_size, "rank")
            names = ", ".join(f"rank {each.rank} on {each.host}" for each in lost_endpoints)
            lost = f"lost: {names or 'a connection'}; " if error and (names or not message) else ""
            line = f"{message}{lost}continuing {where} with {ranks}"
            return Healed(replace(job, communicator=communicator, env=group.env, tuned=None), kept, line, since)


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
