"""Predict published rows, and compare the errors with those of two predictors that know no network.

Cold: only one-node rows are given (role fit1). Warm: the next size, too (fit2). Nulls: `linear` keeps each device's
rate of row 1; `line` is a straight line in the local batch through rows 1 and 2. Strangers: all one-node rows of other
families are given and none of the own, as before a system is bought. Sizes: all rows are given but those of the same
ladder and size. Two rows: rows whose system has two usable ones, by the simulator, by a straight line through both, and
by the one of them that cross-validation of the two takes (`better`).

Left out: cold, strangers and two rows, with constants chosen without the row's family, as for a new system; so are the
intervals of cold and strangers. That is the headline; the others are predicted with constants chosen from the same
rows. LATER sets intervals alone.

    python -m benchmarks.twin.published ROWS.csv [LATER.csv ...] --plot scatter.png
"""

import argparse
import collections
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.record import conditions, write_record
from benchmarks.twin.fits import BETTER, LINE, SIMULATOR, Prediction, line_seconds, predict_by, predict_row
from benchmarks.twin.hardware import DEFAULTS, RowConstants
from benchmarks.twin.leave_out import Steps, calibrated, constants_without, error_of, reaches_without
from benchmarks.twin.rows import Row, read_given
from bigbatch.colours import COLOURS
from bigbatch.tools.simulate.interval import FACTORS

FIT_1, FIT_2, JUDGE = "fit1", "fit2", "judge"
Fits = dict[str, dict[str, list[Row]]]
"""Rows by ladder and role."""


def nulls(row: Row, fits: Fits) -> dict[str, float]:
    """Return the seconds that `linear` and `line` predict; without those that lack rows."""
    ladder = fits.get(row["null_line"] or row["ladder"], {})
    fit = {
        role: min(rows, key=lambda each: abs(math.log(each.local_batch / row.local_batch)))
        for role, rows in ladder.items()
    }
    if FIT_1 not in fit:
        return {}
    one, two = fit[FIT_1], fit.get(FIT_2)
    found = {"linear": line_seconds(row, one, None)}
    if two is None or two.id == row.id:
        return found
    return found | {"line": line_seconds(row, one, two)}


def errors_of(
    rows: Sequence[Row], *, warm: bool, constants_of: Mapping[str, RowConstants] | None = None
) -> list[dict[str, Any]]:
    """Predict every row that has a row to scale from; errors as shares of the measured step.

    constants_of: the constants by family; None for those of the simulator.
    """
    fits = fits_of(rows)
    given = [row for row in rows if row["role"] == FIT_1 or (warm and row["role"] == FIT_2)]
    return [
        _error(predict_row(row, given, (constants_of or {}).get(row["family"], DEFAULTS)), nulls(row, fits))
        for row in targets_of(rows, warm=warm)
    ]


def fits_of(rows: Sequence[Row]) -> Fits:
    fits: Fits = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        if row["role"] in (FIT_1, FIT_2):
            fits[row["ladder"]][row["role"]].append(row)
    return fits


def targets_of(rows: Sequence[Row], *, warm: bool) -> list[Row]:
    """Return the rows to predict: those for which `linear` has a row, too."""
    fits = fits_of(rows)
    roles = (JUDGE,) if warm else (JUDGE, FIT_2)
    return [row for row in rows if row["role"] in roles and nulls(row, fits)]


def as_strangers(rows: Sequence[Row], constants_of: Mapping[str, RowConstants] | None = None) -> list[dict[str, Any]]:
    """Predict every row to judge from one-node rows of other families alone; there is no null to compare with."""
    found = []
    for row in rows:
        given = [each for each in rows if each.num_nodes == 1 and each["family"] != row["family"]]
        if row["role"] == JUDGE and given:
            constants = (constants_of or {}).get(row["family"], DEFAULTS)
            found.append(_error(predict_row(row, given, constants), {}))
    return found


