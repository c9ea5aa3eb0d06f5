"""The sbatch script of a job, simple enough to keep and edit. Pure."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from bigbatch import __version__
from bigbatch.comm.rendezvous.environ import IDENTITY_VARIABLES, NOTICE_VARIABLE, SECRET_VARIABLE, STOPPED_VARIABLE
from bigbatch.errors import INTERRUPTED, LaunchOptionError
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.fit_hosts import has_whole_preflight, preflight_of, short_preflight_of
from bigbatch.launch.jobs.run_folder import exit_wait_seconds
from bigbatch.launch.jobs.spec import INDEX, JobSpec, check_time, refuse
from bigbatch.launch.jobs.validation import format_minutes
from bigbatch.launch.launchers.slurm_preflight import (
    ON_UNFIT_NODES,
    RUN_PREFLIGHT,
    RUN_SHORT_PREFLIGHT,
    STOP_IF_CANCELLED,
    STOP_IF_UNFIT_SHORT,
)
from bigbatch.launch.launchers.slurm_restarts import ON_NODES, restart_loop
from bigbatch.trainer.config.sections import CommConfig

SIGNAL_EARLY_SECONDS = 60
"""Slurm checks time limits once a minute, so its signal may come this much earlier."""

REFUSED = {
    "hosts": "Slurm chooses the nodes: state --nodes and --ranks-per-node, and --exclude for bad ones",
    **dict.fromkeys(("node_rank", "master"), "the ranks find each other by Slurm's variables: leave it out"),
}


REGISTRY = re.compile(r"(docker://)?([^/#:]+\.[^/#:]+(?::\d+)?|[^/#:.]+:\d+|localhost)/([^#]+)(?<!\.sqsh)(?<!\.sif)")
"""Matches an image's name with a registry host: one with a dot or a port, or localhost."""

RUN_FOLDER_MARK = "# run folder: "
"""Start of the script's line with its run folder as JSON; a script with this line handles SIGUSR2."""

FOREIGN_VARIABLES = fill(
    " ".join(re.sub(r"(\w+)\*", r"${!\1@}", name) for name in IDENTITY_VARIABLES), width=110, break_on_hyphens=False
).replace("\n", " \\\n  ")
"""Bash: names or prefixes of variables in the submitting shell that describe another job."""

SRUN_VARIABLES = "${!SRUN_@}"
"""Bash: variables in the submitting shell that would set options of srun."""

REQUIRE_FORWARDED = """\
for name in {names}; do   # --export above passes those of the submitting shell
  [ "${{!name+x}}" ] && continue
  echo "bigbatch: --env $name: the variable is not set in the submitting shell. Export it and submit the job again" >&2
  exit 2
done"""

REQUIRE_RELEASE = f"""\
release=$({{python}} -m bigbatch --version)   # an upgrade may have come while the job waited
[ "${{{{release##*$'\\n'}}}}" = "bigbatch {__version__}" ] || {{{{
  echo "bigbatch: {__version__} made this job, and its Python has ${{{{release:-none}}}}: repeat bigbatch launch" >&2
  exit 2
}}}}"""

TRAP_SIGNALS = f"""\
# On SIGUSR1 or SIGTERM the ranks save a checkpoint and exit with {INTERRUPTED}. Signals to this script:
#   USR1  Slurm sends it before the time limit (--signal above): the job is requeued and resumes from the checkpoint
#   USR2  bigbatch launch cancel sends it: the job ends
#   TERM  Slurm sends it when it ends the job (scancel, or a limit is reached); Slurm requeues the job if necessary
# If Slurm marks a node of the job as down, it requeues the job (--requeue above), which resumes from its checkpoint.
asked="" again="" ranks=""
trap '[ "$asked" ] || asked=limit; again=1; [ "$ranks" ] && kill -USR1 "$ranks"' USR1
trap 'asked=cancel; again=1; [ "$ranks" ] && kill -USR1 "$ranks"' USR2
trap 'asked=slurm; again=1' TERM
was_preempted() {{ scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }}
"""

END_IF_STUCK = """\
# End a job without progress, which would be requeued forever: its time limit may be shorter than its start.
most=@MOST   # starts in a row without a newer checkpoint
starts="$logs/starts"
newest() { local all=("$run"/checkpoints/step-*); echo "at ${all[-1]}"; }
end_if_stuck() {
  [ "$(grep -cxF "$(newest)" "$starts")" -lt "$most" ] && return
  rm "$starts"
  echo "bigbatch: $(date '+%F %T') the last $most starts saved no new checkpoint${run:+ in $run}," \\
    "so the job is not restarted; find the cause in $logs, then submit the job again"
  exit "$1"
}
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -f "$starts"
touch "$starts" || exit 1
end_if_stuck 1
newest >> "$starts"
"""

