"""Output of a simulation: sentences, tables, a plot, JSON and the simulated step as a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bigbatch import __version__, files
from bigbatch.colours import COLOURS, new_figure
from bigbatch.errors import printable
from bigbatch.launch.efficiency import PARTS, WORTH_NAMING
from bigbatch.launch.page import as_svg, make_page
from bigbatch.launch.tables import Table, duration, table_of
from bigbatch.tools.simulate.network import BY_SIZE
from bigbatch.tools.simulate.published import nearest_published, own_rate, power_of
from bigbatch.tools.simulate.scaling import (
    PredictedPoint,
    Scenario,
    advise,
    cheapest_within,
    efficiencies,
    input_rate,
    knee,
)
from bigbatch.tools.simulate.shapes import shape_of
from bigbatch.trainer.config.sections import READERS
from bigbatch.words import count, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPLAINED = (
    "Simulated, not measured. Efficiency: images/s of a GPU, relative to the fewest. docs/simulate.md states the "
    "errors on published step times, and how many of these the 90% intervals contained."
)
PYTORCH_SHARE = 2790 / 7140
"""Least share of the rate of MLPerf's implementations that PyTorch is known to reach. PUBLISHED: ResNet-50 on an H100,
2,790 images/s (Lambda's table, NCHW) and 7,140 (MLPerf v3.1 to v4.0, MXNet)."""


def assumptions(scenario: Scenario) -> list[str]:
    cluster = scenario.cluster
    _, rate = cluster.compute(shape_of(scenario.config.model), rate=scenario.rate)
    others = "of another system, MLPerf's implementation, not of bigbatch"
    origin = "yours" if scenario.rate else others if "MLPerf" in rate.source else f"as {cluster.name} states"
    lines = [
        f"compute rate ({origin}): {cluster.device}: {rate.images_per_second:,.1f} images/s of {rate.model} at "
        f"{rate.local_batch:g} images a step ({rate.source}{', assumed' if rate.is_assumed else ''})"
    ]
    if not scenario.rate:
        slowest = rate.images_per_second * PYTORCH_SHARE if "MLPerf" in rate.source else None
        pytorch = f"with PyTorch expect {slowest:,.0f} to {rate.images_per_second:,.0f} images/s; " if slowest else ""
        own = own_rate(cluster.device, scenario.config.model.name)
        known = (
            f"is {own.low:,.0f} to {own.high:,.0f} images/s at {own.local_batch} images a step, by record "
            f"({own.source})"
            if own
            else "is unknown"
        )
        lines.append(
            f"{pytorch}the rate of bigbatch itself {known}: measure yours on such a device by bigbatch doctor --config "
            "RECIPE --json FILE, for --profile FILE"
        )
    if rate.model != scenario.config.model.name:
        lines.append(f"the rate of {scenario.config.model.name} is scaled from that of {rate.model} by operations")
    if scenario.config.data.loader in READERS:
        rate_of_input = input_rate(scenario)
        lines.append(
            "the prediction covers compute and communication only; loaders or storage may be slower: state --input-rate"
            if rate_of_input is None
            else f"loaders bring {rate_of_input:,.1f} images/s in each node"
        )
    elif scenario.input_images_per_second is not None:
        lines.append(f"--input-rate has no effect: data.loader={scenario.config.data.loader} reads no files")
    stated = scenario.algorithm or scenario.config.comm.algorithm
    carrier = cluster.network.carrier
    if carrier != "nccl" and stated not in ("auto", BY_SIZE, "native"):
        lines.append(f"the recipe's {stated} is not simulated: {cluster.name} sums by {carrier}, in its own form")
    if carrier != "nccl":
        lines.append(f"carrier {carrier}: few published systems use it, so intervals of its sums are wider")
    if cluster.assumed:
        lines.append(f"assumed, not published, in {cluster.name}: {', '.join(cluster.assumed)}")
    return lines


def scaling_table(points: Sequence[PredictedPoint], *, price: float | None) -> Table:
    columns = {
        "GPUs": [f"{point.num_devices:,}" for point in points],
        "nodes": [f"{point.num_nodes:,}" for point in points],
        "images per GPU": [_batch(point) for point in points],
        "step": [f"{1e3 * point.step.seconds:,.1f} ms" for point in points],
        "90% interval": [f"{1e3 * point.low_seconds:,.1f} to {1e3 * point.high_seconds:,.1f}" for point in points],
        "images/s": [f"{point.images_per_second:,.0f}" + (" ?" if point.beyond_checked else "") for point in points],
        **({"efficiency": [percent(each.efficiency) for each in efficiencies(points)]} if len(points) > 1 else {}),
        "algorithm": [point.algorithm for point in points],
        "run": [duration(point.hours) for point in points],
        "GPU-hours": [f"{point.device_hours:,.1f}" for point in points],
    }
    if any(point.hours_to_759 is not None for point in points):
        columns["to 75.9%"] = ["" if point.hours_to_759 is None else duration(point.hours_to_759) for point in points]
    if price is not None:
        columns["cost"] = [f"{price * point.device_hours:,.2f}" for point in points]
    return table_of("Simulated", columns)


def _batch(point: PredictedPoint) -> str:
    microbatches = f" ({point.num_microbatches} microbatches)" if point.num_microbatches > 1 else ""
    return f"{point.local_batch:,}{microbatches}"


def loss_table(points: Sequence[PredictedPoint]) -> Table:
    """Show the parts of lost efficiency, as shares of the step, in the report's words."""
    rows = [
        (f"{point.num_devices:,}", percent(each.efficiency), *(percent(each.losses[part] or 0.0) for part in PARTS))
        for point, each in zip(points, efficiencies(points), strict=True)
    ]
    return Table("What is lost, as shares of the step", ("GPUs", "efficiency", "local batch", *PARTS[1:]), tuple(rows))


def run_table(points: Sequence[PredictedPoint]) -> Table:
    columns = {"GPUs": [f"{point.num_devices:,}" for point in points]}
    for cause in ("steps", "evaluations", "checkpoints", "failures"):
        columns[cause] = [duration(getattr(point.run, cause)) for point in points]
    columns["effective"] = [percent(point.run.effective_share) for point in points]
    return table_of("The run", columns)


def comparison_table(title: str, columns: Mapping[str, Sequence[PredictedPoint]]) -> Table:
    """Compare several simulations: milliseconds of a step."""
    counts = sorted({point.num_devices for points in columns.values() for point in points})
    found = {name: {point.num_devices: point for point in points} for name, points in columns.items()}
    rows = [
        (f"{size:,}", *(f"{1e3 * by[size].step.seconds:,.1f} ms" if size in by else "" for by in found.values()))
        for size in counts
    ]
    return Table(title, ("GPUs", *columns), tuple(rows))


def gpus(number: int) -> str:
    """Write 1024 -> '1,024 GPUs'."""
    return f"{number:,} GPU{'' if number == 1 else 's'}"


def findings(points: Sequence[PredictedPoint], *, model: str, deadline_hours: float | None) -> list[str]:
    last, each = points[-1], efficiencies(points)[-1]
    lines = []
    if len(points) > 1:
        lines.append(
            f"{gpus(last.num_devices)} train {each.speedup:.2f} times as fast as {points[0].num_devices:,} "
            f"({percent(each.efficiency)} efficiency).{each.lost_to}"
        )
        best = knee(points)
        if best is not last:
            lines.append(
                f"Beyond {gpus(best.num_devices)} each further GPU adds less than half the images/s of the first ones."
            )
    if last.step.input >= WORTH_NAMING * last.step.seconds:
        could = last.images_per_second * last.step.seconds / last.step.busy_seconds / last.num_nodes
        lines.append(
            f"Bound by input: at {gpus(last.num_devices)} a step waits for images for "
            f"{percent(last.step.input / last.step.seconds)} of its time; to keep up, the loaders of a node must bring "
            f"{could:,.0f} images/s."
        )
    lines += _extrapolated(points, model=model)
    if last.step.slow_seconds >= (1 + WORTH_NAMING) * last.step.seconds:
        lines.append(
            f"At {gpus(last.num_devices)} one step in ten takes longer than {1e3 * last.step.slow_seconds:,.1f} ms: "
            "its latest node is later than on average."
        )
    if last.run.failures:
        lines.append(
            f"With {count(last.num_nodes, 'node')} that fail, {percent(last.run.effective_share)} of the time is "
            "effective training time."
        )
    if deadline_hours is not None:
        lines.append(_within(points, deadline_hours))
    return lines


def _extrapolated(points: Sequence[PredictedPoint], *, model: str) -> list[str]:
    """Return for each kind of extrapolation what exceeds the checks, and the nearest checked step."""
    lines: dict[str, str] = {}
    for point in points:
        if point.beyond_checked is not None:
            batch = point.local_batch / point.num_microbatches
            near = nearest_published(model, point.num_devices, batch)
            lines[point.beyond_checked] = (
                f"?: extrapolated, {point.beyond_checked}. Nearest checked: {near.num_devices:,} {near.system}, "
                f"{near.model} at {near.local_batch} images each, {near.milliseconds:g} ms."
            )
    return list(lines.values())


def advice(scenario: Scenario, point: PredictedPoint) -> list[str]:
    """Return the gain of other settings at that number of devices."""
    found = advise(scenario, point)
    plan, now = found.plan, point.step.seconds
    lines = []
    if found.planned_seconds < (1 - WORTH_NAMING) * now:
        options = " ".join(f"--comm.{name} {value or 'null'}" for name, value in asdict(plan.sizes).items())
        lines.append(
            f"At {gpus(point.num_devices)} {count(len(plan.plan.buffers), 'buffer')} ({options}) would make a step "
            f"{1e3 * found.planned_seconds:,.1f} ms instead of {1e3 * now:,.1f}."
        )
    if found.half_wire_seconds is not None and found.half_wire_seconds < (1 - WORTH_NAMING) * now:
        lines.append(
            f"At {gpus(point.num_devices)} {found.half_wire_options} would make it "
            f"{1e3 * found.half_wire_seconds:,.1f} ms."
        )
    return lines


def _within(points: Sequence[PredictedPoint], hours: float) -> str:
    found = cheapest_within(points, hours)
    if found is None:
        fastest = min(point.hours for point in points)
        return f"None of these is done in {duration(hours)}; the fastest takes {duration(fastest)}."
    took = f"{duration(found.hours)} and {found.device_hours:,.1f} GPU-hours"
    return f"In {duration(hours)}, cheapest: {gpus(found.num_devices)}, {took}."


def as_json(scenario: Scenario, points: Sequence[PredictedPoint], *, price: float | None = None) -> str:
    """Write all figures; efficiency and losses are null for a single size, which has nothing to compare with.

    price: of a device for an hour; without it the cost is null.
    """
    is_single = len(points) == 1
    rows = [
        {
            "gpus": point.num_devices,
            "nodes": point.num_nodes,
            "global_batch_size": point.global_batch_size,
            "microbatches": point.num_microbatches,
            "algorithm": point.algorithm,
            "step_seconds": point.step.seconds,
            "low_seconds": point.low_seconds,
            "high_seconds": point.high_seconds,
            "computing_seconds": point.step.computing,
            "exposed_communication_seconds": point.step.communication,
            "straggler_seconds": point.step.stragglers,
            "input_wait_seconds": point.step.input,
            "slow_step_seconds": point.step.slow_seconds,
            "images_per_second": point.images_per_second,
            "efficiency": None if is_single else each.efficiency,
            "losses": None if is_single else each.losses,
            "hours": point.hours,
            "gpu_hours": point.device_hours,
            "cost": None if price is None else price * point.device_hours,
            "hours_to_759": point.hours_to_759,
            "hours_by": asdict(point.run),
            "effective_share": point.run.effective_share,
            "extrapolated": point.beyond_checked is not None,
            "beyond_checked": point.beyond_checked,
            "buffers": len(point.step.transfers),
            "rank_sends_bytes": point.sent.rank_bytes,
            "rank_sends_messages": point.sent.rank_messages,
            "node_sends_bytes": point.sent.node_bytes,
            "node_sends_messages": point.sent.node_messages,
            "energy": point.energy and asdict(point.energy),
        }
        for point, each in zip(points, efficiencies(points), strict=True)
    ]
    assumed, device = assumptions(scenario), scenario.cluster.device
    if power := power_of(device):
        assumed.append(f"energy: {power.watts:,.0f} W for each {device} ({power.source}), also while it waits")
    return files.as_json({"cluster": scenario.cluster.name, "assumed": assumed, "points": rows}, indent=1)


def draw(points: Sequence[PredictedPoint], *, title: str) -> "Figure":
    """Draw images per second and device over devices with the 90% interval, and perfect scaling."""
    figure, (axes,) = new_figure(8, 4.2)
    counts = [point.num_devices for point in points]
    lowest = [point.global_batch_size / point.high_seconds / point.num_devices for point in points]
    highest = [point.global_batch_size / point.low_seconds / point.num_devices for point in points]
    middle = [point.images_per_second / point.num_devices for point in points]
    axes.fill_between(counts, lowest, highest, color=COLOURS[0], alpha=0.2, label="90% interval")
    axes.plot(counts, middle, marker="o", color=COLOURS[0], label="simulated")
    axes.axhline(middle[0], color="0.6", linewidth=1, label="perfect scaling")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{each:,}" for each in counts])
    axes.set_ylim(0, 1.1 * max(highest))
    axes.set(xlabel="GPUs", ylabel="images per second and GPU", title=printable(title))
    axes.legend(fontsize=8, loc="lower left")
    return figure


def page(
    scenario: Scenario,
    points: Sequence[PredictedPoint],
    *,
    title: str,
    tables: Sequence[Table],
    findings: Sequence[str],
    asked: str,
) -> str:
    """Write all results in the page format of the report; asked: the command."""
    rests_on = [("asked", asked), ("bigbatch", __version__)]
    rests_on += [("assumed", line) for line in assumptions(scenario)]
    return make_page(
        title=title,
        findings=findings,
        images={"images per second and GPU": as_svg(draw(points, title=title))},
        tables=[*tables, Table("Assumptions", ("", ""), tuple(rests_on))],
        note=EXPLAINED,
    )


def trace(point: PredictedPoint) -> str:
    """Write the step as Chrome trace events in the rows of a real one: backward, and each buffer's all-reduce."""
    step = point.step
    start = step.input + step.computing - step.backward.seconds
    end = step.input + step.computing
    events = [
        _event("wait for images", "step", 0.0, step.input),
        _event("forward", "step", step.input, start),
        _event("backward", "step", start, start + step.backward.seconds),
        *(
            _event(
                f"buffer {number}", "all-reduce", start + each.start_seconds, start + each.end_seconds, each.num_bytes
            )
            for number, each in enumerate(step.transfers)
        ),
        _event("wait for all-reduce", "step", end, end + step.communication),
    ]
    return files.as_json({"displayTimeUnit": "ms", "traceEvents": events}, indent=1)


def _event(name: str, row: str, start: float, end: float, num_bytes: int | None = None) -> dict[str, Any]:
    facts = {} if num_bytes is None else {"args": {"bytes": num_bytes}}
    return {"name": name, "ph": "X", "pid": 0, "tid": row, "ts": 1e6 * start, "dur": 1e6 * (end - start), **facts}
