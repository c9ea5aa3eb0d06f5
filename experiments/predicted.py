"""Compare the simulator's predictions for a sweep's points with the measurements."""

from collections.abc import Sequence
from dataclasses import replace

from bigbatch.errors import ConfigError, SimulationError
from bigbatch.experiments.engine.folder import DONE, SweepFolder, rate_of
from bigbatch.experiments.engine.points import Point
from bigbatch.launch.tables import Table
from bigbatch.tools.simulate.cluster import load_cluster
from bigbatch.tools.simulate.scaling import Scenario, fit_to_step, simulate_point
from bigbatch.tools.simulate.shapes import shape_of


def require_predictable(points: Sequence[Point], *, cluster: str) -> None:
    """Check cluster, models and sizes before any point runs. Raises: SimulationError."""
    for point in points:
        load_cluster(cluster, devices_per_node=point.ranks_per_node).of_devices(point.ranks)
        shape_of(point.config.model)


def predicted_table(points: Sequence[Point], folder: SweepFolder, *, cluster: str) -> Table:
    """Return a table of predicted and measured images per second, with the error.

    A device's speed comes from the done point with the fewest ranks, which then has no error; for another model, or if
    no point is done, from the cluster's rates. Raises: SimulationError if neither is known.
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
    rows = []
    for point in points:
        scenario = _scenario(point, cluster)
        if base is not None and fitted is not None and point.config.model.name == base.config.model.name:
            scenario = replace(scenario, compute=fitted)
        rows.append(_row(point, scenario, measured.get(point.number), base=base))
    head = ("point", "ranks", "nodes", "measured", "predicted", "90% interval", "error", "in doubt for")
    width = len(head) if any(row[-1] for row in rows) else len(head) - 1
    title = "Predicted and measured" + (f"; by point {base.number}'s speed" if base else "")
    return Table(title, head[:width], tuple(row[:width] for row in rows))


def _scenario(point: Point, cluster: str) -> Scenario:
    return Scenario(point.config, load_cluster(cluster, devices_per_node=point.ranks_per_node))


def _row(point: Point, scenario: Scenario, known: float | None, *, base: Point | None) -> tuple[str, ...]:
    begin = (
        str(point.number),
        f"{point.ranks:,}",
        f"{point.nodes:,}",
        "" if known is None else f"{known:,.0f} images/s",
    )
    try:
        found = simulate_point(scenario, point.ranks)
    except (ConfigError, SimulationError) as error:
        if isinstance(error, SimulationError) and not scenario.cluster.rates and scenario.compute is None:
            raise
        return (*begin, str(error).splitlines()[0], "", "", "")
    batch = found.global_batch_size
    band = f"{batch / found.high_seconds:,.0f} to {batch / found.low_seconds:,.0f}"
    predicted = f"{found.images_per_second:,.0f} images/s"
    if known is None or base is None or point is base:  # without a base nothing is measured
        return (*begin, predicted, band, "", "")
    # a point slower than predicted may have many causes; a faster one has one: the base was measured too slow
    is_too_fast = known > batch / found.low_seconds
    doubt = f"more than point {base.number}'s speed allows: measure that one again" if is_too_fast else ""
    error_percent = 100 * (found.images_per_second / known - 1)
    return (*begin, predicted, band, f"{error_percent:+.1f}%{' ?' * is_too_fast}", doubt)
