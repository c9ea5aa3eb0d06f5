"""A job's training: one run; several after a lost rank, a join or a difference of weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from bigbatch.errors import PeerLostError, ReplicasDiffer
from bigbatch.trainer.build.compute_mode import choose_as_launched, choose_in_job
from bigbatch.trainer.build.input import list_images
from bigbatch.trainer.build.parts import can_keep_parts
from bigbatch.trainer.build.staging import stage_data, using_staged
from bigbatch.trainer.build_run import Inherited, build_run
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.healing import Healed, Ownership, can_heal, heal
from bigbatch.trainer.joined_rank import JoinedRank
from bigbatch.trainer.joining import Facts, admit_ranks, facts_of, find_join_requests, join_running_job
from bigbatch.trainer.machine.memory import free_memory
from bigbatch.trainer.run.checkpoint import list_checkpoints, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.metrics import MetricsLog
from bigbatch.trainer.step.stop_request import Joining, StopRequest
from bigbatch.trainer.training_loop import TrainingHooks
from bigbatch.trainer.training_run import TrainingRun


class TrainingJob:
    """Trains to the end or to a stop signal. All methods are collective.

    If the ranks' weights differ during a run, the next one starts at the newest checkpoint on which they agreed, or at
    the start of that run. If the job heals in place, the next run continues without a lost rank, or with ranks that
    join. A process that joins a running job does so first.
    """

    def __init__(self, config: Config, job: JoinedRank, *, hooks: TrainingHooks, is_quiet: bool) -> None:
        self.config, self.job = config, job
        """Config and connection of the present run."""
        self._build_run = partial(build_run, hooks=hooks, is_quiet=is_quiet)
        self._ownership = Ownership(config)
        self._rundir = RunDir(Path(config.run.directory))
        self._log = MetricsLog(self._rundir)
        self._inherited = Inherited(log=self._log)
        self._message = ""
        self._since: float | None = None
        """Message on the start of the next run, and awake_seconds() when ranks stopped for others to join."""
        self._back_at: int | None = None
        """Step to which the job last went back because weights differed."""
        self._summary: dict[str, Any] | None = None

    def describe(self) -> dict[str, Any]:
        """Print what train() would do. Raises: UserError."""
        self._prepare()
        inherited = replace(self._inherited, stop=StopRequest(takes_signals=False))
        return self._build_run(self.config, self.job, owner=None, inherited=inherited).describe()

    def train(self) -> dict[str, Any] | None:
        """Train; return the summary, or None if stopped.

        Raises: PeerLostError; ReplicasDiffer if weights differ at the start, or again after the job went back.
        """
        with using_staged(self.config), self._ownership:
            if self.job.env.joins:
                self._join()
            else:
                self._ownership.take(self.job.communicator.control)
                self._prepare()
            while recover := self._run():
                # only now: an error's frames held the run's tensors; the next step uses the host's memory again
                free_memory(self.job.communicator.device, keeps_host=True)
                recover()
            return self._summary

    def _prepare(self) -> None:
        """Stage and list the data, and choose the compute mode."""
        config, communicator = self.config, self.job.communicator
        local, staged = stage_data(config, communicator)
        images = list_images(local, communicator)
        chosen = choose_in_job(config, communicator)
        self.config, self._inherited = chosen.config, replace(self._inherited, images=images)
        self.job = replace(self.job, staged=staged, mode_note=chosen.note)

    def _join(self) -> None:
        device, world_size = self.job.communicator.device, self.job.env.world_size
        self.config = choose_as_launched(self.config, device, world_size=world_size).config
        arrived = join_running_job(self.config, self.job, ownership=self._ownership)
        self._inherited = replace(self._inherited, splits=arrived.splits, parts=arrived.parts)
        self._back_at = arrived.back_at
        self._continue(arrived.healed)

    def _run(self) -> Callable[[], None] | None:
        """Train until the run ends, and keep its summary; after an interruption, return how to recover from it."""
        run: TrainingRun | None = None
        facts: Facts = dict
        try:
            run = self._build_run(self.config, self.job, owner=self._ownership.owner, inherited=self._inherited)
            # one stop request for all runs: its handlers also record signals between two runs
            images, stop = run.splits.images, run.parts.stop
            self._inherited = replace(
                self._inherited, images=images, splits=None, parts=None, is_in_parts=False, stop=stop
            )
            facts = cache(partial(facts_of, self.config, images))
            wants_join = partial(find_join_requests, self.config, self.job.communicator, facts)
            self._summary = run.run(message=self._message, since=self._since, wants_join=wants_join)
            return None
        except Joining as joining:
            recover = partial(self._admit, facts, joining.since)
        except ReplicasDiffer as error:
            if run is None:
                raise
            return partial(self._go_back, str(error), run.plan.first_step)
        except PeerLostError as error:
            if not can_heal(self.job, error) or (run is None and self._inherited.state is None):
                raise
            lost = PeerLostError(*error.args)  # without frames
            lost.lost_ranks = error.lost_ranks
            recover = partial(self._heal, lost)
        except BaseException:
            if run is None:  # loggers of a former run may be open
                self._log.close()
            raise
        if run:
            state = run.loop.copy_state()
            parts = run.parts if can_keep_parts(self.config) else None
            is_in_parts = parts is not None and state is not None
            self._inherited = replace(self._inherited, state=state, parts=parts, is_in_parts=is_in_parts)
        return recover

    def _heal(self, lost: PeerLostError) -> None:
        self._continue(heal(self.config, self.job, lost, kept=self._inherited.state, ownership=self._ownership))

    def _admit(self, facts: Facts, since: float) -> None:
        """Let ranks join that asked for it. since: awake_seconds() when all ranks stopped for them."""
        healed = admit_ranks(
            self.config,
            self.job,
            kept=self._inherited.state,
            facts=facts,
            close=self._log.close,
            since=since,
            ownership=self._ownership,
            back_at=self._back_at,
        )
        self._continue(healed)

    def _continue(self, healed: Healed) -> None:
        """Let the next run continue in this group, from its state or else from the newest checkpoint."""
        self.job, self._message, self._since = healed.job, healed.message, healed.since
        former = self._inherited
        parts = None if healed.state is None else former.parts
        is_in_parts = former.is_in_parts and healed.state is former.state
        self._inherited = replace(former, state=healed.state, parts=parts, is_in_parts=is_in_parts)
        if healed.state is not None:
            return
        control, seconds = self.job.communicator.control, self.config.run.checkpoint_timeout_seconds
        # loggers may send for a minute: the other ranks wait here
        write_on_first(self._log.close, control, what="end of the former group's records", timeout_seconds=seconds)
        if list_checkpoints(self._rundir.checkpoints):
            self._resume_from("auto")

    def _go_back(self, difference: str, first_step: int) -> None:
        """Let the next run start at the newest checkpoint on which the ranks agreed, or else again at first_step."""
        newest = next((c for c in reversed(list_checkpoints(self._rundir.checkpoints)) if c.is_agreed), None)
        step = newest.step if newest else first_step
        if step == self._back_at:
            raise ReplicasDiffer(f"{difference}; this happened again after the run went back to step {step}")
        self._back_at = step
        self._message, self._since = f"{difference}; going back to step {step}", None
        if newest:
            self._resume_from(str(newest.path))
            self._inherited = replace(self._inherited, state=None)

    def _resume_from(self, checkpoint: str) -> None:
        self.config = replace(self.config, run=replace(self.config.run, resume=checkpoint))
