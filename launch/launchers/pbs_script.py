"""The qsub script of a job for PBS (OpenPBS, PBS Professional): pure, and plain enough to be kept and edited."""

import re
import shlex
from collections.abc import Sequence

from bigbatch.comm.rendezvous.environ import (
    FIRST_JOB_PORT,
    NOTICE_VARIABLE,
    NUM_JOB_PORTS,
    SECRET_VARIABLE,
    SITE_FILE_VARIABLE,
)
from bigbatch.errors import LaunchOptionError
from bigbatch.exit_codes import INTERRUPTED, LOST
from bigbatch.launch.jobs.findings import Findings
from bigbatch.launch.jobs.qsub import CHUNK
from bigbatch.launch.jobs.spec import JobSpec, check_time, refuse
from bigbatch.launch.jobs.words import UNLIMITED
from bigbatch.launch.launchers.local import node_words
from bigbatch.launch.launchers.script import FOREIGN_VARIABLES

REFUSED = {
    "hosts": "PBS chooses the nodes: state --nodes and --ranks-per-node",
    **dict.fromkeys(("node_rank", "master"), "the ranks find each other by PBS's own words: leave it out"),
    "qos": "state a --partition, or --qsub p=PRIORITY",
    "reservation": "a reservation of PBS is a queue: state --partition R1234",
    **dict.fromkeys(("constraint", "gpu_type"), "state --qsub chunk=NAME=VALUE, by your site's name for it"),
    "exclude": "PBS leaves out no nodes by name: state another --partition, or --qsub chunk=NAME=VALUE",
    "sbatch": "what qsub has is stated by --qsub KEY=VALUE",
    "mpi": "the ranks need none: leave it out",
    **dict.fromkeys(("image", "mounts", "container"), "install bigbatch where the nodes see it, and state --module"),
    "array": "start one job per value",
    "preflight": "start a job of its own: -- preflight",
    "restarts": "PBS starts a job again whose node was lost; after a lost rank submit it again, and it goes on",
}

NAME = r"[A-Za-z][A-Za-z0-9._+-]{0,229}"
"""As PBS itself checks it; PBS before 13 took no more than 15 characters, and says so."""

NODE_VARIABLES = "OMP_NUM_THREADS NCPUS"
"""PBS sets them for all ranks of a node together."""

CHECK = """\
if [ -z "${PBS_JOBID:-}" ]; then
  echo "bigbatch: this script is a PBS job: submit it by qsub $0" >&2
  exit 2
fi
# PBS's own programs are not on every PATH
conf=${PBS_CONF_FILE:-/etc/pbs.conf}
[ ! -r "$conf" ] || PATH=$PATH:$(. "$conf"; echo "$PBS_EXEC/bin")
cd "$PBS_O_WORKDIR" || exit 1
"""

NODE = """\
# Each node runs this script again, with its number and where all meet, and becomes the launcher of its ranks.
if [ $# -gt 0 ]; then
  trap '' USR1   # PBS sends signals to all processes of the first node
  [ "$1" -eq 0 ] || exec >> "$logs/node-$1.log" 2>&1
  echo $$ > "$logs/pid-$1"
  [ ! -e "$logs/asked" ] || exit @INTERRUPTED   # to stop, before this had begun
  exec @WORDS
fi
"""

HOSTS = """\
# PBS shows a job's own output at its end: this is shown meanwhile.
mkdir -p "$logs" && exec >> "$logs.log" 2>&1 || exit 1
mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")   # the first one is this one
echo "bigbatch: $(date '+%F %T') job $PBS_JOBID on ${hosts[*]}"
if [ "${#hosts[@]}" -ne @NODES ]; then
  echo "bigbatch: PBS gave ${#hosts[@]} hosts, and not @NODES: is there another -l select or place?"
  exit 1
fi
if [ "${#hosts[@]}" -gt 1 ] && ! command -v pbs_tmrsh > /dev/null; then
  echo "bigbatch: there is no pbs_tmrsh here, by which PBS starts what runs on other nodes: set PBS_CONF_FILE or PATH"
  exit 1
fi
# What PBS itself passes on, others may see: the nodes read a copy of this script, which is its owner's alone, begins
# with what the ranks prove to each other, and goes with the job.
clean() { rm -f "$logs/node" "$logs"/pid-* "$logs"/code-* "$logs/asked"; }
trap clean EXIT
clean
(
  umask 077; set -C
  { echo "export @SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"; cat "$0"; } > "$logs/node"
) || exit 1
"""

