"""Options of PBS's qsub that nobody here has a name for: which of them pass through, and in what words."""

import re

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.sbatch import VALUE

LETTERS = tuple("aclmMpPuW")
"""Those that pass."""

CHUNK = "chunk"
"""Not of qsub: joins the resources that each node must have."""

OURS = {
    "N": "--name",
    "q": "--partition",
    "A": "--account",
    **dict.fromkeys("jokeR", "--logs"),
    **dict.fromkeys("vV", "--env for variables"),
    "r": "what is there: PBS may start the job again, and it goes on from its checkpoint",
    "J": "one job per value",
    **dict.fromkeys("CfGhISXz", "what is there"),
    **dict.fromkeys(("l=select", "l=nodes", "chunk=mpiprocs"), "--nodes and --ranks-per-node"),
    **dict.fromkeys(("l=ncpus", "chunk=ncpus", "chunk=ompthreads"), "--cpus-per-rank"),
    **dict.fromkeys(("l=ngpus", "chunk=ngpus"), "--gpus-per-node"),
    **dict.fromkeys(("l=mem", "chunk=mem"), "--memory"),
    **dict.fromkeys(("l=walltime", "l=min_walltime", "l=max_walltime"), "--time"),
    "W=block": "--wait",
}
"""Options that the script or the submission states, and what to use instead."""

NAMED = ("l", "W", CHUNK)
"""Their values are NAME=VALUE."""

SEPARATORS = {"l": ",", CHUNK: ",+:"}
"""What would begin another resource, or another chunk."""


def name_passed(word: str) -> str:
    """Return what KEY=VALUE or KEY=NAME=VALUE names: l=place=excl -> l=place, m=abe -> m."""
    key, *names = word.split("=")
    return "=".join((key, *names[:1])) if key in NAMED else key


def check_qsub(options: tuple[tuple[str, str | None], ...]) -> None:
    """Raise LaunchOptionError for what is no option, could be misread, or is ours."""
    for key, value in options:
        stated = key if value is None else f"{key}={value}"
        name = name_passed(stated)
        if instead := OURS.get(key) or OURS.get(name):
            raise LaunchOptionError(f"--qsub {name}: bigbatch launch pbs states it itself: use {instead}")
        if key not in (*LETTERS, CHUNK):
            raise LaunchOptionError(
                f"--qsub {key!r} must be the letter of an option of qsub without its -, or {CHUNK}, such as "
                "l=filesystems=home"
            )
        if value is None or not re.fullmatch(VALUE, value, re.ASCII):
            raise LaunchOptionError(
                f"--qsub {stated!r} must have a value that begins with a letter or digit and holds no blank, quote, #, "
                "$, ; or \\, such as l=filesystems=home"
            )
        if key in NAMED and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*=.+", value, re.ASCII):
            raise LaunchOptionError(f"--qsub {stated} must be {key}=NAME=VALUE, such as W=depend=afterok:1234")
        if set(SEPARATORS.get(key, "")) & set(value):
            raise LaunchOptionError(f"--qsub {stated}: state each resource by a --qsub of its own")
        if name == "l=place" and not re.fullmatch("l=place=scatter(:.+)?", stated):
            raise LaunchOptionError(
                f"--qsub {stated}: each node has ranks of its own: begin with scatter, such as l=place=scatter:excl"
            )
