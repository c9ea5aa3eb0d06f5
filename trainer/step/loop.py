"""The training loop: it receives ready objects and builds nothing. First the step, then the run."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.order import rank_microbatches
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.input.stream import InputStream, gather_replaced
from bigbatch.trainer.step.divergence import require_finite, require_on_grid, require_statistics
from bigbatch.trainer.step.plan import Hooks, Parts, Plan
from bigbatch.trainer.step.replicas import digest, replicas, require_same
from bigbatch.trainer.step.seeding import seed_forward
from bigbatch.trainer.step.stop_request import Stopped
from bigbatch.trainer.step.totals import Totals
from bigbatch.trainer.step.window import Window, WindowSums


class TrainStep:
    """Makes one update from one global batch, or none if a rank has no batch. Collective; no host sync on a GPU.

    One object makes all steps of a run: a captured step writes into the same window each time.
    """

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self.plan, self.parts = plan, parts
        self.window = Window(parts.communicator.device)

    def __call__(self, step: int, stream: InputStream) -> None:
        """Set the learning rate, train on this rank's microbatches, and update the average of the weights."""
        self.parts.set_lr_(step=step)
        self.parts.reducer.count_underflow(self.plan.is_report(step + 1))
        microbatches = self.draw(step, stream)
        has_failed_1 = self.parts.execution(self.learn_from, microbatches)
        self.parts.average.update_(step + 1, skip_1=has_failed_1)
        self.window.steps += 1

    def draw(self, step: int, stream: InputStream) -> Iterator[Prepared]:
        """Yield the microbatches of a step, and seed the random draws of each one's forward."""
        plan, parts = self.plan, self.parts
        microbatches = rank_microbatches(
            rank=parts.communicator.rank,
            accumulation_steps=plan.accumulation_steps,
            ranks_per_ghost=plan.ranks_per_ghost,
        )
        for microbatch in microbatches:
            with parts.communicator.timeline.span("input wait", row="step"):
                batch = stream.draw(step=step)
            prepared = parts.prepare(batch)
            seed_forward(plan.seed, step=step, ghost=microbatch * plan.ghosts_per_microbatch)
            parts.statistics.tell_(input_failed=stream.failure is not None)
            yield prepared
        # what an optimizer draws is of the step alone: no ghost batch has this place
        seed_forward(plan.seed, step=step, ghost=plan.global_batch_size)

    def learn_from(self, microbatches: Iterable[Prepared]) -> Tensor:
        """Update the weights from images; return whether (bool, one element) a rank had none, so nothing changed.

        This is what a CUDA graph captures: what changes from step to step is read from tensors that stay where they
        are, but for the learning rates.
        """
        plan, parts = self.plan, self.parts
        span = partial(parts.communicator.timeline.span, row="step")
        parts.reducer.zero_grad()
        # forward moves the running statistics: a step that does not count puts these back
        before_N = parts.statistics.flat_N.clone()
        for index, prepared in enumerate(microbatches):
            is_last = index == plan.accumulation_steps - 1
            parts.reducer.is_active = is_last  # only then do finished gradients start on their way
            with span("forward"), parts.precision.forward():
                logits_BK = parts.model(prepared.images_BCHW).float()
            if is_last:
                # the last forward is done with them, so they travel beside backward
                parts.reducer.start_extra(parts.statistics.to_sum_N, label="all-reduce of batch-norm statistics")
            loss = parts.loss(logits_BK, prepared.targets)
            with span("backward"), parts.accumulation.microbatch(is_first=index == 0, is_last=is_last):
                # sums over microbatches and ranks are then the mean over the global batch
                parts.precision.backward(loss / plan.global_batch_size)
            if not is_last:
                parts.reducer.fold()
            self.window.count(loss, logits_BK, prepared.labels_B)
        with span("wait for the sums"):
            parts.reducer.wait()
        with span("update"):
            has_failed_1 = parts.statistics.average_(num_ranks=parts.communicator.world_size, before_N=before_N)
            parts.precision.update_(parts.optimizer, skip_1=has_failed_1)
        self.window.end_step()
        return has_failed_1


