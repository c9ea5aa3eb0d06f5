"""Launcher for Slurm: submit by sbatch, list and cancel jobs."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigbatch.errors import JobRefused, LaunchOptionError, SchedulerError, print_line, print_lines, tell
from bigbatch.files import as_json, is_stream, read_end, read_plain, replacing_named
from bigbatch.launch.jobs.check import fitting_nodes
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.run_folder import find_run_folder, heals_in_place, try_load_experiment
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers import slurm_queue
from bigbatch.launch.launchers.base import Launcher, Queue
from bigbatch.launch.launchers.slurm_script import REFUSED, log_path, sbatch_script
from bigbatch.paths import as_path
from bigbatch.trainer.config.sections import CommConfig
from bigbatch.trainer.folder.folder import writing


def job_script(job: JobSpec, *, folder: str | None) -> str:
    """Return the sbatch script of a job; it runs this Python, or the image's. Raises: LaunchOptionError."""
    python = None if job.image else sys.executable
    counts = fitting_nodes(job) if job.restarts and job.num_nodes else ()
    config = try_load_experiment(job)
    seconds = (config.comm if config else CommConfig).timeout_seconds
    return sbatch_script(
        job, python=python, folder=folder, timeout_seconds=seconds, heals=heals_in_place(job), node_counts=counts
    )


def submit_job(
    job: JobSpec, *, wait: bool = False, environ: Mapping[str, str] | None = None
) -> "tuple[str, subprocess.Popen[bytes]]":
    """Submit a job; return its ID, and the sbatch process, which with wait ends with the job's exit code.

    environ: environment of sbatch, and so of the job; None: this process's.
    Raises: SchedulerError with Slurm's message; LaunchOptionError.
    """
    script = job_script(job, folder=find_run_folder(job))
    folder = Path(job.logs or "logs")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return slurm_queue.submit(script, wait=wait, environ=environ)


def run_preflight(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    """Test the nodes by a job, print its log and return its exit code; with --dry-run print its script.

    Raises: SchedulerError; LaunchOptionError.
    """
    if options.good_hosts:
        raise LaunchOptionError(
            "--good-hosts: Slurm chooses the nodes: use --preflight exclude of bigbatch launch slurm"
        )
    if options.dry_run:
        print(job_script(job, folder=None), end="")
        return 0
    job_id, sbatch = submit_job(job, wait=True, environ=environ)
    log = Path(log_path(job, job_id=job_id))
    print_line(f"job {job_id} tests the nodes; its output: {log}")
    code = sbatch.wait()
    _print_log(log)
    return code


def _print_log(path: Path) -> None:
    print_lines(read_end(path).rstrip("\n") if path.exists() else f"{path} does not exist")


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    with Problems() as findings:
        folder = findings.attempt(find_run_folder, job)
        script = findings.attempt(job_script, job, folder=folder)
    return script or ""


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    if job.gpus_per_node and job.cpus_per_rank is None and not {"exclusive", "cpus-per-gpu"} & dict(job.sbatch).keys():
        tell("warning: without --cpus-per-rank Slurm gives each rank one CPU core, which also decodes its images")
    if (job.image or "").removeprefix("docker://").startswith("nvcr.io/nvidia/"):
        tell(f"warning: --image {job.image}: it must contain bigbatch; images of NVIDIA do not: see docs/install.md")
    if options.output:
        _write_script(options.output, job_script(job, folder=find_run_folder(job)), force=options.force)
        print_line(f"written: {options.output}; submit it by: mkdir -p {job.logs or 'logs'} && sbatch {options.output}")
        return 0
    job_id, sbatch = submit_job(job, wait=options.wait, environ=environ)
    print_line(f"job {job_id}; its output: {log_path(job, job_id=job_id if job.array is None else job_id + '_*')}")
    print_lines(f"  bigbatch launch status {job_id}\n  bigbatch launch cancel {job_id}")
    code = sbatch.wait()  # without --wait it returns at once
    if options.wait and job.array is None and job.command[:1] != ("train",):  # a training's log may be long
        _print_log(Path(log_path(job, job_id=job_id)))
    return code


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=as_path, metavar="FILE", help="write the script to FILE; do not submit it")
    parser.add_argument("--force", action="store_true", help="with --output: overwrite a file that was edited")
    how = "wait for the end of the job, print its output (not that of train), and exit with its code"
    parser.add_argument("--wait", action="store_true", help=how)


def _write_script(path: Path, script: str, *, force: bool) -> None:
    """Write the script, readable by this user alone. Raises: JobRefused if a different one is there; RunFolderError."""
    data = script.encode("utf-8", "surrogateescape")
    with writing(path):
        if not (force or is_stream(path)) and path.exists() and read_plain(path) != data:
            raise JobRefused(
                [
                    f"--output {path}: the file exists and differs from what these options make: name another file, or "
                    "overwrite it, with your changes, by --force"
                ]
            )
        with replacing_named(path) as file:
            if not is_stream(path):
                os.fchmod(file.fileno(), 0o600)  # it may contain values of --env
            file.write(data)


def _status(job_ids: Sequence[str], is_json: bool) -> None:
    jobs: list[dict[str, Any]] = []

    def show(job_id: str) -> None:
        for job in (each for each in slurm_queue.find_jobs(job_id) if job_ids or not each.has_ended):
            if is_json:
                jobs.append(slurm_queue.facts_of(job))
            else:
                print_lines(slurm_queue.describe(job))

    found = job_ids or dict.fromkeys(slurm_queue.run_slurm(["squeue", "--me", "--noheader", "--format=%F"]).split())
    try:
        _for_each(found, show)
    finally:
        if is_json:
            print(as_json(jobs, indent=1))
    if not found and not is_json:
        print_line("no job of yours waits or runs")


def _cancel(job_ids: Sequence[str], now: bool) -> None:
    def cancel(job_id: str) -> None:
        jobs = slurm_queue.find_jobs(job_id)
        for job in [job for job in jobs if not job.has_ended] or jobs:  # some jobs of an array may have ended
            print_lines(slurm_queue.cancel(job, now=now))

    _for_each(job_ids, cancel)


def _for_each(job_ids: Iterable[str], act: Callable[[str], None]) -> None:
    """Call act for each job, also after one that Slurm refuses. Raises: SchedulerError, at the end."""
    refused: dict[str, None] = {}
    for job_id in job_ids:
        try:
            act(job_id)
        except SchedulerError as error:
            refused[str(error)] = None
    if refused:
        raise SchedulerError("; ".join(refused))


LAUNCHER = Launcher(
    default_ranks="--nodes times --ranks-per-node",
    environment_help="all but SLURM_*, SBATCH_*, SRUN_* of an enclosing job",
    example="--nodes 4 --ranks-per-node 8 --gpus-per-node 8 --cpus-per-rank 8 --time 2:00:00 "
    "-- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue=Queue(status=_status, cancel=_cancel),
    add_options=_add_options,
    preflight=run_preflight,
)