STOPS = f"""\
# The ranks save a checkpoint and exit with {INTERRUPTED} when their launchers get SIGTERM. Who asks:
#   USR1  the clock below, before the time limit, as PBS asks nobody in time; or qsig -s USR1
#   TERM  PBS ends the job (qdel, its limit, preemption), and sends SIGTERM to all processes of the first node itself
asked="" again="" pids=()
ask() {{
  local node
  [ ${{#pids[@]}} -eq ${{#hosts[@]}} ] || return   # they are asked when all have started
  [ ! -e "$logs/asked" ] || return
  touch "$logs/asked"
  kill "$(cat "$logs/pid-0")"
  for ((node = 1; node < ${{#hosts[@]}}; node++)); do
    pbs_tmrsh "${{hosts[node]}}" /bin/kill "$(cat "$logs/pid-$node")" &
  done
}}
trap 'again=1; [ "$asked" ] || {{ asked=1; ask; }}' USR1
trap 'again=1; asked=1' TERM
"""

CLOCK = """\
clock=""
limit=$(qstat -f "$PBS_JOBID" | sed -n 's/^ *Resource_List\\.walltime = *//p')
if [[ $limit =~ ^([0-9]+):([0-9]+):([0-9]+)$ ]]; then
  left=$((10#${BASH_REMATCH[1]} * 3600 + 10#${BASH_REMATCH[2]} * 60 + 10#${BASH_REMATCH[3]} - @GRACE - SECONDS))
  (trap 'kill "$!"' TERM; sleep "$((left > 0 ? left : 0))" & wait "$!" && kill -USR1 $$) &
  clock=$!
else
  echo "bigbatch: PBS states no time limit of this job: nobody asks for a checkpoint before it"
fi
"""

START = """\
# The other nodes' parts are tasks of PBS's own, which end with the job, and whose exit codes come back.
master=${hosts[0]}:$((@FIRST + ${PBS_JOBID%%[!0-9]*} % @NUM))
# Each writes its exit code down: bash may lose that of a process that ends by the signal that it waits through itself.
(trap : TERM USR1; @SHELL "$logs/node" 0 "$master"; echo $? > "$logs/code-0") &
pids=($!)
for ((node = 1; node < ${#hosts[@]}; node++)); do
  (trap '' TERM USR1; pbs_tmrsh "${hosts[node]}" @SHELL "$logs/node" "$node" "$master"; echo $? > "$logs/code-$node") &
  pids+=($!)
done
[ -z "$asked" ] || ask   # asked before
"""

WAIT = f"""\
# a signal ends `wait` before the launcher has ended: wait again
code=0
for node in "${{!pids[@]}}"; do
  wait "${{pids[node]}}"
  while [ -n "$again" ]; do again=""; wait "${{pids[node]}}"; done
  one=$(cat "$logs/code-$node") || one=143
  # ended before it listened
  [ -z "$asked" ] || [ "$one" -ne 143 ] || one={INTERRUPTED}
  case $node/$one in
    0/* | */0 | */{INTERRUPTED}) ;;
    *) echo "bigbatch: ${{hosts[node]}} ended with exit code $one: $logs/node-$node.log says why" ;;
  esac
  # {LOST}: it lost a rank of another node, whose code says more
  case $code in 0 | {LOST}) [ "$one" -eq 0 ] || code=$one ;; esac
done
[ -z "$clock" ] || kill "$clock" 2> /dev/null

# 0: done. {INTERRUPTED}: stopped by request, a checkpoint is saved. Anything else is the code of the rank that failed.
[ -z "$asked" ] || [ "$code" -ne {INTERRUPTED} ] \\
  || echo "bigbatch: it was asked to stop, as before a time limit: submit it again, and it goes on from its checkpoint"
echo "bigbatch: $(date '+%F %T') ended with exit code $code"
exit "$code"
"""


def pbs_script(job: JobSpec, *, bigbatch: Sequence[str] = ("bigbatch",)) -> str:
    """Return the text that qsub takes. bigbatch is how the nodes call it.

    Raises: JobRefused for what PBS cannot do.
    """
    with Findings() as findings:
        findings.ask(refuse, job, launcher="pbs", refused=REFUSED)
        findings.ask(check_time, job, stop_seconds=job.grace_seconds)
        for check in (_check_name, _check_queue, _check_logs, _check_limits, _check_taken):
            findings.ask(check, job)
    shell = "/bin/bash -l" if job.modules else "/bin/bash"  # modules are defined by the login shell's files
    clock = CLOCK.replace("@GRACE", str(job.grace_seconds)) if job.grace_seconds else 'clock=""\n'
    start = START.replace("@SHELL", shell).replace("@FIRST", str(FIRST_JOB_PORT)).replace("@NUM", str(NUM_JOB_PORTS))
    parts = [
        _head(job, shell=shell),
        CHECK + _setup(job),
        NODE.replace("@INTERRUPTED", str(INTERRUPTED)).replace("@WORDS", _words(job, bigbatch=bigbatch)),
        HOSTS.replace("@NODES", str(job.num_nodes or 1)).replace("@SECRET", SECRET_VARIABLE),
        STOPS,
        clock,
        start,
        WAIT,
    ]
    return "\n".join(parts)


