"""Compare the simulator's predictions for a sweep's points with the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbatch.cores import usable_cores
from bigbatch.errors import ConfigError, SimulationError
from bigbatch.experiments.engine.folder import DONE, SweepFolder, rate_of
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.report.predictions import PredictedRate
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.tables import Table
from bigbatch.tools.simulate.cluster import load_cluster
from bigbatch.tools.simulate.scaling import Scenario, fit_to_step, simulate_point
from bigbatch.tools.simulate.shapes import shape_of
from bigbatch.tools.simulate.step import Compute


def require_predictable(points: Sequence[Point], *, cluster: str) -> None:
    """Check cluster, models and sizes before any point runs. Raises: SimulationError."""
    for point in points:
        load_cluster(cluster, devices_per_node=point.ranks_per_node).of_devices(point.ranks)
        shape_of(point.config.model)


@dataclass(frozen=True)
class _Prediction:
    point: Point
    measured: float | None
    """Images per second; None if the point is not done."""
    rate: PredictedRate | None
    why_not: str = ""


@dataclass(frozen=True)
class Predictions:
    base: Point | None
    """The done point with the fewest ranks, whose speed decides that of a device; None if no point is done."""
    all: tuple[_Prediction, ...]

    @property
    def rates(self) -> dict[int, PredictedRate]:
        return {each.point.number: each.rate for each in self.all if each.rate}

    def table(self) -> Table:
        """Return a table of predicted and measured images per second, with the error."""
        rows = [_row(each, base=self.base) for each in self.all]
        head = ("point", "ranks", "nodes", "measured", "predicted", "90% interval", "error", "in doubt for")
        width = len(head) if any(row[-1] for row in rows) else len(head) - 1
        title = "Predicted and measured" + (f"; by point {self.base.number}'s speed" if self.base else "")
        return Table(title, head[:width], tuple(row[:width] for row in rows))


def cores_of(plan: SweepPlan) -> int | None:
    """Return the cores that all ranks of a point share, if they are those of this host and compute on them."""
    return None if plan.has_other_hosts or count_gpus() else len(usable_cores())


def predict(points: Sequence[Point], folder: SweepFolder, *, cluster: str, cores: int | None = None) -> Predictions:
    """Predict the speed of each point.

    A device's speed comes from the done point with the fewest ranks, which then has no error; for another model, or if
    no point is done, from the cluster's rates. cores: of a host that all ranks share; with more threads than cores they
    compute more slowly. Raises: SimulationError if no speed is known.
    """
    measured: dict[int, float] = {}
    for point in points:
        if folder.state_of(point.number) == DONE and (rate := rate_of(folder.read_summary(point.number))):
            measured[point.number] = rate
    base = min((point for point in points if point.number in measured), key=lambda point: point.ranks, default=None)
    fitted = None
    if base is not None:
        seconds = base.config.batch.global_batch_size / measured[base.number]
        fitted = fit_to_step(_scenario(base, cluster), base.ranks, seconds)
    found = []
    for point in points:
        scenario = _scenario(point, cluster)
        if base is not None and fitted is not None and point.config.model.name == base.config.model.name:
            share = _threads(point) / max(cores, _threads(base)) if cores else 1.0
            slower = max(1.0, share)
            shared = Compute(slower * fitted.seconds_per_image, slower * fitted.fixed_seconds)
            scenario = replace(scenario, compute=shared)
        found.append(_predict(point, scenario, measured.get(point.number)))
    return Predictions(base, tuple(found))


def _threads(point: Point) -> int:
    return point.ranks * (point.config.compute.cpu_threads or 1)


def _scenario(point: Point, cluster: str) -> Scenario:
    return Scenario(point.config, load_cluster(cluster, devices_per_node=point.ranks_per_node))


def _predict(point: Point, scenario: Scenario, measured: float | None) -> _Prediction:
    try:
        found = simulate_point(scenario, point.ranks)
    except (ConfigError, SimulationError) as error:
        if isinstance(error, SimulationError) and not scenario.cluster.rates and scenario.compute is None:
            raise
        return _Prediction(point, measured, None, str(error).splitlines()[0])
    low, high = (found.global_batch_size / seconds for seconds in (found.high_seconds, found.low_seconds))
    return _Prediction(point, measured, PredictedRate(found.images_per_second, low, high))


def _row(each: _Prediction, *, base: Point | None) -> tuple[str, ...]:
    point, known, rate = each.point, each.measured, each.rate
    begin = (
        str(point.number),
        f"{point.ranks:,}",
        f"{point.nodes:,}",
        "" if known is None else f"{known:,.0f} images/s",
    )
    if rate is None:
        return (*begin, each.why_not, "", "", "")
    band = f"{rate.low:,.0f} to {rate.high:,.0f}"
    predicted = f"{rate.rate:,.0f} images/s"
    if known is None or base is None or point is base:  # without a base nothing is measured
        return (*begin, predicted, band, "", "")
    # a point slower than predicted may have many causes; a faster one has one: the base was measured too slow
    is_too_fast = known > rate.high
    doubt = f"more than point {base.number}'s speed allows: measure that one again" if is_too_fast else ""
    error_percent = 100 * (rate.rate / known - 1)
    return (*begin, predicted, band, f"{error_percent:+.1f}%{' ?' * is_too_fast}", doubt)
