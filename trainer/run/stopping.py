"""When a run ends before its last epoch: decided from the evaluations alone, so that all ranks decide alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from bigbatch.trainer.config.sections import RunConfig
from bigbatch.trainer.config.stopping import METRICS


def reason_to_end(evaluations: Sequence[Mapping[str, Any]], run: RunConfig) -> str | None:
    """Tell why a run with these evaluations, oldest first, is at its end; None where it is to go on.

    A metric must be better than the best so far; a mere repetition of it counts as none.
    """
    target_top1, metric, after_evaluations = run.target_top1, run.stop_metric, run.stop_after_evaluations
    reached = [e for e in evaluations if target_top1 is not None and e["top1"] >= target_top1]
    if reached:
        return f"run.target_top1={target_top1:g}: top-1 was {reached[0]['top1']:.4f} at step {reached[0]['step']}"
    if metric is None or after_evaluations is None or not evaluations:
        return None
    best = max(evaluations, key=lambda e: METRICS[metric] * e[metric])  # the first of equals
    num_since = len(evaluations) - 1 - list(evaluations).index(best)
    if num_since < after_evaluations:
        return None
    return (
        f"run.stop_metric={metric}: none of {num_since} evaluations was better than {best[metric]:.4f} at step "
        f"{best['step']}"
    )
