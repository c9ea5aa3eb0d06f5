"""The ablations of Jia et al. 2018 in miniature: what large batches cost, and what LARS, decay and precision change.

    bigbatch data prepare cifar10 data/cifar10
    python -m benchmarks.largebatch.ablations --dataset cifar10 --form short --data data/cifar10 \\
        --out benchmarks/results/ablations-cifar10-short.json

For each batch LARS, Nesterov and plain SGD get the same number of trials for their learning rate (`bigbatch tune
search`, on a seed of its own), then one run per seed with the best. All runs of a form have the same epochs. Rates are
chosen by the validation pictures that accuracy is then reported on, for every contestant alike. A finished run or
search is never repeated, an interrupted one goes on: give the same command again. --dry-run shows what would be run.
Form short fits 2 cores in 30 minutes, full wants a GPU. Beside the JSON file lies a table of the same name, in .md.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.largebatch.ablation_cases import FORMS, OPTIMIZERS, TUNING_SEED, Case, Form, cases, write_experiment
from benchmarks.largebatch.ablation_results import collect, markdown
from benchmarks.largebatch.form_command import chosen_form, form_folder, form_parser, record_form
from bigbatch.exit_codes import INTERRUPTED
from bigbatch.launch.jobs.foreground import Stopper, handling_stops
from bigbatch.trainer.config.strict_yaml import parse_yaml
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.step.divergence import REMEDY

ROOT = Path(__file__).resolve().parents[2]
DIVERGED = REMEDY.partition(" or ")[0]
"""What the message of every TrainingDiverged of a run advises, also where fp16 overflows, and of no other error."""
START_SECONDS = 12
"""Of a process: imports and decoding the pictures."""
BIGBATCH = (sys.executable, "-m", "bigbatch")


def main() -> None:
    """Tune, train, write the record and the table."""
    options = parse()
    form = chosen_form(options, FORMS)
    if options.dry_run:
        print(describe(form, form_folder(options)))
        return
    record_form(options, form, benchmark="ablations", measure=run_and_collect, table=markdown)


def run_and_collect(form: Form, folder: Path) -> dict[str, Any]:
    """Run all that is missing, and collect everything."""
    run_all(form, folder)
    return collect(form, folder)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = form_parser(__doc__, FORMS, runs="runs/ablations")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and how long they may take")
    return parser.parse_args(argv)


def run_all(form: Form, folder: Path) -> None:
    """Run every search and run that is not finished yet."""
    for case in cases(form):
        for seed in form.seeds:
            directory = folder / "runs" / case.folder / f"seed{seed}"
            if RunDir(directory).summary.exists() or (directory / "diverged.txt").exists():
                continue
            base_lr = tuned_rate(form, case, folder)
            path = write_experiment(form, case, data=folder / "data", directory=directory, seed=seed, base_lr=base_lr)
            train(path, directory)


def tuned_rate(form: Form, case: Case, folder: Path) -> float:
    """Read the learning rate that the case's search found; searches if none has."""
    best = folder / "tune" / case.study / "best.yaml"
    if not best.exists():
        print(f"tune {case.study}", flush=True)
        command = tune_command(form, case, folder)
        stop_unless_done(run_child(command).returncode, command)
    return float(parse_yaml(best.read_text())["schedule"]["base_lr"])


def tune_command(form: Form, case: Case, folder: Path) -> list[str]:
    """Write the experiment of the search for the plain case of that optimizer and batch, and return its words."""
    study, optimizer = folder / "tune" / case.study, OPTIMIZERS[case.optimizer]
    directory = folder / "tune" / "experiments" / case.study
    plain = Case(case.study, "batch", case.optimizer, case.batch, form.epochs, {})
    middle = (optimizer.lr_low * optimizer.lr_high) ** 0.5
    path = write_experiment(form, plain, data=folder / "data", directory=directory, seed=TUNING_SEED, base_lr=middle)
    amount = ("--trials", str(form.trials), "--epochs", str(form.tune_epochs), "--prune", "none")
    stated = ("--config", str(path), "--space", optimizer.space, *amount, "--study", str(study))
    return [*BIGBATCH, "tune", "search", *stated]


def train(path: Path, directory: Path) -> None:
    """Train one run; one whose weights end not finite is a result, too."""
    print(f"train {directory}", flush=True)
    command = train_command(path)
    done = run_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode == 1 and DIVERGED in done.stderr:
        (directory / "diverged.txt").write_text(done.stderr.splitlines()[-1] + "\n")
        return
    sys.stderr.write(done.stderr if done.returncode else "")
    stop_unless_done(done.returncode, command)


def train_command(path: Path) -> list[str]:
    """Make the command, for the repository's root, from which benchmarks.largebatch.half_lars is found."""
    return [*BIGBATCH, "train", "--config", str(path)]


def run_child(command: Sequence[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its own end, in a session of its own: a Ctrl-C is passed on, and it may take its time to save.

    Its exit code is INTERRUPTED then, whatever it was: what follows must not start.
    """
    process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **streams)
    stopper = Stopper(process.send_signal, signal.SIGINT)
    with handling_stops(stopper):
        _, errors = process.communicate()
    return subprocess.CompletedProcess(command, INTERRUPTED if stopper.asked else process.returncode, stderr=errors)


def stop_unless_done(returncode: int, command: Sequence[str]) -> None:
    """End this process as the command ended, unless all went well."""
    if returncode == INTERRUPTED:
        print("interrupted; the same command goes on from here", flush=True)
    elif returncode:
        print(f"failed: {' '.join(command)}")
    if returncode:
        sys.exit(returncode)


def describe(form: Form, folder: Path) -> str:
    """Describe what would be run, and an estimate of the time where the form has a rate for it."""
    everything = cases(form)
    studies = {case.study: case for case in everything}
    lines = [f"{len(studies)} searches of {form.trials} trials of {form.tune_epochs} epochs:"]
    lines += [f"  {name}" for name in studies]
    lines += [f"{len(everything)} cases, seeds {', '.join(map(str, form.seeds))}:"]
    lines += [f"  {case.family:10} {case.name:34} {case.epochs} epochs" for case in everything]
    lines += [f"everything below {folder}", estimate(form, everything, num_studies=len(studies))]
    return "\n".join(lines)


def estimate(form: Form, everything: Sequence[Case], *, num_studies: int) -> str:
    """Estimate pictures, and minutes."""
    images = {"fp32": float(num_studies * form.trials * form.tune_epochs * form.num_train), "fp16": 0.0}
    for case in everything:
        precision: Any = case.settings.get("optimizer.precision", "fp32")
        images[precision] += len(form.seeds) * case.epochs * form.num_train
    amounts = ", ".join(f"{count:,.0f} in {precision}" for precision, count in images.items())
    if form.images_per_second is None:
        return f"training pictures: {amounts}; no rate is known for this form"
    seconds = sum(count / form.images_per_second[precision] for precision, count in images.items())
    seconds += START_SECONDS * (num_studies * form.trials + len(everything) * len(form.seeds))
    return f"training pictures: {amounts}; about {seconds / 60:.0f} minutes on 2 cores"


if __name__ == "__main__":
    main()