MAX_STARTS = 5
"""Limit of starts from the queue for a job that states no restarts."""

WAIT_FOR_RANKS = """\
[ -z "$asked" ] || kill -USR1 "$ranks"   # a signal came before they started
tail --pid="$ranks" --follow=name --retry --lines=0 "$logs/rank-0.log" 2>/dev/null &
shown=$!

# A signal ends `wait` before the ranks have ended: wait again.
wait "$ranks"; code=$?
while [ -n "$again" ]; do again=""; wait "$ranks"; code=$?; done
wait "$shown"
"""

HEALING_SETUP = f"""\
# After a rank is lost the others continue, but srun returns the lost rank's exit code. So the first remaining rank
# writes the job's exit code to $ended.
ended=$(realpath "$logs")/ended
: > "$ended" || exit 1
export {STOPPED_VARIABLE}=$ended
has_ended() {{ [[ $(cat "$ended") =~ ^[0-9]+$ ]]; }}
"""
HEALING_WATCH = """\
(until has_ended && sleep @SECONDS && has_ended; do sleep 1; done; kill -TERM "$ranks") 2>/dev/null & leaving=$!
"""
HEALING_END = """\
kill "$leaving" 2>/dev/null
if has_ended; then code=$(cat "$ended"); elif [ -s "$ended" ] && [ "$code" -eq 0 ]; then code=6; fi
"""
"""Bash of a job that heals in place, before srun, after its start, and after its end."""

AT_LIMIT = f"limit/{INTERRUPTED} | limit/138)"
REQUEUE_OR_EXIT = f"""\
# Preemption with a grace time sends SIGTERM to the ranks alone; Slurm records its time. 138: a rank got SIGUSR1
# before it could handle it.
requeue=""
case $asked/$code in
  */0) ;;
  cancel/138) code={INTERRUPTED} ;;
  {AT_LIMIT} requeue="its time limit is near" ;;
  /*) was_preempted && requeue="it was preempted" ;;
esac
if [ -n "$requeue" ]; then
  # without a known run folder, a start that handled the signal counts as progress
  [ -n "$run" ] || [ "$code" -eq 138 ] || : > "$starts"
  end_if_stuck "$code"
  echo "bigbatch: $(date '+%F %T') requeuing, as $requeue"
  scontrol requeue "$SLURM_JOB_ID" && exec sleep 600   # Slurm ends this shell
  echo "bigbatch: Slurm does not requeue this job; submit it again, and it resumes from its checkpoint"
fi

# 0: finished. {INTERRUPTED}: stopped by request, a checkpoint is saved. Other codes: that of the rank that failed.
echo "bigbatch: $(date '+%F %T') ended with exit code $code"
exit "$code"
"""


def sbatch_script(
    job: JobSpec,
    *,
    python: str | None = None,
    folder: str | None = None,
    timeout_seconds: float = CommConfig.timeout_seconds,
    heals: bool = False,
    node_counts: Sequence[int] = (),
) -> str:
    """Return the script. folder: run folder, if any. timeout_seconds: the run's comm.timeout_seconds.

    heals: the remaining ranks continue in place after a rank is lost, so srun must not end them.
    python: interpreter on the nodes; None: bigbatch and python3 on PATH there or in the image.
    node_counts: numbers of nodes that divide the batch, in falling order; restarts use them after a lost node.
    Raises: JobRefused for unsupported options, and for an array whose jobs would share their files.
    """
    with Problems() as findings:
        findings.attempt(refuse, job, launcher="slurm", refused=REFUSED)
        findings.attempt(check_time, job, stop_seconds=job.grace_seconds, early_seconds=SIGNAL_EARLY_SECONDS)
        findings.attempt(_check_array, job)
        findings.attempt(_check_container, job)
    wait_seconds = math.ceil(exit_wait_seconds(timeout_seconds, heals=heals))
    parts = [_head(job, folder=folder), _setup(job), _progress(job, folder=folder), TRAP_SIGNALS]
    asks_for_gpus = bool(job.gpus_per_node) or any(name.startswith(("gpu", "gres")) for name, _ in job.sbatch)
    parts += [REQUIRE_RELEASE.format(python=shlex.quote(python))] if python else []
    if has_whole_preflight(job) or asks_for_gpus:
        parts += _preflight(job, python=python, wait_seconds=wait_seconds)
    start = _start(job, python=python, wait_seconds=wait_seconds, heals=heals, node_counts=node_counts)
    # a script that ignores the signal would restart at each time limit forever
    ending = REQUEUE_OR_EXIT.replace(AT_LIMIT, f"limit/{INTERRUPTED})") if job.is_python else REQUEUE_OR_EXIT
    return "\n".join([*parts, start, ending])


