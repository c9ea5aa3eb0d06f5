"""When a run saves: what goes into a checkpoint, and what all ranks agree on before it is written."""

import time
from pathlib import Path
from typing import Any

from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.checkpoint import checkpoint_path, save_checkpoint, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.owner import Owner
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.replicas import compare


class CheckpointSaver:
    """Saves a run with its parts, by the first rank.

    owner: of the run folder, on the first rank. samples: the digest of the training split, where it has one.
    """

    def __init__(self, config: Config, parts: Parts, *, owner: Owner | None, samples: str | None) -> None:
        self._config, self._parts, self._owner, self._samples = config, parts, owner, samples
        self._checkpoints = RunDir(Path(config.run.directory)).checkpoints
        self._is_comparing = parts.communicator.world_size > 1 and config.run.compare_every_steps > 0

    def compare(self, *, done: int) -> None:
        """Compare all ranks' replicas, where the run is to. Collective. Raises: ReplicasDiffer."""
        if self._is_comparing:
            compare(self._parts, done=done)

    def save(
        self, *, done: int, top1: float | None, evaluations: list[dict[str, Any]], skipped: dict[str, str]
    ) -> tuple[Path, float]:
        """Write the checkpoint after so many steps; its path, and the seconds that it took. Collective.

        Raises: TrainingDiverged where weights are not finite; ReplicasDiffer; CheckpointError.
        """
        started = time.perf_counter()
        parts = self._parts
        if not parts.precision.is_finite():  # the same bits, so the same verdict, on all ranks
            raise TrainingDiverged(
                f"the update of step {done} left weights that are not finite, which are not saved: lower "
                "schedule.base_lr or lengthen schedule.warmup_epochs"
            )
        self.compare(done=done)
        with parts.showing() as in_training:
            state = {
                "step": done,
                "config": dump_config(self._config),
                "model": parts.precision.model_state(),
                "in_training": in_training,
                "optimizer": parts.optimizer.state_dict(),
                "precision": parts.precision.state_dict(),
                "average": parts.average.state_dict(done),
                "evaluations": evaluations,
                "gradient_order": "\n".join(parts.reducer.order),
                "samples": self._samples,
                "skipped": dict(skipped),
            }
            write_on_first(
                lambda: self._write(state, step=done, top1=top1),
                parts.communicator.control,
                what=f"checkpoint of step {done}",
                timeout_seconds=self._config.run.checkpoint_timeout_seconds,
            )
        return checkpoint_path(self._checkpoints, step=done), time.perf_counter() - started

    def _write(self, state: dict[str, Any], *, step: int, top1: float | None) -> None:
        if self._owner:
            self._owner.require()
        save_checkpoint(
            self._checkpoints,
            state,
            step=step,
            top1=top1,
            keep=self._config.run.keep_checkpoints,
            is_agreed=self._is_comparing,
        )
