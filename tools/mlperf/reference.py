"""Use MLPerf's own tools: its reference convergence points (RCPs), and its log format."""

import io
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import UserError, pip_install

RULESET = "4.0.0"
"""The last round of MLPerf training that had ResNet-50."""
SIGNIFICANCE = 0.05
"""Significance of the one-sided test, as in mlperf_logging/rcp_checker/rcp_checker.py."""
INTERPOLATED_RUNS = 10
"""Number of reference runs that the RCP checker assumes for an interpolated record: twice those of a submission."""


@dataclass(frozen=True, kw_only=True)
class ConvergencePoint:
    """Epochs in which MLPerf's reference runs of a batch size reached the target."""

    name: str
    mean_epochs: float
    """Mean over all runs but the fastest and the slowest."""
    std_epochs: float
    """Standard deviation over all runs, divided by their number, as in the RCP checker."""
    num_runs: int
    """Number of runs in the mean."""
    range_epochs: tuple[int, int] | None
    """Fastest and slowest run; None if the record is interpolated."""


@dataclass(frozen=True)
class Event:
    """Describes a log line of MLPerf. time_s: seconds since 1970; edge: start or end of an interval, else a point."""

    key: str
    value: Any
    time_s: float
    metadata: dict[str, Any]
    edge: str = "event"


def read_reference(global_batch_size: int) -> ConvergencePoint | None:
    """Return MLPerf's record of that batch size, or one interpolated between its neighbours, as its RCP checker does.

    Below the smallest batch, return the record of the smallest; above the largest, None: MLPerf asks for a new record.
    Raises: UserError if mlperf-logging is not installed.
    """
    _require()
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    checker = RCP_Checker("training", RULESET, "resnet", False)
    records = [(int(record["BS"]), record) for record in checker.rcp_data.values()]  # batch sizes rise
    larger = [record for size, record in records if size >= global_batch_size]
    smaller = [record for size, record in records if size <= global_batch_size]
    if not larger:
        return None
    if not smaller or larger[0] is smaller[-1]:
        return _make_reference(larger[0], is_smallest=not smaller)
    return _interpolate(smaller[-1], larger[0], global_batch_size=global_batch_size)


def fewest_epochs(reference: ConvergencePoint, *, num_runs: int) -> float:
    """Return the smallest mean epochs of num_runs runs, without fastest and slowest, that chance alone explains.

    With a smaller mean, a one-sided t-test with pooled variance, at SIGNIFICANCE, finds the runs faster than the
    reference, if both have the same spread. For five runs it equals the RCP checker's Min Epochs, found by bisection.
    """
    from scipy.stats import t

    num_counted = num_runs - 2
    # degrees of freedom: each mean takes one
    quantile = t.ppf(1 - SIGNIFICANCE, reference.num_runs + num_counted - 2)
    spread = reference.std_epochs * math.sqrt(1 / reference.num_runs + 1 / num_counted)
    return reference.mean_epochs - float(quantile) * spread


def as_log(events: Sequence[Event]) -> str:
    """Return the text of an MLPerf log. Raises: UserError if mlperf-logging is not installed."""
    _require()
    from mlperf_logging.mllog.mllog import MLLogger

    logger, text = logging.Logger("bigbatch.mlperf"), io.StringIO()  # for this text only, without parent
    logger.addHandler(logging.StreamHandler(text))
    mllogger = MLLogger(logger=logger, root_dir=re.escape(str(Path(__file__).parents[2])))
    for event in events:
        write = getattr(mllogger, event.edge)
        write(event.key, event.value, metadata=event.metadata, time_ms=round(1000 * event.time_s))
    return text.getvalue()


def _require() -> None:
    try:
        import mlperf_logging  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise UserError(f"bigbatch verify needs MLPerf's tools: {pip_install('verify')}") from error


def _make_reference(record: dict[str, Any], *, is_smallest: bool) -> ConvergencePoint:
    epochs = record["Epochs to converge"]
    return ConvergencePoint(
        name=f"record of {record['BS']:,}" + (", the smallest batch" if is_smallest else ""),
        mean_epochs=float(record["RCP Mean"]),
        std_epochs=float(record["RCP Stdev"]),
        num_runs=len(epochs) - 2,
        range_epochs=(min(epochs), max(epochs)),
    )


def _interpolate(low: dict[str, Any], high: dict[str, Any], *, global_batch_size: int) -> ConvergencePoint:
    share = (global_batch_size - low["BS"]) / (high["BS"] - low["BS"])
    mean, std = ((1 - share) * low[key] + share * high[key] for key in ("RCP Mean", "RCP Stdev"))
    return ConvergencePoint(
        name=f"between the records of {low['BS']:,} and {high['BS']:,}",
        mean_epochs=float(mean),
        std_epochs=float(std),
        num_runs=INTERPOLATED_RUNS,
        range_epochs=None,
    )
