"""Bash of a job's script for --restarts: start the ranks again after one is lost."""

from collections.abc import Sequence

ANSWER_SECONDS = 30
"""Time for a node to start a program before it counts as lost."""

FINAL = "0 | 1 | 2 | 3 | 4 | 5 | 12[67] | 130 | 141"
"""Exit codes without a restart if all nodes are there; fewer for a user's script, whose 1 may mean anything."""
FINAL_OF_SCRIPTS = "0 | 2 | 12[67] | 130 | 141"

ON_ALL_NODES = """\
# After a lost rank all ranks restart at once on the same nodes. If a node is down, Slurm requeues the job.
lost() { [ -z "$asked" ] && ! was_preempted && case $1 in @FINAL) false ;; esac; }
lost "$code" || break
end_if_stuck "$code"
newest >> "$starts"
echo "bigbatch: $(date '+%F %T') exit code $code: restarting"
"""

FIND_NODES = f"""\
# Print the given nodes that start a program within {ANSWER_SECONDS} s; all of them if no node does.
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
# With these variables scontrol would write files into this folder, as it runs inside the job.
outside() {{ env -u SLURM_JOB_ID -u SLURM_JOBID "$@"; }}
left=($(scontrol show hostnames "$SLURM_JOB_NODELIST")) code=1
nodes=("${{left[@]}}")

"""

CHOOSE_NODES = """\
# Return lost nodes: Slurm requeues a job with a node that is down, also if it detects the loss before this script.
if [ "${#left[@]}" -lt "${#nodes[@]}" ]; then
  outside scontrol update JobId="$SLURM_JOB_ID" NodeList="$(with_commas "${left[@]}")"
  nodes=("${left[@]}")
fi
for count in @COUNTS 0; do [ "$count" -gt "${#left[@]}" ] || break; done   # numbers of nodes that divide the batch
if [ "$count" -eq 0 ]; then
  echo "bigbatch: $(date '+%F %T') requeuing, as too few nodes are left: ${left[*]}"
  scontrol requeue "$SLURM_JOB_ID" && exec sleep 600   # Slurm ends this shell
  break
fi
[ -z "$ranks" ] || newest >> "$starts"
"""

ON_NODES = '--overlap --nodes="$count" --ntasks=$((count * @RANKS)) --nodelist="$(with_commas "${left[@]:0:count}")"'
"""srun's options for the ranks of so many nodes, on the first remaining ones. --overlap: the previous step, in which
Slurm waits for a lost node, may still hold them."""

ON_REMAINING_NODES = """\
# After a lost rank or node all ranks restart at once, without the lost nodes.
[ -z "$asked" ] && ! was_preempted || break
case $code in 0 | 2 | 130 | 141) break ;; esac
left=($(nodes_left "${nodes[@]}"))
if [ "${#left[@]}" -eq "${#nodes[@]}" ]; then
  case $code in @FINAL) break ;; esac
fi
end_if_stuck "$code"
echo "bigbatch: $(date '+%F %T') exit code $code: restarting; nodes that answer: ${left[*]}"
"""


def restart_loop(text: str, *, node_counts: Sequence[int], is_python: bool) -> str:
    """Return bash that runs text, which starts the ranks and waits for their end, again after each failure.

    The body of the loop is not indented: quoted words may hold several lines.
    node_counts: numbers of nodes that divide the batch, in falling order; without any, only all nodes will do.
    """
    final = FINAL_OF_SCRIPTS if is_python else FINAL
    if not node_counts:
        return f"while :; do\n{text}{ON_ALL_NODES.replace('@FINAL', final)}done\n"
    counts, (first, last) = " ".join(map(str, node_counts)), (node_counts[0], node_counts[-1])
    if len(node_counts) > 2 and tuple(node_counts) == tuple(range(first, last - 1, -1)):
        counts = f"{{{first}..{last}}}"
    round_ = CHOOSE_NODES.replace("@COUNTS", counts) + text + ON_REMAINING_NODES.replace("@FINAL", final)
    return f"{FIND_NODES}while :; do\n{round_}done\n"
