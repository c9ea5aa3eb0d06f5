"""`bigbatch launch preflight`: look at the nodes of a job before it, by mpirun or as a job in Slurm."""

from collections.abc import Mapping
from pathlib import Path

from bigbatch.errors import LaunchOptionError, print_line
from bigbatch.exit_codes import UNFIT
from bigbatch.launch.jobs.fit_hosts import choose_launcher, write_hostfile
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.mpirun import look_at_hosts, show_look
from bigbatch.launch.launchers.slurm import job_script, run_and_show


def compare_nodes(job: JobSpec, *, good_hosts: Path | None, dry_run: bool, environ: Mapping[str, str]) -> int:
    """Run the preflight that is the job's command; return its exit code, UNFIT where something is wrong.

    good_hosts is where a hostfile of the fit hosts goes; Slurm, which chooses the nodes itself, takes none.
    Raises: LaunchOptionError; SchedulerError.
    """
    if choose_launcher(job) == "slurm":
        if good_hosts:
            raise LaunchOptionError(
                "--good-hosts: Slurm chooses the nodes: use --preflight exclude of bigbatch launch slurm"
            )
        if dry_run:
            print(job_script(job, folder=None), end="")
            return 0
        return run_and_show(job, environ=environ)
    if good_hosts and not job.hosts:
        raise LaunchOptionError("--good-hosts needs --hosts or --hostfile, of which it writes the fit ones")
    if dry_run:
        print(show_look(job, environ=environ), end="")
        return 0
    looked, bad = look_at_hosts(job, environ=environ)
    if good_hosts and looked.code in (0, UNFIT):
        write_hostfile(good_hosts, job.hosts, bad=bad)
        print_line(f"written: {good_hosts}")
    return looked.code
