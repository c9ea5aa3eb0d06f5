"""Losses that a job rehearses reach the processes and the link of that node alone."""

import os
import subprocess
import sys
from pathlib import Path

from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import make_plan
from bigbatch.tools.emulate.state import state_root

JOB = """
import os, subprocess, sys, time
from functools import partial
from pathlib import Path
from bigbatch.tools.emulate import cluster as clusters, namespaces
from bigbatch.tools.emulate.losses import Loss, FaultInjector
from bigbatch.tools.emulate.state import state_root
cluster = clusters.find("losses", root=state_root(os.environ))
clusters.join(cluster)
started = [
    subprocess.Popen(["sleep", "60"], preexec_fn=partial(namespaces.enter_node, cluster.keeper, node))
    for node in range(3)
]
metrics = Path(sys.argv[1])
rehearse = FaultInjector(
    (Loss("cut", 0, 1), Loss("stop", 1, 2), Loss("kill", 2, 3)), metrics=metrics, cluster=cluster, environ=os.environ
)
metrics.write_text("".join('{"kind": "train", "step": %d}\\n' % step for step in (1, 2, 3)))
rehearse()
assert started[2].wait(timeout=10) == -9
print([Path(f"/proc/{each.pid}/stat").read_text().split()[2] for each in started[:2]])
for each in started:
    each.kill()
"""


def test_losses_of_nodes(runtime_folder: Path, tmp_path: Path) -> None:
    root, environ = state_root(os.environ), dict(os.environ)
    cluster = clusters.up(
        make_plan(name="losses", nodes=3, ranks_per_node="1", link="none", delay="0"), root=root, environ=environ
    )
    try:
        argv = [sys.executable, "-c", JOB, str(tmp_path / "metrics.jsonl")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.stdout == "['S', 'T']\n", done.stderr
        shown = f"/proc/{cluster.keeper}/ns/net"
        queues = subprocess.run(["nsenter", f"--net={shown}", "tc", "qdisc"], capture_output=True, text=True).stdout
        assert [line.split()[4] for line in queues.splitlines() if " bfifo " in line] == ["p0"]
    finally:
        clusters.down("losses", root=root)
