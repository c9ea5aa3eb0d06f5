"""Jobs for PBS (OpenPBS, PBS Professional), handed to qsub."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bigbatch.errors import print_line, print_lines
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.jobs.findings import Findings
from bigbatch.launch.jobs.run_folder import find_run_folder
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.base import Launcher
from bigbatch.launch.launchers.pbs_script import REFUSED, log_path, pbs_script
from bigbatch.launch.launchers.script import add_script_options, hand_over, write_script
from bigbatch.trainer.run.folder import writing


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    with Findings() as findings:
        findings.ask(find_run_folder, replace(job, array=None))  # a run of which each start begins anew is refused
        script = findings.ask(pbs_script, job, bigbatch=bigbatch_argv())
    return script or ""


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    script, folder = _dry_run(job, environ), Path(job.logs or "logs")
    if options.output:
        write_script(options.output, script, force=options.force)
        print_line(f"written: {options.output}; submit it by: mkdir -p {folder} && qsub {options.output}")
        return 0
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    number, qsub = hand_over(
        ["qsub", *(["-W", "block=true"] if options.wait else [])],
        script,
        environ=environ,
        number=r"(\d+(?:\.\S+)?)\s*",
        hint="qstat -Qf lists the queues and their limits",
        wait=options.wait,
    )
    print_line(f"job {number}; its output: {log_path(job, number=number)}")
    print_lines(f"  qstat {number}\n  qsig -s USR1 {number}")
    return qsub.wait()  # without --wait it ends at once


LAUNCHER = Launcher(
    name="pbs",
    help="submit a job to PBS, which saves a checkpoint before its time limit",
    default_ranks="--nodes times --ranks-per-node",
    passes="none, as PBS would show them to others",
    example="--nodes 4 --ranks-per-node 8 --gpus-per-node 8 --cpus-per-rank 8 --time 2:00:00 --partition gpu "
    "-- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue="qstat shows its jobs, qsig -s USR1 JOB asks one to save a checkpoint and stop, and qdel JOB ends it",
    site_table="pbs",
    add_options=add_script_options,
)
