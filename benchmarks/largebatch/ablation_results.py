"""From finished runs to figures: accuracy over seeds, differences between optimizers, a table."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.largebatch.ablation_cases import OPTIMIZERS, Form, cases, recipe_of
from bigbatch.experiments.search.space import parse_axis
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.strict_yaml import parse_yaml
from bigbatch.trainer.run.folder import RunDir, read_records

Run = dict[str, Any]
"""seed, base_lr, top1 (None where it diverged), loss_curve of epoch and loss, seconds."""


def collect(form: Form, folder: Path) -> dict[str, Any]:
    """Collect how rates were tuned, every run's numbers, and a summary per case."""
    found = {}
    for case in cases(form):
        runs = [read_run(folder / "runs" / case.folder / f"seed{seed}", seed) for seed in form.seeds]
        facts = {"family": case.family, "optimizer": case.optimizer, "batch": case.batch, "epochs": case.epochs}
        found[case.name] = {**facts, **summarise(runs), "runs": runs}
    tuning = {"trials": form.trials, "epochs": form.tune_epochs, "studies": read_studies(form, folder)}
    return {"pictures": vars(form.images), "num_train": form.num_train, "tuning": tuning, "cases": found}


def read_studies(form: Form, folder: Path) -> dict[str, Any]:
    """Read by study its range, its best rate, and whether that lay at an end of the range."""
    found = {}
    for case in cases(form):
        best = parse_yaml((folder / "tune" / case.study / "best.yaml").read_text())["schedule"]["base_lr"]
        space = OPTIMIZERS[case.optimizer].space
        found[case.study] = {"space": space, "base_lr": best, "is_edge": parse_axis(space).is_edge(str(best))}
    return found


def read_run(directory: Path, seed: int) -> Run:
    """Read what a finished run left."""
    rundir = RunDir(directory)
    config = load_config(["--config", str(recipe_of(directory))])
    train = [r for r in read_records(rundir.metrics) if r["kind"] == "train"]
    summary = json.loads(rundir.summary.read_text()) if rundir.summary.exists() else {"top1": None, "seconds": None}
    return {
        "seed": seed,
        "base_lr": config.schedule.base_lr,
        "top1": summary["top1"],
        "seconds": summary["seconds"],
        "loss_curve": {"epoch": [r["epoch"] for r in train], "loss": [r["loss"] for r in train]},
    }


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Sum up percent top-1 of runs that did not diverge: mean, sample standard deviation, extremes; count the rest."""
    percents = [100 * run["top1"] for run in runs if run["top1"] is not None]
    figures = {
        "n": len(percents),
        "mean": statistics.fmean(percents) if percents else None,
        "sd": statistics.stdev(percents) if len(percents) > 1 else None,
        "min": min(percents, default=None),
        "max": max(percents, default=None),
    }
    return {"top1_percent": figures, "diverged": len(runs) - len(percents)}


def ended(case: Mapping[str, Any]) -> str:
    """Count how many of the runs did not diverge."""
    count = case["top1_percent"]["n"]
    return f"{count} of {count + case['diverged']} ended"


def differences(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float | None, float | None]]:
    """Compute LARS minus each other optimizer at each batch: points, and the standard error of the difference."""
    lines = []
    by_key = {(c["optimizer"], c["batch"]): c for c in found.values() if c["family"] == "batch"}
    for (optimizer, batch), case in by_key.items():
        if optimizer == "lars":
            continue
        ours, theirs = by_key["lars", batch]["top1_percent"], case["top1_percent"]
        points, error = None, None
        if ours["mean"] is not None and theirs["mean"] is not None:
            points = ours["mean"] - theirs["mean"]
        if ours["sd"] is not None and theirs["sd"] is not None:
            error = (ours["sd"] ** 2 / ours["n"] + theirs["sd"] ** 2 / theirs["n"]) ** 0.5
        name = f"batch {batch}: lars ({ended(by_key['lars', batch])}) minus {optimizer} ({ended(case)})"
        lines.append((name, points, error))
    return lines


def markdown(results: Mapping[str, Any], *, title: str) -> str:
    """Write a table of all cases, the differences, and what both were measured under."""
    lines = [f"# Ablations: {title}", ""]
    lines += ["| family | case | batch | epochs | base LR | top-1 (%) | sd | smallest | largest | runs |"]
    lines += ["|" + "---|" * 10]
    for name, case in results["cases"].items():
        top1 = case["top1_percent"]
        figures = [shown(top1[key]) for key in ("mean", "sd", "min", "max")]
        rate = f"{case['runs'][0]['base_lr']:.4g}"
        cells = [case["family"], name, case["batch"], case["epochs"], rate, *figures, ended(case)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Points of top-1, with the standard error of the difference:", ""]
    for name, points, error in differences(results["cases"]):
        lines.append(f"- {name}: {'-' if points is None else f'{points:+.2f}'} +- {shown(error)}")
    return "\n".join([*lines, "", *explain(results)]) + "\n"


def explain(results: Mapping[str, Any]) -> list[str]:
    """Explain the conditions: how rates were chosen, and what the cases beside the batches share with others."""
    tuning, found = results["tuning"], results["cases"]
    precision = next(case["epochs"] for case in found.values() if case["family"] == "precision")
    lines = [
        f"Each optimizer's rate at each batch is the best of {tuning['trials']} trials of {tuning['epochs']} epochs:",
        "",
    ]
    for name, study in tuning["studies"].items():
        place = "at an end of the range: there may be better ones beyond" if study["is_edge"] else "inside the range"
        lines.append(f"- {name}: {study['base_lr']:.4g} of {study['space']}, {place}")
    return [
        *lines,
        "",
        "Rates were chosen on the validation pictures that accuracy is reported on, for all alike. Means are of the "
        "runs that ended: the others diverged.",
        "",
        "The cases of decay on all take the rate of the same optimizer without it. With LARS bias and normalisation "
        "then adapt, too, so that two things change; with Nesterov only their decay does.",
        "",
        f"The cases of precision take the rate of LARS in fp32, and have {precision} epochs.",
    ]


def shown(value: float | None) -> str:
    """Show two digits after the point."""
    return "-" if value is None else f"{value:.2f}"
