"""Check that the settings that end a run early fit each other."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import DataConfig, RunConfig

METRICS = {"top1": 1, "top5": 1, "loss": -1}
"""Metric of an evaluation -> sign of an improvement."""


def check_stopping(run: RunConfig, data: DataConfig) -> Iterator[str]:
    """Yield an error for each setting of early stopping that contradicts another."""
    metric, evaluations = run.stop_metric, run.stop_after_evaluations
    if metric is not None and metric not in METRICS:
        yield f"run.stop_metric={metric} is not a metric of an evaluation: choose one of {', '.join(METRICS)}"
    if metric is not None and evaluations is None:
        yield f"run.stop_after_evaluations is null, but run.stop_metric={metric} needs it: give a number"
    if metric is None and evaluations is not None:
        yield f"run.stop_after_evaluations={evaluations} has no meaning without run.stop_metric: set it to null"
    elif evaluations is not None and evaluations >= _num_evaluations(run):
        yield (
            f"run.stop_after_evaluations={evaluations} would have no effect on a run of {_num_evaluations(run)} "
            f"evaluations: give less, or set it and run.stop_metric to null"
        )
    if run.divergence_steps is not None and data.num_classes < 2:
        yield (
            f"run.divergence_steps={run.divergence_steps} has no meaning with data.num_classes={data.num_classes}, "
            "where a guess is always right: set it to null"
        )


def _num_evaluations(run: RunConfig) -> int:
    """Return the number of evaluations: after each epoch that is due, and after the last one."""
    due = range(1, run.epochs)
    # the last epoch is evaluated in any case: hence the 1
    return 1 + sum(epoch % run.eval_every_epochs == run.eval_offset_epochs for epoch in due)