def _check_array(job: JobSpec) -> None:
    # an array without {index} overwrites its own files; without an array {index} stays as it is
    if (job.array is not None) != any(INDEX in word for word in job.command):
        raise LaunchOptionError(
            f"--array and {INDEX} belong together: each job of an array needs its own files, such as "
            f"--array 0-7 -- train --config quickstart --run.directory runs/sweep/{INDEX}"
        )


def _check_container(job: JobSpec) -> None:
    stated = [option for option, value in (("--mount", job.mounts), ("--container", job.container)) if value]
    if stated and job.image is None:
        raise LaunchOptionError(
            f"{' and '.join(stated)} without --image: nothing is mounted; name the image, or leave it out"
        )


def log_path(job: JobSpec, *, job_id: str = "%j") -> str:
    """Return the path of the job's log; the folder of the same name without .log has one file per rank."""
    # sbatch's patterns: number of the array, and of the job in it
    number = "%A_%a" if job.array is not None and job_id == "%j" else job_id
    return f"{job.logs or 'logs'}/{job.name or 'bigbatch'}-{number}.log"


def directives(job: JobSpec) -> list[str]:
    time = None if job.minutes is None else format_minutes(job.minutes)
    gpus = f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else job.gpus_per_node
    asked = {
        "job-name": job.name or "bigbatch",
        "nodes": job.num_nodes or 1,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_rank,
        "gpus-per-node": gpus,
        "mem": job.memory,
        "time": time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "reservation": job.reservation,
        "constraint": job.constraint,
        "exclude": job.exclude,
        "array": job.array,
        "output": log_path(job),
        # all variables of the submitting shell; a site may have another default
        "export": "ALL",
        # a requeued job appends to the same log
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace_seconds}",  # 0: only when the job is preempted
    }
    others = [f"--{name}" if value is None else f"--{name}={value}" for name, value in job.sbatch]
    return [*(f"--{name}={value}" for name, value in asked.items() if value is not None), "--requeue", *others]


def _head(job: JobSpec, *, folder: str | None) -> str:
    shell = "#!/bin/bash -l" if job.modules else "#!/bin/bash"  # the login shell's files define the module command
    logs = shlex.quote(job.logs or "logs")
    lines = [
        shell,
        "# Made by bigbatch launch slurm; you may edit it. Slurm does not create the folder of the job's output:",
        f"#   mkdir -p {logs} && sbatch THIS_FILE",
        *(f"#SBATCH {line}" for line in directives(job)),
        f"{RUN_FOLDER_MARK}{json.dumps(folder)}",
    ]
    return "\n".join(lines) + "\n"


def _setup(job: JobSpec) -> str:
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.array is not None else "$SLURM_JOB_ID"
    lines = [
        'if [ -z "${SLURM_JOB_ID:-}" ]; then',
        '  echo "bigbatch: this script is a Slurm job: submit it by sbatch $0" >&2',
        "  exit 2",
        "fi",
        "echo \"bigbatch: $(date '+%F %T') job $SLURM_JOB_ID on $SLURM_JOB_NODELIST,\" \\",
        '  "restart ${SLURM_RESTART_COUNT:-0}"',
        *(f"module load {shlex.quote(module)} || exit 1" for module in job.modules),
        "# Variables of the submitting shell that describe another job; the ranks find each other by Slurm's variables",
        f"unset {FOREIGN_VARIABLES} {SRUN_VARIABLES}",
        "export PYTHONUNBUFFERED=1   # otherwise logs lag by minutes",
        # a new secret for each start; other users cannot read a job's environment
        f"export {SECRET_VARIABLE}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')   # ranks authenticate by it",
        # 0: the job ends at the limit without a request to the ranks
        *([f"export {NOTICE_VARIABLE}={job.grace_seconds}   # as --signal above"] if job.grace_seconds else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables),
        *([REQUIRE_FORWARDED.format(names=" ".join(name for name, _ in job.forwarded))] if job.forwarded else []),
        f"logs={shlex.quote(job.logs or 'logs')}/{shlex.quote(job.name or 'bigbatch')}-{number}",
        'mkdir -p "$logs" || exit 1',
    ]
    return "\n".join(lines) + "\n"


def _progress(job: JobSpec, *, folder: str | None) -> str:
    """Return bash that ends a job which restarts repeatedly without a new checkpoint."""
    most = job.restarts + 1 if job.restarts else MAX_STARTS
    # folder is this host's answer: the recipe inside the image may name another one
    looked = '[ -d "$run" ] || run=""   # of another release in the image\n' if job.image and folder else ""
    return f"run={_quoted([folder or ''], job)}\n{looked}{END_IF_STUCK.replace('@MOST', str(most))}"


