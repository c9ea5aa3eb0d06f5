"""Bash of a job's script for --preflight."""

from bigbatch.exit_codes import INTERRUPTED, UNFIT

MOST_EXCLUSIONS = 3
"""Limit of requeues to get other nodes. Restarts for other reasons do not count."""

LOOK = f"""\
# Are the nodes fit? It ends with {UNFIT} where they are not, and writes the names of unfit ones.
rm -f "$logs/bad-nodes"
"""

ASKED = f"""\
if [ "$asked" = cancel ] || [ "$asked" = slurm ]; then
  echo "bigbatch: $(date '+%F %T') ended before the start, as it was asked to stop"
  exit {INTERRUPTED}
fi
"""

STOP = """\
if [ "$fit" -ne 0 ]; then
  echo "bigbatch: $(date '+%F %T') ended before the start, as preflight ended with $fit"
  exit "$fit"
fi
"""

EXCLUDE = f"""\
# Unfit nodes join those that the job does not use. It goes back into the queue, held until Slurm takes that.
# Slurm sends SIGTERM to all that runs here, which this shell outlives for some seconds, and what it calls may not.
bad=$(paste -sd, "$logs/bad-nodes" 2>/dev/null)
if [ -n "$bad" ] && [ "$(cat "$logs/excluded" 2>/dev/null | wc -l)" -lt {MOST_EXCLUSIONS} ]; then
  echo "$bad" >> "$logs/excluded" || exit "$fit"
  echo "bigbatch: $(date '+%F %T') back into the queue, to run without $bad"
  known=$(scontrol show job "$SLURM_JOB_ID" --oneliner | sed -n 's/.* ExcNodeList=\\([^ (]*\\).*/\\1/p')
  scontrol requeuehold "$SLURM_JOB_ID" || exit "$fit"
  for second in {{1..25}}; do
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${{known:+$known,}}$bad" \\
      && scontrol release "$SLURM_JOB_ID" && exit "$fit"
    sleep 1
  done
  echo "bigbatch: Slurm does not take that; fix it by scontrol update and scontrol release"
  exit "$fit"
fi
"""

ACTIONS = {"warn": "", "stop": STOP, "exclude": EXCLUDE + STOP}
