"""torchrun's restarts on two nodes: each agent counts its own, and a rank that is lost must not end the job."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import clean_environ, free_port

SCRIPT = Path(__file__).with_name("script_restarts.py")


def start_agent(node: int, *, port: int, arguments: list[str], output: Path) -> "subprocess.Popen[bytes]":
    """One node's torchrun; the first one serves the rendezvous."""
    argv = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=restarts", "--local-addr=127.0.0.1"]
    argv += [f"--rdzv-conf=is_host={str(node == 0).lower()}", "--monitor-interval=0.1"]
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *argv, str(SCRIPT), *arguments],
            env={**clean_environ(), "BIGBATCH_HOST": f"n{node}", "BIGBATCH_INTERFACE": "lo"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.long
@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_torchrun_on_two_nodes_goes_on_after_each_of_them_lost_a_rank(tmp_path: Path) -> None:
    """After the loss of rank 1, one agent has counted a restart and the other none; then it is the other's turn."""
    port = free_port()
    logs = [tmp_path / f"agent-{node}.log" for node in range(2)]
    arguments = [str(tmp_path), "1", "0"]
    agents = [start_agent(node, port=port, arguments=arguments, output=log) for node, log in enumerate(logs)]
    try:
        codes = [agent.wait(timeout=800) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.wait(timeout=60)
    said = "\n".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(2)] == ["3 after 2"] * 2, said