def _preflight(job: JobSpec, *, python: str | None, wait_seconds: int) -> list[str]:
    """Return the bash that tests the nodes before the start: with all ranks, or shortly with one process per node."""
    options = _srun_options(job, wait_seconds=wait_seconds)
    if job.preflight in ON_UNFIT_NODES:
        head, test, ending = RUN_PREFLIGHT, preflight_of(job), ON_UNFIT_NODES[str(job.preflight)]
        places, last = [], ' --bad-nodes "$logs/bad-nodes"'
    elif (short := short_preflight_of(job)) is not None:
        head, test, ending, last = RUN_SHORT_PREFLIGHT, short, STOP_IF_UNFIT_SHORT, ""
        places = [f"--nodes={short.num_ranks} --ntasks={short.num_ranks} --ntasks-per-node=1"]
    else:
        return []
    lines = [
        f"srun {' '.join(options)} \\",
        *(f"  {line} \\" for line in (*places, *_container(job))),
        f"  {_quoted(_rank_words(test, python=python), job)}{last}",
    ]
    return [head + "\n".join(lines) + "\nfit=$?\n" + STOP_IF_CANCELLED + ending]


def _srun_options(job: JobSpec, *, wait_seconds: int, heals: bool = False) -> list[str]:
    # repeated: from Slurm 22.05 on srun does not inherit --cpus-per-task from sbatch
    cpus = [] if job.cpus_per_rank is None else [f"--cpus-per-task={job.cpus_per_rank}"]
    mpi = [] if job.mpi is None else [f"--mpi={job.mpi}"]
    ends = ["--wait=0"] if heals else [f"--wait={wait_seconds}"]
    return ["--export=ALL", "--cpu-bind=none", *cpus, *mpi, "--kill-on-bad-exit=0", *ends]


def _start(job: JobSpec, *, python: str | None, wait_seconds: int, heals: bool, node_counts: Sequence[int]) -> str:
    """Return bash that starts srun in the background, so that the shell can handle signals."""
    options = " ".join(_srun_options(job, wait_seconds=wait_seconds, heals=heals))
    later = f"{wait_seconds} s after the first one has ended" if heals else f"{wait_seconds} s later"
    lines = [
        "# Ranks bind themselves to cores. A failed rank does not end the others at once: they report which it was;",
        f"# those still there {later} are ended. One log per rank; the job's own log shows rank 0's.",
        f"srun {options} \\",
        *([f"  {ON_NODES.replace('@RANKS', str(job.ranks_per_node))} \\"] if node_counts else []),
        '  --open-mode=append --output="$logs/rank-%t.log" \\',
        *(f"  {line} \\" for line in _container(job)),
        f"  {_quoted(_rank_words(job, python=python), job)} &",
    ]
    text = "\n".join(lines) + "\nranks=$!\n"
    leaving = HEALING_WATCH.replace("@SECONDS", str(wait_seconds))
    text = HEALING_SETUP + text + leaving + WAIT_FOR_RANKS + HEALING_END if heals else text + WAIT_FOR_RANKS
    return restart_loop(text, node_counts=node_counts, is_python=job.is_python) if job.restarts else text


def _rank_words(job: JobSpec, *, python: str | None) -> tuple[str, ...]:
    if python is not None:
        return (python, *job.python_words)
    return ("python3" if job.is_python else "bigbatch", *job.command)


def _container(job: JobSpec) -> list[str]:
    """Return srun's options for the image (pyxis), or the command prefix (Apptainer). Both keep the work folder."""
    if job.image is None:
        return []
    kind, name = job.container or ("apptainer" if job.image.endswith(".sif") else "pyxis"), job.image
    address = None if Path(name).exists() else REGISTRY.fullmatch(name)
    if address:  # docker's form; enroot separates the registry by #
        scheme, host, path = address.groups(default="")
        name = f"{scheme}{host}#{path}" if kind == "pyxis" else f"docker://{host}/{path}"
    image, mounts = shlex.quote(name), [shlex.quote(mount) for mount in job.mounts]
    if kind == "pyxis":
        return [
            f'--container-image={image} --container-workdir="$PWD"',
            "--container-mounts=" + ",".join(('"$PWD:$PWD"', *mounts)),
        ]
    binds = "".join(f" --bind {mount}" for mount in mounts)
    return [f'apptainer exec --nv --pwd "$PWD"{binds} {image}']


def _quoted(command: Sequence[str], job: JobSpec) -> str:
    """Quote the words for bash; {index} becomes the number of the job in its array."""
    if job.array is None:
        return shlex.join(command)
    # outside of the single quotes, in which bash would not expand it
    number = '"$SLURM_ARRAY_TASK_ID"'
    return " ".join(
        number.join(shlex.quote(part) if part else "" for part in word.split(INDEX)) or "''" for word in command
    )
