"""Evaluate a run over the whole split, and decide whether the result ends the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.parts import load
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.config.checks import METRICS
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import RunConfig
from bigbatch.trainer.inference.accuracy import evaluate
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.score import Score


class Evaluator:
    """Evaluates a run's parts on a split, and keeps the results.

    score: loss and metrics. evaluations: the run's earlier results, by step. leave_if_due: called between two
    exchanges of the ranks; an error that it raises on all of them ends the evaluation.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        split: build_input.Split,
        *,
        communicator: Communicator,
        leave_if_due: Callable[[], None],
        score: Score,
        evaluations: Mapping[int, dict[str, Any]],
    ) -> None:
        self._config, self._parts, self._split, self._score = config, parts, split, score
        self._communicator, self._leave_if_due = communicator, leave_if_due
        self._found = dict(evaluations)

    @property
    def found(self) -> list[dict[str, Any]]:
        return list(self._found.values())

    def evaluate(
        self,
        done: int,
        *,
        epoch: float,
        is_last: bool,
        skipped: Callable[[dict[int, str]], None],
        on_evaluation: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Evaluate the run after that many steps, with its average in place of weights. Collective.

        skipped: called with the bad images met. on_evaluation: called with the record, while the evaluated weights
        are in place. Keeps neither, to avoid a reference cycle with the owner of the evaluator.
        is_last: the record has the worst classes, too. Raises: Stopped if it is due between two exchanges; DataError.
        """
        parts, run, classes = self._parts, self._config.run, self._split.classes
        counts = None
        if classes and (is_last or run.target_top1 is not None or run.stop_metric):  # it may be the last
            counts = load("bigbatch.trainer.inference.class_counts.ClassCounts")(classes, self._communicator.device)
        average = parts.average.in_place_of_weights(done) if parts.average else nullcontext()
        with parts.evaluation_weights(), average:
            record = evaluate(
                parts.model,
                build_input.eval_batches(self._config, self._communicator, self._split),
                normalize=parts.normalize,
                communicator=self._communicator,
                num_samples=self._split.num_samples,
                forward=parts.precision.forward,
                flip=self._config.data.eval_flip,
                score=self._score,
                skipped=skipped,
                between_batches=self._leave_if_due,
                **({"answered": counts.add} if counts else {}),
            )
            self._found[done] = {"step": done, **{metric: record[metric] for metric in METRICS}}
            record = {"step": done, "epoch": epoch, **record}
            on_evaluation(record)
        return {**record, "worst_classes": counts.worst(self._communicator)} if counts else record

    def reason_to_end(self) -> str | None:
        return reason_to_end(self.found, self._config.run) if self._found else None


def reason_to_end(evaluations: Sequence[Mapping[str, Any]], run: RunConfig) -> str | None:
    """Return why a run with these evaluations, oldest first, ends; None if it continues.

    Depends on the evaluations alone, so that all ranks decide alike.
    A metric must exceed the best so far; an equal one is no improvement, and any number is better than none.
    """
    target_top1, metric, after_evaluations = run.target_top1, run.stop_metric, run.stop_after_evaluations
    reached = [e for e in evaluations if target_top1 is not None and e["top1"] >= target_top1]
    if reached:
        return f"run.target_top1={target_top1:g}: top-1 was {reached[0]['top1']:.4f} at step {reached[0]['step']}"
    if metric is None or after_evaluations is None or not evaluations:
        return None
    merits = [METRICS[metric] * e[metric] if math.isfinite(e[metric]) else -math.inf for e in evaluations]
    first = merits.index(max(merits))  # of equal ones
    best, num_since = evaluations[first], len(evaluations) - 1 - first
    if num_since < after_evaluations:
        return None
    return (
        f"run.stop_metric={metric}: none of {num_since} evaluations was better than {best[metric]:.4f} at step "
        f"{best['step']}"
    )