def left_out(rows: Sequence[Row], later: Sequence[Row] = ()) -> dict[str, list[dict[str, Any]]]:
    """Predict cold rows and strangers without their family's rows; later: rows that set no constants, only widths."""
    steps = Steps(targets_of(rows, warm=False), [row for row in rows if row["role"] == FIT_1])
    constants_of = {family: constants_without(steps, family) for family in steps.families()}
    found = {
        "left out": errors_of([*rows, *later], warm=False, constants_of=constants_of),
        "left out, strangers": as_strangers(rows, constants_of),
    }
    two_rows = {"left out, two rows": from_two_rows([*rows, *later], constants_of)}
    ladders = [error["prediction"] for error in found["left out"]]
    for each in found.values():
        reaches = reaches_without([error["prediction"] for error in each], ladders)
        for error in each:
            below, above = error["reaches"] = reaches[error["id"]]
            error |= {"held": -below <= error_of(error["prediction"]) <= above, "width": (below + above) / 2}
    return found | two_rows


def from_two_rows(rows: Sequence[Row], constants_of: Mapping[str, RowConstants]) -> list[dict[str, Any]]:
    """Predict every warm row whose system has two usable rows, by each of FITS."""
    given = [row for row in rows if row["role"] in (FIT_1, FIT_2)]
    found = []
    for row in targets_of(rows, warm=True):
        constants = constants_of.get(row["family"], DEFAULTS)
        better = predict_by(BETTER, row, given, constants)
        if better.why:
            simulated, line = (predict_by(fit, row, given, constants) for fit in (SIMULATOR, LINE))
            known = {"line": line.seconds, "better": better.seconds}
            found.append(_error(simulated, known) | {"is_line": better.fit == LINE})
    return found


def as_new_sizes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Predict every row to judge from all rows but those of its own ladder and size."""
    found = []
    for row in rows:
        own = (row["ladder"], row.num_devices)
        given = [each for each in rows if (each["ladder"], each.num_devices) != own]
        if row["role"] == JUDGE and given:
            found.append(_error(predict_row(row, given), {}))
    return found


def widths_of(found: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Return the FACTORS and UNCHECKED_REACH that the systems left out give."""
    groups = [[error["prediction"] for error in found[name]] for name in ("left out, strangers", "left out")]
    (strangers, *_), (ladders, below, above) = map(calibrated, groups)
    factors = {kind: share * FACTORS[kind] for kind, share in (strangers | ladders).items()}
    return {name: round(each, 3) for name, each in (factors | {"below": below, "above": above}).items()}


def _error(prediction: Prediction, known: dict[str, float]) -> dict[str, Any]:
    row = prediction.row
    assert row.seconds is not None
    return {
        "id": row.id,
        "family": row["family"],
        "carrier": row.carrier,
        "prediction": prediction,
        "across": row.num_nodes > 1 or row["num_nodes"] != "1",
        "measured_seconds": row.seconds,
        "seconds": prediction.seconds,
        "held": prediction.low <= row.seconds <= prediction.high,
        "width": math.log(prediction.high / prediction.low) / 2,
        "error": prediction.seconds / row.seconds - 1,
        **{name: seconds / row.seconds - 1 for name, seconds in known.items()},
    }