def train(plan: Plan, parts: Parts, hooks: Hooks, batches: Iterator[Batch]) -> Totals:
    """Run steps first_step to num_steps; stop early, with a checkpoint, when any rank was asked to.

    Where the input of a rank fails, the state before that step is saved first.
    Collective. Raises: TrainingDiverged; ReplicasDiffer; PeerLostError; DataError from the input.
    """
    return Loop(plan, parts, hooks, batches).run()


class Loop:
    """Runs a run's steps, and reports, evaluates and saves between them. All methods are collective."""

    def __init__(self, plan: Plan, parts: Parts, hooks: Hooks, batches: Iterator[Batch]) -> None:
        self.plan, self.parts, self.hooks = plan, parts, hooks
        self.stream = InputStream(batches)
        self.train_step = TrainStep(plan, parts)
        self.totals = Totals(saved_step=plan.first_step, measures_waits=parts.execution.measures_waits)

    def run(self) -> Totals:
        """Run the steps, as train() describes."""
        plan, parts, hooks, totals = self.plan, self.parts, self.hooks, self.totals
        parts.reducer.exposed.take_seconds()  # what was waited before, to restore a checkpoint, is of no step
        parts.energy.take_joules()
        parts.model.train()
        for step in range(plan.first_step, plan.num_steps):
            hooks.before_step(step)
            self.train_step(step, self.stream)
            done = step + 1
            hooks.after_step(done)
            is_eval, is_save = plan.is_evaluation(done), plan.is_checkpoint(done)
            # a run that has done its last step is stopped in its evaluation, or not at all
            is_stop = parts.stop.is_due() and done < plan.num_steps
            if is_stop or plan.is_report(done):
                parts.precision.settle()  # the next step alone can do without: all below may read the weights
                self.report(done)
                if is_stop:
                    hooks.save(done, None)  # an evaluation that is due is the resumed run's
                elif is_eval:
                    try:
                        with self._saving_on_failure(done):
                            totals.last_evaluation = hooks.evaluate(done)
                    except Stopped:
                        is_stop = True
                    else:
                        hooks.save(done, totals.last_evaluation["top1"])
                        parts.model.train()
                elif is_save:
                    hooks.save(done, None)
                elif plan.is_memory_copy(done, since=done - self.train_step.window.steps):
                    hooks.keep(done)
                if is_eval or is_save or is_stop:
                    totals.saved_step = done
                if is_stop:
                    totals.stopped_by = parts.stop.asked_by
                    break
                if is_eval and hooks.reason_to_end():
                    break
                self.train_step.window.start_over()
                parts.energy.take_joules()  # what an evaluation or a checkpoint took is of no step
        hooks.settle()
        return totals

    def report(self, done: int) -> None:
        """Sum the window over ranks, and report it. Syncs with the device."""
        plan, parts, window = self.plan, self.parts, self.train_step.window
        communicator = parts.communicator
        compared = self._start_comparison(done)  # before the host waits for the device, which then goes on meanwhile
        mine_N = self._window_of_this_rank().pack(communicator.device)
        sums = WindowSums.unpack(communicator.sum_(mine_N, label=f"report of step {done}"))
        if sums.num_failed:
            self._end_for_lack_of_input()
        if compared:
            require_same(communicator, *compared, done=done)
        self.totals.add(sums, steps=window.steps)
        require_finite(
            sums.loss,
            first_step=done - window.steps,
            finite_steps=int(window.finite_steps),
            gather_text=communicator.gather_text,
        )
        if parts.reducer.grid and not parts.precision.skips_overflow:
            require_on_grid(parts.reducer.grid_sums.take_beyond(), done=done, largest=parts.reducer.grid.largest)
        require_statistics(parts.statistics.take_beyond(), done=done)
        self.hooks.on_report(
            {
                "step": done,
                "epoch": done / plan.steps_per_epoch,
                "loss": sums.loss / sums.samples,
                "top1": sums.correct / sums.samples,
                "lr": parts.schedule(done - 1),
                **parts.precision.figures(),
                **sums.record(measures_waits=self.totals.measures_waits),
                **({"grid_underflow_fraction": sums.grid_underflow_fraction} if parts.reducer.grid else {}),
            }
        )
        parts.precision.require_progress(done, is_last=done == plan.num_steps)
        if sums.num_skipped:
            self._tell_skipped(done)

    def _start_comparison(self, done: int) -> tuple[Iterable[str], Tensor] | None:
        """Start digests of replicated state on the device, if due; return names, and digests to read later."""
        plan, parts = self.plan, self.parts
        since = done - self.train_step.window.steps
        if parts.communicator.world_size == 1 or not plan.is_comparison(done, since=since):
            return None
        found = replicas(parts, done=done)
        return found.keys(), digest(found.values())

    def _window_of_this_rank(self) -> WindowSums:
        parts, stream, window = self.parts, self.stream, self.train_step.window
        exposed_seconds = parts.reducer.exposed.take_seconds()
        loss, correct, samples = window.sums_3.tolist()  # waits for the device: the seconds are the window's
        seconds = time.perf_counter() - window.start
        rank, num_ranks = parts.communicator.rank, parts.communicator.world_size
        num_lost, num_nonzero = parts.reducer.grid_sums.take_underflow() if parts.reducer.grid else (0, 0)

        def at_own_place(share: float) -> tuple[float, ...]:  # so that the sum over ranks holds all of them
            return tuple(share if each == rank else 0.0 for each in range(num_ranks))

        return WindowSums(
            loss=loss,
            correct=correct,
            samples=samples,
            seconds=seconds,
            exposed_seconds=exposed_seconds,
            joules=parts.energy.take_joules(),
            num_failed=stream.failure is not None,
            num_skipped=len(stream.replaced),
            num_lost=num_lost,
            num_nonzero=num_nonzero,
            waited_P=at_own_place(stream.take_wait_seconds() / seconds),
            exposed_P=at_own_place(exposed_seconds / seconds),
        )

    def _end_for_lack_of_input(self) -> None:
        """Save the state after the last step with batches on all ranks. Raises: DataError, always."""
        communicator, failure = self.parts.communicator, self.stream.failure
        texts = communicator.gather_text(json.dumps([failure.step, failure.reason]) if failure else "")
        failures = [(*json.loads(text), rank) for rank, text in enumerate(texts) if text]
        done, reason, rank = min(failures, key=lambda failure: failure[0])
        self._tell_skipped(done)
        self._save_before_end(done)
        where = f"rank {rank}: " if communicator.world_size > 1 else ""
        outcome = f"The run stopped after step {done} and goes on from there." if done else "No step was done."
        stop = "" if reason.endswith((".", "?", "!")) else "."
        raise DataError(f"{where}{reason}{stop} {outcome}")

    def _tell_skipped(self, done: int) -> None:
        """Gather the images that ranks skipped. Raises: DataError, after saving, if there are too many."""
        # a rank draws on after the step at which the input of another one failed, and those steps do not count
        replaced = self.stream.take_replaced(before=done)
        if images := gather_replaced(self.parts.communicator, replaced):
            with self._saving_on_failure(done):
                self.hooks.skipped(done, images)

    @contextmanager
    def _saving_on_failure(self, done: int) -> Iterator[None]:
        """Context for collective work between steps: saves the state before bad data or a stop end the run."""
        try:
            yield
        except (DataError, Stopped):
            self._save_before_end(done)
            raise

    def _save_before_end(self, done: int) -> None:
        """Save the current state, after step done, and return when it is on disk."""
        # a second checkpoint of a step would lack the accuracy of the first
        if done > self.totals.saved_step:
            self.parts.set_lr_(step=done - 1)
            self.hooks.save(done, None)
        self.hooks.settle()
        # the first rank writes, and tells the others what to raise: none ends before all know
        self.parts.communicator.gather_text("saved")
