"""How a job's script gets nodes in place of lost ones, where the site lets running jobs grow: bash."""

LOOK_SECONDS = 60
"""How often a job that lost nodes asks for others; as `bigbatch launch mpirun` does."""

GRANT_SECONDS = 5
"""How long Slurm may take to find them: it looks when it is asked, and again with its next rounds."""

PERMIT = "permit_job_expansion"
"""Among Slurm's SchedulerParameters it lets running jobs grow."""

MORE = f"""\
# Told by its environment that it runs in the job, scontrol would write files here.
outside() {{ env -u SLURM_JOB_ID -u SLURM_JOBID "$@"; }}
# Asks for other nodes in place of the lost ones, so that there are as many as one of the numbers, where the site lets
# running jobs grow ({PERMIT}): another job gets them, and hands them over.
more_nodes() {{
  local count job time_left
  scontrol show config | grep -q {PERMIT} || return
  for count; do
    [ "$count" -gt "${{#nodes[@]}}" ] || return
    time_left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L)
    job=$(outside salloc --no-shell --immediate={GRANT_SECONDS} --dependency="expand:$SLURM_JOB_ID" \\
      --time="$time_left" --partition="$SLURM_JOB_PARTITION" --nodes=$((count - ${{#nodes[@]}})) \\
      @OPTIONS 2>&1 | sed -n 's/^salloc: Granted job allocation //p')
    [ -z "$job" ] || {{ outside scontrol update JobId="$job" NumNodes=0 && take_over && return; scancel "$job"; }}
  done
  return 1
}}
take_over() {{
  nodes=($(scontrol show hostnames "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)"))
  echo "bigbatch: $(date '+%F %T') Slurm gave other nodes in place of the lost ones: ${{nodes[*]}}"
}}
"""

RECALL = f"""\
# While nodes are missing it looks for others, and then has the ranks save and stop, to go on with all of them.
recall() {{
  local ended=""
  trap 'ended=1' TERM
  while sleep {LOOK_SECONDS} & wait $!; [ -z "$ended" ]; do
    more_nodes @COUNTS && echo "${{nodes[@]}}" > "$logs/grown" && kill -USR1 "$ranks" && return
  done
}}
"""

WATCH = """\
looks="" grown=""
[ "${#nodes[@]}" -ge @FULL ] || { recall & looks=$!; }
"""

WATCHED = """\
if [ "$looks" ]; then
  kill "$looks" 2>/dev/null; wait "$looks"
  [ ! -e "$logs/grown" ] || { nodes=($(cat "$logs/grown")); rm "$logs/grown"; [ "$code" -ne @STOPPED ] || grown=1; }
fi
"""
