"""Beyond LARS: optimizers by batch, at equal steps and at equal time, each tuned by as many trials.

    python -m benchmarks.largebatch.beyond --dataset cifar10 --form medium --data data/cifar10 \\
        --out benchmarks/results/beyond-cifar10-medium.json

At each batch each optimizer has as many trials of its learning rate, each as long as a run, on a seed of its own:
three over two decades, the others beside the best so far, out of the range where that leads there. Then there is a run
for each seed with the best. All have the same epochs, and so the same steps. Where a step takes longer than Nesterov's,
more runs follow with as many epochs as fit into Nesterov's time. Time is this process's on its CPUs, so that other work
on the machine counts little: the update by each optimizer in turns, and what precedes it at a batch as the median of
its runs. Rates are chosen by the validation pictures that accuracy is then reported on, for every contestant alike. All
runs are in this process. A finished run is never repeated, an interrupted one goes on: give the same command again.
Settings: beyond_cases.py.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import bigbatch
from benchmarks.largebatch.ablation_cases import OPTIMIZERS, TUNING_SEED, Case, Form, write_experiment
from benchmarks.largebatch.ablation_results import Run, ended, read_run, shown, summarise
from benchmarks.largebatch.beyond_cases import (
    COMPARED,
    FORMS,
    REFERENCE,
    available,
    best_rate,
    case,
    epochs_in_equal_time,
    next_rate,
)
from benchmarks.largebatch.form_command import chosen_form, form_parser, record_form
from benchmarks.largebatch.step_cost import update_milliseconds
from benchmarks.record import version_of
from bigbatch.errors import TrainingDiverged
from bigbatch.experiments.search.space import parse_axis
from bigbatch.trainer.run.folder import RunDir

Found = dict[str, Any]


def main() -> None:
    """Tune, train, write the record and the table."""
    options = parse()
    form = chosen_form(options, FORMS)
    names = available(options.optimizers)
    if missing := sorted(set(options.optimizers) - set(names)):
        print(f"left out, as their packages are not installed: {', '.join(missing)}")
    if options.dry_run:
        count = len(names) * len(form.batches) * (form.trials + len(form.seeds))
        print(f"{', '.join(names)} at batches {', '.join(map(str, form.batches))}:")
        print(f"{count} runs of {form.epochs} epochs, then those in equal time")
        return
    record_form(
        options,
        form,
        benchmark="beyond",
        measure=lambda form, folder: compare(form, names, folder),
        table=markdown,
        facts={"schedulefree": version_of("schedulefree")},
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = form_parser(__doc__, FORMS, runs="runs/beyond")
    parser.add_argument("--optimizers", nargs="+", choices=COMPARED, default=COMPARED, help="which (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")
    return parser.parse_args(argv)


def compare(form: Form, names: Sequence[str], folder: Path) -> Found:
    """Tune and run every optimizer at every batch; then those again whose step takes longer, in equal time."""
    update_ms = update_milliseconds(form, names, folder)
    studies, found, before_update_ms = {}, {}, {}
    for batch in form.batches:
        for name in names:
            plain = case(form, name, batch)
            studies[plain.study] = study = search(form, plain, folder)
            found[plain.name] = run_seeds(form, plain, folder, base_lr=study["base_lr"])
        before_update_ms[batch] = milliseconds_before_update(found, update_ms, batch=batch)
        for name in names:
            plain_found = found[f"{name} {batch}"]
            step_ms = before_update_ms[batch] + update_ms[name]
            reference_ms = before_update_ms[batch] + update_ms.get(REFERENCE, update_ms[name])
            epochs = epochs_in_equal_time(form, step_ms, reference=reference_ms)
            plain_found |= {"cpu_ms_per_step": step_ms, "epochs_in_equal_time": epochs}
            if epochs < form.epochs:
                shorter = case(form, name, batch, epochs=epochs)
                found[shorter.name] = run_seeds(form, shorter, folder, base_lr=studies[shorter.study]["base_lr"])
                found[shorter.name] |= {"cpu_ms_per_step": step_ms}
    return {
        "pictures": vars(form.images),
        "num_train": form.num_train,
        "tuning": {"trials": form.trials, "epochs": form.tune_epochs, "studies": studies},
        "cpu_ms": {"of_an_update": update_ms, "before_it_by_batch": before_update_ms},
        "cases": found,
    }


def milliseconds_before_update(found: Found, update_ms: dict[str, float], *, batch: int) -> float:
    """Return the median over all runs at a batch of what a step takes without its update; 0 where none was timed."""
    runs = [
        run["cpu_ms_per_step"] - update_ms[case["optimizer"]]
        for case in found.values()
        if case["batch"] == batch
        for run in case["runs"]
        if run["cpu_ms_per_step"] is not None
    ]
    return max(0.0, statistics.median(runs)) if runs else 0.0


def search(form: Form, plain: Case, folder: Path) -> Found:
    """Try rates on the tuning seed, and take the one with the best accuracy: the first among equals."""
    tried: dict[float, float | None] = {}
    for number in range(form.trials):
        base_lr = next_rate(plain.optimizer, tried)
        directory = folder / "tune" / plain.study / f"trial{number}"
        run = train(form, plain, folder, directory=directory, seed=TUNING_SEED, base_lr=base_lr)
        tried[base_lr] = run["top1"]
    best = best_rate(tried)
    trials = [{"base_lr": base_lr, "top1": top1} for base_lr, top1 in tried.items()]
    axis = parse_axis(OPTIMIZERS[plain.optimizer].space)
    return {"space": str(axis), "base_lr": best, "is_edge": best in (min(tried), max(tried)), "trials": trials}


def run_seeds(form: Form, each: Case, folder: Path, *, base_lr: float) -> Found:
    """Run every seed, and sum up."""
    runs = [
        train(form, each, folder, directory=folder / "runs" / each.folder / f"seed{seed}", seed=seed, base_lr=base_lr)
        for seed in form.seeds
    ]
    facts = {"family": each.family, "optimizer": each.optimizer, "batch": each.batch, "epochs": each.epochs}
    return {**facts, **summarise(runs), "runs": runs}


def train(form: Form, each: Case, folder: Path, *, directory: Path, seed: int, base_lr: float) -> Run:
    """Train one run, unless it is finished; one whose weights end not finite is a result, too."""
    times = directory / "steps.json"
    if not times.exists():
        shutil.rmtree(directory, ignore_errors=True)  # of an interrupted one
        path = write_experiment(form, each, data=folder / "data", directory=directory, seed=seed, base_lr=base_lr)
        clock = [time.process_time()]
        hooks = bigbatch.TrainingHooks(on_step=lambda done: clock.append(time.process_time()))
        print(f"train {directory.relative_to(folder)}", flush=True)
        try:
            bigbatch.train(path, hooks=hooks, quiet=True)
        except TrainingDiverged as error:
            (directory / "diverged.txt").write_text(f"{error}\n")
        shutil.rmtree(RunDir(directory).checkpoints, ignore_errors=True)
        steps = [1000 * (late - early) for early, late in pairwise(clock[1:])]  # the first makes state, too
        times.write_text(json.dumps({"cpu_ms_per_step": statistics.median(steps) if steps else None}))
    return {**read_run(directory, seed), **json.loads(times.read_text())}


def markdown(results: Found, *, title: str) -> str:
    """Write a table of all cases, and how rates were chosen."""
    lines = [f"# Beyond LARS: {title}", ""]
    lines += ["| case | batch | epochs | CPU ms a step | base LR | top-1 (%) | sd | smallest | largest | runs |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for name, found in results["cases"].items():
        figures = [shown(found["top1_percent"][key]) for key in ("mean", "sd", "min", "max")]
        rate = f"{found['runs'][0]['base_lr']:.4g}"
        cells = [name, found["batch"], found["epochs"], shown(found["cpu_ms_per_step"]), rate, *figures, ended(found)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    tuning = results["tuning"]
    lines += ["", f"Each rate is the best of {tuning['trials']} trials of {tuning['epochs']} epochs:", ""]
    for name, study in tuning["studies"].items():
        place = "the last one tried in its direction: there may be better ones" if study["is_edge"] else "inside"
        tried = ", ".join(f"{t['base_lr']:.3g}: {shown(t['top1'] and 100 * t['top1'])}" for t in study["trials"])
        lines.append(f"- {name}: {study['base_lr']:.4g} of {study['space']}, {place} ({tried})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
