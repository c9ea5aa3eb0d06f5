"""Bash of a job's script for --preflight."""

from bigbatch.errors import INTERRUPTED, UNFIT

MAX_EXCLUSIONS = 3
"""Limit of requeues to get other nodes. Restarts for other reasons do not count."""

RUN_PREFLIGHT = f"""\
# Test the nodes. Exit code {UNFIT}: a node is unfit; the file has the names of unfit nodes.
rm -f "$logs/bad-nodes"
"""

RUN_SHORT_PREFLIGHT = f"""\
# Test each node's GPUs, without measurements (--preflight off leaves it out). Exit code {UNFIT}: a node is unfit.
"""

STOP_IF_CANCELLED = f"""\
if [ "$asked" = cancel ] || [ "$asked" = slurm ]; then
  echo "bigbatch: $(date '+%F %T') ended before training started, as it was asked to stop"
  exit {INTERRUPTED}
fi
"""

STOP_IF_UNFIT = """\
if [ "$fit" -ne 0 ]; then
  echo "bigbatch: $(date '+%F %T') ended before training started: preflight ended with exit code $fit"
  exit "$fit"
fi
"""

STOP_IF_UNFIT_SHORT = STOP_IF_UNFIT.replace('"$fit" -ne 0', f'"$fit" -eq {UNFIT}')
"""Other failures of the short test are the job's own, too."""

EXCLUDE_UNFIT = f"""\
# Add the unfit nodes to the job's excluded nodes. The job is requeued on hold, and released when Slurm has accepted
# the list. Slurm sends SIGTERM to all processes here; this shell outlives it for some seconds, its commands may not.
bad=$(paste -sd, "$logs/bad-nodes" 2>/dev/null)
if [ -n "$bad" ] && [ "$(cat "$logs/excluded" 2>/dev/null | wc -l)" -lt {MAX_EXCLUSIONS} ]; then
  echo "$bad" >> "$logs/excluded" || exit "$fit"
  echo "bigbatch: $(date '+%F %T') requeuing, to run without $bad"
  known=$(scontrol show job "$SLURM_JOB_ID" --oneliner | sed -n 's/.* ExcNodeList=\\([^ (]*\\).*/\\1/p')
  scontrol requeuehold "$SLURM_JOB_ID" || exit "$fit"
  for second in {{1..25}}; do
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${{known:+$known,}}$bad" \\
      && scontrol release "$SLURM_JOB_ID" && exit "$fit"
    sleep 1
  done
  echo "bigbatch: Slurm did not exclude $bad: do so by scontrol update (ExcNodeList=), then scontrol release"
  exit "$fit"
fi
"""

ON_UNFIT_NODES = {"warn": "", "stop": STOP_IF_UNFIT, "exclude": EXCLUDE_UNFIT + STOP_IF_UNFIT}