def log_path(job: JobSpec, *, number: str) -> str:
    """Return where the job's output goes; beside it a folder of the same name without .log holds the other nodes'."""
    return f"{job.logs or 'logs'}/{job.name or 'bigbatch'}-{number.partition('.')[0]}.log"


def directives(job: JobSpec) -> list[str]:
    """Return what is asked of PBS, one option each."""
    chunk = {
        "ncpus": None if job.cpus_per_rank is None else job.cpus_per_rank * job.ranks_per_node,
        "mpiprocs": job.ranks_per_node,
        "ngpus": job.gpus_per_node,
        "mem": None if job.memory is None else _memory(job.memory),
    }
    stated = [f"{name}={value}" for name, value in chunk.items() if value is not None]
    stated += [str(value) for key, value in job.qsub if key == CHUNK]
    others = [f"{key} {value}" for key, value in job.qsub if key != CHUNK]
    asked = {
        "S": "/bin/bash",
        "N": job.name or "bigbatch",
        "l select": ":".join([str(job.num_nodes or 1), *stated]),
        "l place": None if any(each.startswith("l place=") for each in others) else "scatter",
        "l walltime": None if job.minutes is None else f"{job.minutes // 60:02}:{job.minutes % 60:02}:00",
        "q": job.partition,
        "A": job.account,
        "j": "oe",
        "o": f"{job.logs or 'logs'}/",
        # a node that is lost takes the job back into the queue, and the run goes on from its checkpoint
        "r": "y",
    }
    ours = [f"{name}{'=' if ' ' in name else ' '}{value}" for name, value in asked.items() if value is not None]
    return [f"-{line}" for line in (*ours, *others)]


def _memory(text: str) -> str:
    """Write Slurm's 200G, in powers of two and without a letter in MB, as PBS has it: 200gb."""
    return text.lower() + "b" if text[-1].isalpha() else f"{text}mb"


def _head(job: JobSpec, *, shell: str) -> str:
    lines = [
        f"#!{shell}",
        "# Made by bigbatch launch pbs, to be kept and edited. PBS makes no folder for the job's output:",
        f"#   mkdir -p {shlex.quote(job.logs or 'logs')} && qsub THIS_FILE",
        *(f"#PBS {line}" for line in directives(job)),
    ]
    return "\n".join(lines) + "\n"


def _setup(job: JobSpec) -> str:
    logs = job.logs or "logs"
    start = "" if logs.startswith("/") else '"$PWD"/'
    lines = [
        f"logs={start}{shlex.quote(logs)}/{shlex.quote(job.name or 'bigbatch')}-${{PBS_JOBID%%.*}}",
        *(f"module load {shlex.quote(module)} || exit 1" for module in job.modules),
        "# of a shell that submits with -V, and of a node as a whole",
        f"unset {FOREIGN_VARIABLES} {NODE_VARIABLES}",
        "export PYTHONUNBUFFERED=1   # or logs would lag by minutes",
        f"export {SITE_FILE_VARIABLE}=   # what the site's files say stands here",
        *([f"export {NOTICE_VARIABLE}={job.grace_seconds}   # as the clock below"] if job.grace_seconds else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables),
    ]
    return "\n".join(lines) + "\n"


def _words(job: JobSpec, *, bigbatch: Sequence[str]) -> str:
    """Return the launcher of a node, for bash, which states the node's number and where all meet as $1 and $2."""
    rank, master = '"$1"', '"$2"'
    words = (*bigbatch, *node_words(job, node_rank=rank, master=master))
    own = [word if word in (rank, master) else shlex.quote(word) for word in words]
    return " ".join((*own, shlex.join(job.command)))


def _check_name(job: JobSpec) -> None:
    if job.name is not None and not re.fullmatch(NAME, job.name, re.ASCII):
        raise LaunchOptionError(
            f"--name {job.name!r} must be a letter, then up to 229 letters, digits and . _ + - for PBS, such as "
            "resnet50-32k"
        )


def _check_queue(job: JobSpec) -> None:
    if job.partition is not None and "," in job.partition:
        raise LaunchOptionError(f"--partition {job.partition!r}: PBS takes one queue: name one")


def _check_logs(job: JobSpec) -> None:
    if job.logs is not None and ":" in job.logs:
        raise LaunchOptionError(f"--logs {job.logs!r}: PBS takes what stands before : for a host: name another folder")


def _check_limits(job: JobSpec) -> None:
    if job.minutes == UNLIMITED:
        raise LaunchOptionError("--time UNLIMITED: PBS has no such time: leave it out for the limit of the queue")
    if job.memory == "0":
        raise LaunchOptionError(
            "--memory 0: PBS has no such word for all of it: state how much, such as 200G, or --qsub "
            "l=place=scatter:exclhost"
        )


def _check_taken(job: JobSpec) -> None:
    if names := [name for name, secret in job.taken if secret is None]:
        raise LaunchOptionError(
            f"--env {names[0]}: PBS shows a job's variables to whoever may ask for the job (qstat -f): let the command "
            "read it from a file that only you can read"
        )
