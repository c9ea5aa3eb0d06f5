"""`bigbatch verify`: check runs against MLPerf's rules and the convergence of its reference."""

import argparse
import math
from collections.abc import Sequence
from itertools import combinations
from statistics import mean

from bigbatch.cells import columns
from bigbatch.errors import ConfigError, print_line, print_lines
from bigbatch.paths import as_path
from bigbatch.tools.mlperf.finished_run import FinishedRun, mlperf_events, read_run
from bigbatch.tools.mlperf.reference import ConvergencePoint, as_log, fewest_epochs, read_reference
from bigbatch.tools.mlperf.rules import TARGET_TOP1, Verdict, check_rules
from bigbatch.trainer.checkpoint.resume import changes
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import KEYS
from bigbatch.trainer.config.sections import READING_KEYS, RECORDING_KEYS
from bigbatch.trainer.folder.folder import RunDir

WIRE_KEYS = ("comm.wire_dtype", "comm.predivide", "comm.reduce_dtype")
MAY_DIFFER = (
    *("run.seed", "run.eval_offset_epochs", "run.reproducible", "run.audit_every_steps", "run.noise_scale_every_steps"),
    *("run.digest_every_steps", "run.digest_layers", "run.digest_values"),
    *(*RECORDING_KEYS, *READING_KEYS, "data.root", "batch.microbatch_size"),
    *(key for key in KEYS if key.startswith(("comm.", "compute.")) and key not in WIRE_KEYS),
)
"""Keys in which the runs of one recipe may differ: they state where and how it runs, and change numbers only by the
order of sums."""
EARLY_EPOCHS = 4
"""Epochs between two evaluations, by the rules: a run is not by chance earlier than the reference by more."""
FEWEST_RUNS = 3
"""Least number of runs; the fastest and the slowest do not count."""
VERDICTS = {True: "yes", False: "NO", None: "-"}


def main(argv: Sequence[str]) -> int:
    """Verify the run folders that argv names; return 0 if every rule holds."""
    arguments = _parser().parse_args(argv)
    runs = [read_run(RunDir(path)) for path in arguments.runs]
    require_one_recipe(runs)
    verdicts = check_rules(runs[0].config, runs[0].job)
    division = "closed" if all(verdict.holds for verdict in verdicts) else "open"
    reference = read_reference(runs[0].config.batch.global_batch_size)
    verdicts.append(check_convergence(runs, reference))
    print_lines(table(verdicts))
    if warning := warn_of_early(runs, reference):
        print_line(warning)
    for run in runs:
        log = as_log(mlperf_events(run, target_top1=TARGET_TOP1, division=division))
        run.rundir.write_text(run.rundir.mlperf_log, log)
        print_line(f"log for MLPerf's checkers, {division} division: {run.rundir.mlperf_log}")
    return int(any(verdict.holds is False for verdict in verdicts))


def require_one_recipe(runs: Sequence[FinishedRun]) -> None:
    """Compare the runs' configs. Raises: ConfigError if the runs are not one recipe with several seeds."""
    first = runs[0]
    for run in runs[1:]:
        changed = changes(dump_config(first.config), dump_config(run.config))
        for key, change in changed.items():
            if key not in MAY_DIFFER:
                raise ConfigError(
                    f"{run.rundir.path} is of another recipe than {first.rundir.path}: {key}={change}; verify runs "
                    "together that differ in run.seed alone"
                )
    for a, b in combinations(runs, 2):
        if a.config.run.seed == b.config.run.seed:
            raise ConfigError(
                f"{a.rundir.path} and {b.rundir.path} both have run.seed={a.config.run.seed}: they count as one run, "
                "give each its own"
            )


def check_convergence(runs: Sequence[FinishedRun], reference: ConvergencePoint | None) -> Verdict:
    """Return the verdict of MLPerf's test (not faster than the reference) on three runs or more; unknown for fewer."""
    rule = f"epochs to {100 * TARGET_TOP1:.1f}%"
    epochs = _epochs_to_target(runs)
    value = " ".join(f"{e:g}" if e < math.inf else "not reached" for e in epochs)
    # sorted, so inf comes last: one is dropped as the slowest, two are not
    if epochs[-1] == math.inf and (len(runs) < FEWEST_RUNS or epochs[-2] == math.inf):
        return Verdict(rule, value, "reached by all runs but one, of three or more", False)
    if reference is None:
        return Verdict(rule, value, "MLPerf has no record of so large a batch", None)
    known = f"{reference.name}: {reference.mean_epochs:.2f}"
    if reference.range_epochs:
        known += f" ({reference.range_epochs[0]} to {reference.range_epochs[1]})"
    if len(runs) < FEWEST_RUNS:
        return Verdict(rule, value, f"{known}; a test needs {FEWEST_RUNS} runs, MLPerf's 5", None)
    counted, fewest = mean(epochs[1:-1]), fewest_epochs(reference, num_runs=len(runs))
    return Verdict(
        rule, f"{value}, mean without extremes {counted:.2f}", f"at least {fewest:.2f}; {known}", counted >= fewest
    )


def warn_of_early(runs: Sequence[FinishedRun], reference: ConvergencePoint | None) -> str | None:
    """Return a warning if the fastest of too few runs for a test is far ahead of the reference."""
    if reference is None or len(runs) >= FEWEST_RUNS:
        return None
    soonest, (fastest, _) = _epochs_to_target(runs)[0], reference.range_epochs or (reference.mean_epochs, None)
    if soonest >= fastest - EARLY_EPOCHS:
        return None
    return (
        f"warning: {100 * TARGET_TOP1:.1f}% after {soonest:g} epochs, and the reference needs {fastest:g} at least: "
        f"check whether the task is too easy, such as the evaluated images; {FEWEST_RUNS} such runs fail"
    )


def _epochs_to_target(runs: Sequence[FinishedRun]) -> list[float]:
    """Return the epochs after which each run first reached the target, infinity if never; sorted."""
    return sorted(
        next((each["epoch"] for each in run.evaluations if each["top1"] >= TARGET_TOP1), math.inf) for run in runs
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """Return one line per rule: verdict, rule, value, legal values."""
    rows = ((VERDICTS[v.holds], v.rule, v.value, v.legal) for v in verdicts)
    return "\n".join(columns([("holds", "rule", "value", "legal"), *rows]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch verify",
        description="Compare a run's config with MLPerf's rules for ResNet-50, and its epochs to 75.9% with MLPerf's "
        "reference runs of the same batch, and write its log in MLPerf's format. Several runs of one recipe, each with "
        "its own seed, are tested together. Exit code 0 if every rule holds.",
    )
    parser.add_argument("runs", type=as_path, nargs="+", metavar="RUN", help="run folder, such as runs/resnet50_8k")
    return parser