def summarise(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the absolute errors, over all rows and where `linear` or `line` are far off."""
    across = [each for each in found if each["across"]]

    def middle(rows: Sequence[dict[str, Any]], name: str) -> float | None:
        values = [abs(each[name]) for each in rows if name in each]
        return round(median(values), 4) if values else None

    def beside(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        names = {"ours": "error", "linear": "linear", "line": "line", "better": "better"}
        shown: dict[str, Any] = {"rows": len(rows), **{shown: middle(rows, name) for shown, name in names.items()}}
        if not rows:
            return shown
        if "better" in rows[0]:
            means = {shown: mean(abs(each[name]) for each in rows) for shown, name in names.items() if name in rows[0]}
            shown |= {"mean": {name: round(each, 4) for name, each in means.items()}, "lines": _share(rows, "is_line")}
        width = math.expm1(median(each["width"] for each in rows))
        return shown | {"held": _share(rows, "held"), "width": round(width, 3)}

    families = sorted({each["family"] for each in across})
    carriers = sorted({each["carrier"] for each in found})
    worst = sorted(across, key=lambda each: -abs(math.log1p(each["error"])))[:5]
    return {
        "across nodes": beside(across),
        "linear more than 10% off": beside([each for each in across if abs(each.get("linear", 0.0)) > 0.1]),
        "line more than 10% off": beside([each for each in across if abs(each.get("line", 0.0)) > 0.1]),
        "linear within 3%": beside([each for each in across if abs(each.get("linear", 1.0)) <= 0.03]),
        "inside one node": beside([each for each in found if not each["across"]]),
        "held by the band": _share(found, "held"),
        "carriers": {name: beside([each for each in found if each["carrier"] == name]) for name in carriers},
        "families": {name: beside([each for each in across if each["family"] == name]) for name in families},
        "worst": [{"id": each["id"], "error": round(each["error"], 3)} for each in worst],
    }


def _share(rows: Sequence[dict[str, Any]], name: str) -> float:
    return round(sum(each[name] for each in rows) / len(rows), 3)


def print_summary(title: str, summary: dict[str, Any]) -> None:
    print(f"\n{title}: median error of a step, percent\n{'':28} rows   ours linear   line better   held  width")
    groups = {name: each for name, each in summary.items() if isinstance(each, dict) and each.get("rows")}
    for name, each in {**groups, **summary["families"], **summary["carriers"]}.items():
        keys = ("ours", "linear", "line", "better", "held", "width")
        shown = [f"{100 * each[key]:7.1f}" if each.get(key) is not None else "      -" for key in keys]
        print(f"{name:28} {each['rows']:4}{''.join(shown)}")
    print(f"within the 90% interval: {100 * summary['held by the band']:.0f}%")
    print("worst:", "; ".join(f"{each['id']} {100 * each['error']:+.0f}%" for each in summary["worst"]))


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw predicted over measured steps of the rows across nodes, ours with intervals and `linear`'s."""
    from matplotlib.figure import Figure

    across = [each for each in found if each["across"]]
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    measured = [1e3 * each["measured_seconds"] for each in across]
    linear = [(1 + each["linear"]) * 1e3 * each["measured_seconds"] for each in across]
    axes.scatter(measured, linear, s=14, color="0.65", label="linear: one node's rate")
    ours = [1e3 * each["seconds"] for each in across]
    reaches = [each["reaches"] for each in across]
    bars = [
        [one - one * math.exp(-below) for one, (below, _) in zip(ours, reaches, strict=True)],
        [one * math.exp(above) - one for one, (_, above) in zip(ours, reaches, strict=True)],
    ]
    label = "bigbatch simulate, 90% interval"
    axes.errorbar(measured, ours, bars, fmt="o", markersize=4, elinewidth=0.6, color=COLOURS[0], label=label)
    axes.plot([8, 14000], [8, 14000], color="0.3", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.set(
        xlabel="measured ms a step", ylabel="predicted ms a step", title=f"{len(across)} published rows across nodes"
    )
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("later", nargs="*", help="tables of rows that set widths of intervals, but no constants")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = read_given(arguments.rows).rows
    later = [row for path in arguments.later for row in read_given(Path(path)).rows]
    found = left_out(rows, later) | {name: errors_of([*rows, *later], warm=name == "warm") for name in ("cold", "warm")}
    found |= {"strangers": as_strangers(rows), "sizes": as_new_sizes(rows)}
    summaries = {name: summarise(errors) for name, errors in found.items() if errors}
    for name, summary in summaries.items():
        print_summary(name, summary)
    stored = {"conditions": conditions(arguments), "summaries": summaries, "widths": widths_of(found)}
    if arguments.out:
        write_record(arguments.out, stored)
    if arguments.plot:
        draw(found["left out"], arguments.plot)


if __name__ == "__main__":
    main()
