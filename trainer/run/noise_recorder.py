"""The gradient noise scale during a run: records of its measurements, and a running estimate."""

import json
from dataclasses import asdict
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.folder import RunDir, read_records
from bigbatch.trainer.run.noise_scale import KIND, NO_ESTIMATE, Moments, running, unbiased
from bigbatch.trainer.step.gradient_noise import GradientNoise, SquaredNorms
from bigbatch.trainer.step.plan import Parts, Plan


class NoiseRecorder:
    """Measures every N steps, and keeps the running estimate on all ranks; does nothing if N is 0."""

    def __init__(self, config: Config, plan: Plan, parts: Parts) -> None:
        self._plan, self._every_steps = plan, config.run.noise_scale_every_steps
        self._microbatch_size = config.batch.microbatch_size
        self.probe = GradientNoise(plan, parts, every_steps=self._every_steps)
        """Observer that the training step calls before and after each step."""
        self._moments = Moments()

    def restore(self, rundir: RunDir, communicator: Communicator, *, timeout_seconds: float) -> None:
        """Restore on all ranks the estimate from the measurements in rank 0's metrics file. Collective."""
        if not self._every_steps or not self._plan.first_step:
            return
        before = running(read_records(rundir.metrics)) if communicator.rank == 0 else Moments()
        text = communicator.control.tell_all(
            json.dumps(asdict(before)), what="noise scale so far", timeout_seconds=timeout_seconds
        )
        self._moments = Moments(**json.loads(text))

    def take(self) -> list[dict[str, Any]]:
        """Return the records of all measurements since the last call. Collective; synchronizes with the device."""
        records = [self._record(norms) for norms in self.probe.take()]
        self._moments = running(records, start=self._moments)
        return records

    def _record(self, norms: SquaredNorms) -> dict[str, Any]:
        noise, signal = unbiased(
            norms.microbatch,
            norms.global_batch,
            small_batch=self._microbatch_size,
            large_batch=self._plan.global_batch_size,
        )
        return {
            "kind": KIND,
            "step": norms.step,
            "epoch": norms.step / self._plan.steps_per_epoch,
            "microbatch_squared_norm": norms.microbatch,
            "global_squared_norm": norms.global_batch,
            "noise": noise,
            "signal": signal,
        }

    def figures(self) -> dict[str, float | None]:
        """Return the running estimate for a report; empty if nothing is measured."""
        if not self._every_steps:
            return {}
        found = self._moments.noise_scale(global_batch_size=self._plan.global_batch_size)
        return found.record() if found else dict(NO_ESTIMATE)
