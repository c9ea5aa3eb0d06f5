"""The launcher for Flux by a stand-in of flux run, which takes the documented options alone; argument lists: golden."""

import argparse
import os
import sys
from pathlib import Path

import pytest

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.jobs.validation import UNLIMITED
from bigbatch.launch.launchers.flux import flux_argv
from bigbatch.launch.launchers.registry import load_launcher

STAND_IN = """#!{python}
# flux run of flux-core: options of flux-run(1) up to the command; variables of flux-environment(7) for each task
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("nodes", "tasks-per-node", "cores", "gpus-per-node"):
    parser.add_argument("--" + name, type=int)
for name in ("job-name", "time-limit", "queue", "bank", "requires", "signal"):
    parser.add_argument("--" + name)
parser.add_argument("command", nargs=argparse.REMAINDER)
assert sys.argv[1] == "run"
args = parser.parse_args(sys.argv[2:])
size = args.nodes * args.tasks_per_node
codes = []
for rank in range(size):
    task = dict(FLUX_TASK_RANK=rank, FLUX_TASK_LOCAL_ID=rank % args.tasks_per_node, FLUX_JOB_SIZE=size)
    task |= dict(FLUX_JOB_NNODES=args.nodes, PMI_RANK=rank, PMI_SIZE=size)
    task = {{name: str(value) for name, value in task.items()}}
    codes.append(subprocess.call(args.command, env=os.environ | task))
sys.exit(max(codes))
"""
RANK = """
from bigbatch.comm.rendezvous.environ import read_process_env
env = read_process_env()
print(env.launcher, env.rank, env.world_size, env.local_rank, env.local_size, env.notice_seconds, len(env.secret) > 20)
raise SystemExit(env.rank)
"""


def start(job: JobSpec, environ: dict[str, str]) -> int:
    """Start the job by the launcher's own function."""
    return load_launcher("flux").start(job, environ=environ, options=argparse.Namespace())


def test_ranks_under_flux_know_their_places(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flux, script = tmp_path / "flux", tmp_path / "rank.py"
    flux.write_text(STAND_IN.format(python=sys.executable))
    flux.chmod(0o755)
    script.write_text(RANK)
    job = JobSpec((str(script),), 2, num_nodes=2, minutes=90, gpus_per_node=1, cpus_per_rank=3, is_python=True)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert start(job, environ) == 1, "the largest exit code, as Flux has it"
    assert capfd.readouterr().out.splitlines() == ["flux 0 2 0 1 120 True", "flux 1 2 0 1 120 True"]


@pytest.mark.parametrize(("stop_seconds", "signals"), [(None, []), (60, ["--signal=USR1@60s"])])
def test_flux_job_without_a_limit_of_time_states_none(stop_seconds: int | None, signals: list[str]) -> None:
    words = flux_argv(JobSpec(("train",), 1, minutes=UNLIMITED, stop_seconds=stop_seconds))
    assert [word for word in words if word.startswith(("--time-limit", "--signal"))] == signals


def test_flux_that_is_not_installed_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchOptionError, match=r"^flux is not installed here: .*bigbatch launch mpirun"):
        start(JobSpec(("train",), 1), {"PATH": str(tmp_path)})
