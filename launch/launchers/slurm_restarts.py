"""Bash of a job's script for --restarts: start the ranks again after a loss."""

from collections.abc import Sequence

ANSWER_SECONDS = 30
"""Time for a node to start a program before it counts as lost."""

ENDED = "0 | 2 | 130 | 141"
"""Exit codes without a restart in any case: done, refused, asked to stop, reader gone."""
FINAL = "0 | 1 | 2 | 3 | 4 | 5 | 12[67] | 130 | 141"
"""Exit codes without a restart if all nodes are there; fewer for a user's script, whose 1 may mean anything."""
FINAL_OF_SCRIPTS = "0 | 2 | 12[67] | 130 | 141"

ON_ALL = """\
# After a lost rank all ranks start again at once, on the same nodes. If a node is down, Slurm requeues the job.
lost() { [ -z "$asked" ] && ! was_preempted && case $1 in @FINAL) false ;; esac; }
lost "$code" || break
end_if_stuck "$code"
newest >> "$starts"
echo "bigbatch: $(date '+%F %T') exit code $code: starting again"
"""

NODES = f"""\
# Prints those of its nodes that start something within {ANSWER_SECONDS} s; all, where Slurm itself does not answer.
nodes_left() {{
  local node found=""; local -A looks=()
  for node; do
    timeout --kill-after=5 {ANSWER_SECONDS} srun --overlap --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 \\
      --nodelist="$node" true >/dev/null 2>&1 & looks[$node]=$!
  done
  for node; do wait "${{looks[$node]}}" && echo "$node" && found=1; done
  [ "$found" ] || printf '%s\\n' "$@"
}}
with_commas() {{ local IFS=,; echo "$*"; }}
# Told by its environment that it runs in the job, scontrol would write files here.
outside() {{ env -u SLURM_JOB_ID -u SLURM_JOBID "$@"; }}
"""

ALL = """\
left=($(scontrol show hostnames "$SLURM_JOB_NODELIST")) code=1
nodes=("${left[@]}")

"""

BEFORE = NODES + ALL
"""Bash before the first start of a job that continues without lost nodes: functions, and the list of nodes."""

CHOICE = """\
# Lost nodes are returned: Slurm requeues a job that has a node which is down. If it notices first, it does so here too.
if [ "${#left[@]}" -lt "${#nodes[@]}" ]; then
  outside scontrol update JobId="$SLURM_JOB_ID" NodeList="$(with_commas "${left[@]}")"
  nodes=("${left[@]}")
fi
for count in @COUNTS 0; do [ "$count" -gt "${#left[@]}" ] || break; done   # so many nodes can share the batch
if [ "$count" -eq 0 ]; then
  echo "bigbatch: $(date '+%F %T') back into the queue: too few nodes are left: ${left[*]}"
  scontrol requeue "$SLURM_JOB_ID" && exec sleep 600   # Slurm ends this shell
  break
fi
[ -z "$ranks" ] || newest >> "$starts"
"""

PLACE = '--overlap --nodes="$count" --ntasks=$((count * @RANKS)) --nodelist="$(with_commas "${left[@]:0:count}")"'
"""srun's options for the ranks of so many nodes, on the first remaining ones. --overlap: the previous step, in which
Slurm waits for a lost node, may still hold them."""

ON_THE_OTHERS = """\
# After a lost rank or node all ranks start again at once, without the lost nodes.
[ -z "$asked" ] && ! was_preempted || break
case $code in @ENDED) break ;; esac
left=($(nodes_left "${nodes[@]}"))
if [ "${#left[@]}" -eq "${#nodes[@]}" ]; then
  case $code in @FINAL) break ;; esac
fi
end_if_stuck "$code"
echo "bigbatch: $(date '+%F %T') exit code $code: starting again; nodes that answer: ${left[*]}"
"""


def choose_count(node_counts: Sequence[int]) -> str:
    """Return bash that chooses the number of nodes; node_counts: those that divide the batch, in falling order."""
    first, last = node_counts[0], node_counts[-1]
    is_range = len(node_counts) > 2 and tuple(node_counts) == tuple(range(first, last - 1, -1))
    return CHOICE.replace("@COUNTS", f"{{{first}..{last}}}" if is_range else " ".join(map(str, node_counts)))


def start_again(text: str, *, is_python: bool) -> str:
    """Return ON_ALL or ON_THE_OTHERS for the job: bash that ends the loop around srun or prepares its next round."""
    return text.replace("@ENDED", ENDED).replace("@FINAL", FINAL_OF_SCRIPTS if is_python else FINAL)
