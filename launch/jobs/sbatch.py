"""Options of sbatch that nobody here has a name for: which of them pass through, and in what words."""

import re

from bigbatch.errors import LaunchOptionError

OURS = {
    "job-name": "--name",
    "nodes": "--nodes",
    "ntasks": "--ranks",
    **dict.fromkeys(("ntasks-per-node", "ntasks-per-gpu"), "--ranks-per-node"),
    "cpus-per-task": "--cpus-per-rank",
    **dict.fromkeys(("gpus", "gpus-per-node"), "--gpus-per-node, such as a100:8"),
    "mem": "--memory",
    **dict.fromkeys(("time", "partition", "account", "qos", "reservation", "constraint", "exclude", "array"), ""),
    **dict.fromkeys(("output", "error"), "--logs"),
    "signal": "--stop-seconds",
    **dict.fromkeys(("requeue", "no-requeue"), "--stop-seconds 0 for a job that ends at its limit"),
    **dict.fromkeys(("export", "export-file"), "--env for more variables"),
    "wait": "--wait",
    "chdir": "the folder from which you submit",
    "test-only": "--dry-run",
    **dict.fromkeys(("open-mode", "parsable", "wrap", "input", "help", "usage", "version"), "what is there"),
}
"""Options that the script or the submission states, and what to use instead; empty: the option of the same name."""

VALUE = r"[A-Za-z0-9][A-Za-z0-9._/+@=:,%()\[\]|&*!?~^-]*"
"""Neither blanks nor quotes, # or \\: Slurm reads an #SBATCH line without a shell, by quotes of its own."""


def parse_passed(words: list[str]) -> tuple[tuple[str, str | None], ...]:
    """Read KEY=VALUE words, or KEY for an option without a value; check_sbatch says which are right."""
    split = (word.partition("=") for word in words)
    return tuple((key, value if equals else None) for key, equals, value in split)


def check_sbatch(options: tuple[tuple[str, str | None], ...]) -> None:
    """Raise LaunchOptionError for what is no option's name, could be misread, or is ours.

    sbatch takes the beginning of a name for the whole, so that one of ours is refused, too.
    """
    for key, value in options:
        if not re.fullmatch(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)*", key, re.ASCII):
            raise LaunchOptionError(
                f"--sbatch {key!r} must be the long name of an option of sbatch without its --, such as "
                "dependency=afterok:1234"
            )
        if ours := next((name for name in sorted(OURS, key=len) if name.startswith(key)), None):
            whole = "" if ours == key else f", which sbatch reads as {ours}"
            raise LaunchOptionError(
                f"--sbatch {key}{whole}: bigbatch launch slurm states it itself: use {OURS[ours] or '--' + ours}"
            )
        if value is not None and not re.fullmatch(VALUE, value, re.ASCII):
            raise LaunchOptionError(
                f"--sbatch {key}={value!r} must begin with a letter or digit and hold no blank, quote, #, $, ; or \\, "
                "such as dependency=afterok:1234"
            )
