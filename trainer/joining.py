"""Let a restarted rank join the running ranks at a boundary of all ranks: both sides of the protocol."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from bigbatch.awake import awake_seconds
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import HEALING, backend_for, choose_device, connect
from bigbatch.comm.connection import Connection, abort_connection
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.joining import (
    CONNECT_SECONDS,
    Admitted,
    Request,
    admit,
    ask_to_join,
    find_requests,
    former_ranks,
    leave_former_group,
)
from bigbatch.comm.rendezvous.places import release
from bigbatch.errors import LOST, CommError, ConfigError, PeerLostError
from bigbatch.trainer.build.images import Images, stage_data
from bigbatch.trainer.build.input import describe_images, make_splits
from bigbatch.trainer.build.parts import can_keep_parts, make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.build_run import JobRank, RunStart, failing_as_lost_rank
from bigbatch.trainer.config.batch import can_share
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.owner import Claim, newest_claim
from bigbatch.trainer.folder.ownership import Ownership, write_on_first
from bigbatch.trainer.healing import (
    Connected,
    can_regroup,
    config_to_compare,
    connect_group,
    group_of,
    heal,
    require_running,
    why_not_healing,
)
from bigbatch.trainer.machine.host import set_deterministic
from bigbatch.trainer.report.job_figures import JobFigures

LOOK_SECONDS = 0.5
"""Pause between two attempts to reach the running ranks."""
MORE_SECONDS = 30.0
"""Added to twice comm.timeout_seconds: time that the running ranks may take to open a new store after a failure."""
MAX_ATTEMPTS = 5
"""Attempts after which a rank gives up if each time it was admitted, but a failure kept it from getting the state."""
Facts = Callable[[], Mapping[str, str]]
"""Returns the facts that must be equal on all ranks, by name."""


def facts_of(config: Config, listed: Images | None) -> dict[str, str]:
    """Return the facts that must be equal on all ranks: release, config, data set."""
    return {"release": release(), "config": dump_config(config_to_compare(config)), "data set": describe_images(listed)}


def find_join_requests(config: Config, connection: Connection, facts: Facts) -> list[Request]:
    """Return on rank 0 the requests of ranks that can join now, on other ranks none. Not collective."""
    if connection.rank != 0 or connection.endpoints is None or config.optimizer.sharded:
        return []
    return find_requests(group_of(connection), facts, fits=partial(can_share, config.batch))


def admit_ranks(
    start: RunStart, *, facts: Facts, since: float, ownership: Ownership, went_back: tuple[int | None, int]
) -> RunStart:
    """Form a group with the ranks that want to join, and give them the state. Collective over the present ranks.

    If a rank is lost meanwhile, the former group continues without the ranks that were to join. The records of the
    former group's first rank end before another rank takes over the run folder.
    start: with this rank's copy of the state, as for heal. since: awake_seconds() at the boundary. went_back: the step
    to which the run last went back, and that up to which it then checks gradients. Raises: as heal.
    """
    config, communicator = start.config, start.job.communicator
    former, seconds = group_of(communicator.connection), config.run.checkpoint_timeout_seconds
    go = partial(heal, start, ownership=ownership)
    try:
        with former.control.detector.explained("look for ranks that join"):  # the store may be lost
            found = find_join_requests(config, communicator.connection, facts)
        is_replaced = any(each.endpoint.rank < communicator.env.launched_as for each in found)
        end = start.log.close if is_replaced else str
        write_on_first(end, former.control, what="end of the former group's records", timeout_seconds=seconds)
        names = ", ".join(f"rank {each.endpoint.rank} on {each.endpoint.host}" for each in found)
        announced = {"owner": ownership.number, "waited": awake_seconds() - since, "joined": names}
        announced |= {"went_back": went_back, "figures": start.figures.announce()}
        admitted = admit(former, found, announced=announced)
    except PeerLostError as lost:
        if not can_regroup(lost):
            raise
        return go(lost)
    abort_connection(former.control)
    group, names = admitted.group, admitted.announced["joined"]
    try:
        connected = connect_group(config, group, kept=start.state, device=communicator.device)
        leave_former_group(group)
    except CommError as error:
        abort_connection(group.control)
        loss = error if isinstance(error, PeerLostError) else PeerLostError(*error.args)
        loss.lost_ranks = former_ranks(former, group, loss.lost_ranks)
        if loss.lost_ranks and loss.exit_code != LOST:  # an error of a present rank
            raise
        return go(loss, message=f"did not join: {names or 'no rank'}; ")
    if not names:
        return go(group=group, connected=connected, message="no rank has joined, because it has ended; ")
    return go(group=group, connected=connected, message=f"joined: {names}; ", since=since)


def connect_alone(config: Config, env: ProcessEnv) -> Communicator:
    """Return a communicator of this process alone, for its work before it joins. Raises: ConfigError; CommError."""
    device = choose_device(env, backend=config.comm.backend)
    backend = backend_for(device, config.comm.backend)
    if backend not in HEALING:
        raise CommError(f"rank {env.rank} on {env.host} cannot join: {why_not_healing(config, backend)}")
    if config.optimizer.sharded:
        raise ConfigError(
            f"rank {env.rank} on {env.host} cannot join: with optimizer.sharded=true no other rank holds its part of "
            "the state; set it to false, or start the job again, which resumes from its newest checkpoint"
        )
    comm = config.comm
    alone = replace(ALONE, host=env.host, plays_host=env.plays_host)
    return connect(
        backend=backend,
        env=alone,
        device=device,
        timeout_seconds=comm.timeout_seconds,
        warn_seconds=comm.warn_seconds,
        interface=comm.interface,
    )


def join_running_job(start: RunStart, *, ownership: Ownership) -> tuple[RunStart, tuple[int | None, int]]:
    """Join the running ranks, and receive the state from one of them. Return also went_back, as for admit_ranks.

    start: of this process alone. First does what may take seconds, because the other ranks wait from their boundary on:
    makes the splits, which may load a library, list a data set, or decode it, and the parts of a step.
    Raises: PeerLostError if there is no job to join; CommError if the other ranks refuse this one; as heal.
    """
    config, job = start.config, start.job
    with failing_as_lost_rank(job.env):
        if config.run.reproducible:
            set_deterministic(2)  # before the model's first product
        with job.communicator as alone:
            local, _ = stage_data(config, alone.connection)
            splits = make_splits(local, alone)
            start = replace(start, splits=splits)
            if can_keep_parts(config):
                # the parts without the state; not first_step 0, which reads model.weights
                plan = make_plan(config, alone, num_samples=splits.train.num_samples, first_step=1)
                parts = make_parts(config, alone, plan=plan, tuned=None, train=splits.train, is_restored=True)
                parts.close()
                start = replace(start, parts=parts)
        admitted, connected = _enter(config, job, facts_of(config, splits.images))
    if job.env.joins_file:
        with suppress(OSError):
            job.env.joins_file.unlink()
    announced = admitted.announced
    ownership.number, since = announced["owner"], awake_seconds() - announced["waited"]
    line = f"joined: {announced['joined']}; "
    group = admitted.group
    start = heal(start, ownership=ownership, group=group, connected=connected, message=line, since=since)
    figures = JobFigures(announced["figures"], waited_seconds=awake_seconds() - since)
    return replace(start, figures=figures), tuple(announced["went_back"])


def _enter(config: Config, job: JobRank, facts: Mapping[str, str]) -> tuple[Admitted, Connected]:
    """Ask the running ranks until this rank has their state. Raises: as join_running_job."""
    for attempt in range(MAX_ATTEMPTS):
        admitted = _ask(config, job, facts)
        try:
            connected = connect_group(config, admitted.group, kept=None, device=job.communicator.device)
            leave_former_group(admitted.group)
        except PeerLostError:  # the other ranks continue without this one, or lost another one meanwhile
            abort_connection(admitted.group.control)
            admitted.leave()
            if attempt + 1 == MAX_ATTEMPTS:
                raise
        else:
            break
    return admitted, connected


def _ask(config: Config, job: JobRank, facts: Mapping[str, str]) -> Admitted:
    """Find the running ranks' store by the claim of the run folder's owner, and ask there to join."""
    control, folder = job.communicator.connection.control, Path(config.run.directory)
    env = replace(job.env, interface=job.env.interface or config.comm.interface)
    patience = 2 * control.timeout_seconds + MORE_SECONDS
    deadline, reason = awake_seconds() + patience, "no rank states an address in its run folder"
    while True:
        claim = newest_claim(folder)
        require_running(claim, env)
        if store := claim and _address(claim):
            started = awake_seconds()
            try:
                return ask_to_join(
                    env,
                    store,
                    facts=facts,
                    timeout_seconds=control.timeout_seconds,
                    warn_seconds=control.warn_seconds,
                    is_current=partial(_is_current, folder, store),
                )
            except CommError:
                raise
            except (OSError, RuntimeError) as error:
                reason = f"{error}"
            if awake_seconds() - started > LOOK_SECONDS + CONNECT_SECONDS:  # it has waited for an answer there
                deadline = awake_seconds() + patience
        if awake_seconds() > deadline:
            raise PeerLostError(f"rank {env.rank} on {env.host} cannot reach a rank of its job: {reason}")
        time.sleep(LOOK_SECONDS)


def _address(claim: Claim) -> tuple[str, int] | None:
    """Return the address and port of the store of the owner's job; None if the claim states none."""
    with suppress(ValueError):
        address, port = claim.store.split()
        return address, int(port)
    return None


def _is_current(folder: Path, store: tuple[str, int]) -> bool:
    """Return whether the run folder's newest owner states this store, or none."""
    claim = newest_claim(folder)
    return claim is None or _address(claim) in (None, store)
