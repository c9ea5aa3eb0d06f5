"""The gradient noise scale during a run: records of its measurements, and a running estimate."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.observe.gradient_noise import GradientNoise, SquaredNorms
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.report.noise_scale import KIND, NO_ESTIMATE, Moments, running, unbiased


class NoiseRecorder(Observer):
    """Measures every run.noise_scale_every_steps, and keeps the running estimate on all ranks."""

    def __init__(self, observed: Observed) -> None:
        self._observed, self._plan = observed, observed.plan
        self._probe = GradientNoise(
            observed.plan, observed.parts, every_steps=observed.config.run.noise_scale_every_steps
        )
        self._moments = Moments()

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Restore on all ranks the estimate from the measurements in rank 0's metrics file."""
        if self._plan.first_step:
            run, communicator = self._observed.config.run, self._observed.communicator
            is_first, metrics = communicator.rank == 0, RunDir(Path(run.directory)).metrics
            before = running(read_records(metrics)) if is_first else Moments()
            text = communicator.connection.control.tell_all(
                json.dumps(asdict(before)), what="noise scale so far", timeout_seconds=run.checkpoint_timeout_seconds
            )
            self._moments = Moments(**json.loads(text))
        return batches

    def before_step(self, step: int) -> None:
        self._probe.before_step(step)

    def before_update(self) -> None:
        self._probe.end_backward()  # a microbatch that an audit recomputes is not measured

    def after_step(self, done: int) -> None:
        self._probe.after_step(done)

    def close(self) -> None:
        self._probe.end_backward()

    def figures(self, done: int) -> Mapping[str, Any]:
        """Log all measurements since the last call; return the running estimate. Synchronizes with the device."""
        records = [self._record(norms) for norms in self._probe.take()]
        self._moments = running(({"kind": KIND, **record} for record in records), start=self._moments)
        for record in records:
            self._observed.log(KIND, record)
        return self.summary()

    def summary(self) -> Mapping[str, Any]:
        found = self._moments.noise_scale(global_batch_size=self._plan.global_batch_size)
        return found.record() if found else dict(NO_ESTIMATE)

    def _record(self, norms: SquaredNorms) -> dict[str, Any]:
        noise, signal = unbiased(
            norms.microbatch,
            norms.global_batch,
            small_batch=self._observed.config.batch.microbatch_size,
            large_batch=self._plan.global_batch_size,
        )
        return {
            "step": norms.step,
            "epoch": norms.step / self._plan.steps_per_epoch,
            "microbatch_squared_norm": norms.microbatch,
            "global_squared_norm": norms.global_batch,
            "noise": noise,
            "signal": signal,
        }
