"""Jobs in Slurm's queue: submit, status and cancel by sbatch, squeue, scontrol and scancel."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import without_slurm_job
from bigbatch.errors import INTERRUPTED, LaunchOptionError, SchedulerError, print_line, tell
from bigbatch.files import parse_json
from bigbatch.launch.jobs.foreground import one_line
from bigbatch.launch.jobs.run_folder import newest_report
from bigbatch.launch.jobs.spec import INDEX
from bigbatch.launch.launchers.slurm_script import RUN_FOLDER_MARK

EMPTY_VALUES = ("", "(null)", "None", "N/A", "Unknown")
"""Slurm's words for an empty value."""

NO_TASK = str(2**32 - 2)
"""ArrayTaskId of the entry that remains of an array's jobs that were cancelled before they started."""

ANSWER_SECONDS = 120.0
"""Time limit of Slurm's programs, which retry for more than a minute if the controller does not answer."""
RESUME_PAUSES_SECONDS = (1.0, 2.0, 4.0)
"""Pauses before a resumed job is asked again: a node drops signals until it has resumed its processes."""

ACTIVE_STATES = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING", "CONFIGURING", "RESIZING")
"""States of a job that has not ended."""


class NotInstalled(SchedulerError):
    """One of Slurm's programs is not on this host."""

    def __init__(self, program: str) -> None:
        super().__init__(
            f"{program} is not installed here: do this on a login node of the cluster; --dry-run prints the script "
            "anywhere"
        )


class NoController(SchedulerError):
    """No Slurm controller answers from this host."""


@dataclass(frozen=True)
class QueuedJob:
    facts: Mapping[str, str]
    """Fields of `scontrol show job`, by their names."""
    script: str
    remark: str = ""
    """Error of scontrol, if only Slurm's accounting tells of the job."""

    @property
    def job_id(self) -> str:
        """Return its ID: 12, or 12_3 in an array, or 12_[4-7] for the jobs of an array that have not started."""
        # 4-7%2: two of them may run at once
        task = self.facts.get("ArrayTaskId", "").partition("%")[0]
        if task in ("", NO_TASK):
            return self.facts["JobId"]
        return f"{self.facts['ArrayJobId']}_{task if task.isdecimal() else f'[{task}]'}"

    @property
    def state(self) -> str:
        """Return the state, such as PENDING, RUNNING, REQUEUED or COMPLETED."""
        return self.facts["JobState"]

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended for good."""
        return self.state not in ACTIVE_STATES

    @property
    def is_ours(self) -> bool:
        """Return whether its script handles our requests."""
        return any(line.startswith(RUN_FOLDER_MARK) for line in self.script.splitlines())

    @property
    def run_folder(self) -> Path | None:
        """Return its run folder, if its script states it."""
        for line in self.script.splitlines():
            if line.startswith(RUN_FOLDER_MARK):
                try:
                    folder = parse_json(line.removeprefix(RUN_FOLDER_MARK))
                except ValueError:  # another script's
                    return None
                if not folder or not isinstance(folder, str):
                    return None
                return Path(self.facts["WorkDir"], folder.replace(INDEX, self.facts.get("ArrayTaskId", "")))
        return None


def submit(
    script: str, *, wait: bool = False, environ: Mapping[str, str] | None
) -> tuple[str, subprocess.Popen[bytes]]:
    """Submit a script by sbatch; return the job ID, and the sbatch process, which with wait ends with the job.

    environ: environment of sbatch, without an enclosing job's variables; None: this process's. Output of sbatch, its
    plug-ins and a site's wrapper goes to stderr or into the error.
    Raises: SchedulerError if Slurm refuses it or is not installed.
    """
    argv = ["sbatch", "--parsable", *(["--wait"] if wait else [])]
    variables, left_out = without_slurm_job(environ)
    if left_out:
        tell(f"sbatch does not get {', '.join(left_out)} of this shell, which would override options of the job")
    pipe = subprocess.PIPE
    try:
        sbatch = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=variables)
    except FileNotFoundError as error:
        raise NotInstalled("sbatch") from error
    assert sbatch.stdin is not None
    assert sbatch.stdout is not None
    assert sbatch.stderr is not None
    with suppress(BrokenPipeError), sbatch.stdin as stdin:  # it ended before it read all, and its output says why
        stdin.write(script.encode(errors="surrogateescape"))
    output: list[bytes] = []
    # line by line: with --wait it prints the ID and runs until the job ends
    for line in sbatch.stdout:
        if found := re.fullmatch(r"(\d+)(?:;\S*)?\s*", line.decode(errors="replace"), re.ASCII):
            _show(output)
            reader = threading.Thread(target=_show, args=(sbatch.stderr,), name="bigbatch-sbatch")
            reader.start()
            if not wait:  # it has ended
                reader.join()
            return found[1], sbatch
        output.append(line)
    refusal = _refusal((b"".join(output) + sbatch.stderr.read()).decode(errors="replace"))
    sbatch.wait()
    if isinstance(refusal, NoController):
        raise refusal
    raise SchedulerError(f"sbatch refused the job: {refusal}; sinfo lists the partitions and their limits")


def _show(lines: Iterable[bytes]) -> None:
    """Copy sbatch's output to stderr as it comes."""
    for line in lines:
        print_line(line.decode(errors="replace").rstrip(), file=sys.stderr)


def find_jobs(job_id: str) -> list[QueuedJob]:
    """Return the job of that ID, or all jobs of an array.

    Raises: SchedulerError if Slurm does not know it (any more); LaunchOptionError if it is not a job ID.
    """
    if not re.fullmatch(r"\d+(?:_\d+)?", job_id, re.ASCII):
        raise LaunchOptionError(
            f"{job_id!r} is not a Slurm job ID: use the one that bigbatch launch slurm printed, such as 1234"
        )
    try:
        shown = run_slurm(["scontrol", "show", "job", "--oneliner", job_id])
    except SchedulerError as error:
        try:
            if not isinstance(error, NotInstalled) and (jobs := _accounted_jobs(job_id, str(error))):
                return jobs
            why = "sacct does not know it"
        except SchedulerError as refusal:
            why = f"sacct: {refusal}"
        is_asked = not isinstance(error, NoController)
        forgets = f"; Slurm forgets a job minutes after its end ({why}), its log remains" if is_asked else ""
        raise SchedulerError(f"job {job_id}: {error}{forgets}") from error
    # the first piece precedes the first JobId=
    records = re.split(r"^(?=JobId=)", shown, flags=re.MULTILINE)[1:]
    jobs, scripts = list[QueuedJob](), dict[str, str]()
    for facts in map(parse_facts, records):
        array = facts.get("ArrayJobId", facts["JobId"])
        scripts[array] = scripts.get(array) or _script_of(facts["JobId"])
        jobs.append(QueuedJob(facts, scripts[array]))
    return jobs


ACCOUNTED = {
    "JobID": "JobId",
    "JobName": "JobName",
    "State": "JobState",
    "ExitCode": "ExitCode",
    "Elapsed": "RunTime",
    "Timelimit": "TimeLimit",
    "NodeList": "NodeList",
    "WorkDir": "WorkDir",
}
"""Fields of sacct -> the same of scontrol."""


def _accounted_jobs(job_id: str, remark: str) -> list[QueuedJob]:
    """Return the jobs that Slurm's accounting knows: they have ended, or scontrol fails. Raises: SchedulerError."""
    separator = "\x1f"  # in no name
    form = ["--parsable2", f"--delimiter={separator}", f"--format={','.join(ACCOUNTED)}"]
    jobs = []
    for line in run_slurm(["sacct", f"--jobs={job_id}", "--allocations", "--noheader", *form]).splitlines():
        facts = dict(zip(ACCOUNTED.values(), line.split(separator), strict=False))
        if len(facts) == len(ACCOUNTED):
            facts["ArrayJobId"], _, task = facts["JobId"].partition("_")
            facts["ArrayTaskId"] = task.strip("[]")  # 12_[4-7%2]; scontrol has no brackets
            facts["JobState"] = facts["JobState"].partition(" ")[0]  # "CANCELLED by 1000"
            jobs.append(QueuedJob(facts, "", remark))
    return jobs


def _script_of(job_id: str) -> str:
    try:
        return run_slurm(["scontrol", "write", "batch_script", job_id, "-"])
    except SchedulerError:  # another user's, or not a batch job
        return ""


def parse_facts(line: str) -> dict[str, str]:
    """Parse 'JobId=7 JobName=a b Reason=None' into a dict; values may contain blanks, folders at the end also NAME=."""
    words = re.split(r"(?:^|\s)([A-Za-z][A-Za-z/:]*)=", line.strip())
    facts: dict[str, str] = {}
    for name, value in zip(words[1::2], words[2::2], strict=True):
        # the first one counts: a later NAME= may be part of a folder's name
        facts.setdefault(name, value)
    return facts


def facts_of(job: QueuedJob) -> dict[str, Any]:
    """Return what `launch status` tells about a job; None for what is not known."""
    facts = {name: value for name, value in job.facts.items() if value not in EMPTY_VALUES}
    code, _, signal = facts.get("ExitCode", "").partition(":") if job.has_ended else ("", "", "")
    return {
        "job": job.job_id,
        "name": facts.get("JobName"),
        "state": job.state,
        "reason": facts.get("Reason"),
        "remark": f"from accounting only; scontrol: {job.remark}" if job.remark and not job.has_ended else None,
        "elapsed": facts.get("RunTime"),
        "time_limit": facts.get("TimeLimit"),
        "nodes": facts.get("NodeList"),
        "restarts": facts.get("Restarts"),
        "exit_code": int(code) if code.isdecimal() else None,
        "signal": int(signal) if signal.isdecimal() and signal != "0" else None,
        "log": None if job.job_id.endswith("]") else facts.get("StdOut"),  # jobs that have not started have none
        "run_folder": str(job.run_folder) if job.run_folder else None,
        "last_report": newest_report(job.run_folder) if job.run_folder else None,
    }


def describe(job: QueuedJob) -> str:
    facts = facts_of(job)
    lines = [f"job {facts['job']} ({facts['name'] or ''}): {facts['state']}"]
    if facts["reason"]:
        lines[0] += f", {facts['reason']}"
    code = f"signal {facts['signal']}" if facts["signal"] else facts["exit_code"]
    if code == INTERRUPTED:
        code = f"{code} (stopped by request; a checkpoint is saved)"
    report = ", ".join(f"{name} {value:.6g}" for name, value in (facts["last_report"] or {}).items())
    rows = {
        "elapsed": f"{facts['elapsed'] or '?'} of {facts['time_limit'] or '?'}",
        "nodes": facts["nodes"],
        "restarts": facts["restarts"],
        "exit code": code,
        "log": facts["log"],
        "last report": report,
        "remark": facts["remark"],
    }
    return "\n".join([*lines, *(f"  {name:12}{value}" for name, value in rows.items() if value not in (None, ""))])


def _resume(job: QueuedJob) -> None:
    try:
        run_slurm(["scontrol", "resume", job.job_id])
    except SchedulerError as error:
        raise SchedulerError(
            f"job {job.job_id} is suspended and cannot save before it continues ({error}): ask an operator "
            f"for `scontrol resume {job.job_id}`, or add --now to end it; its newest checkpoint stays"
        ) from error


def cancel(job: QueuedJob, *, now: bool) -> str:
    """Ask a running job's ranks to save a checkpoint and stop; end a pending job, or any with now=True, at once.

    Returns a line that says what was done. Continues a suspended job first: Slurm would kill it without a signal.
    Raises: SchedulerError for a job that has ended or does not handle the request.
    """
    if job.has_ended:
        raise SchedulerError(f"job {job.job_id} has ended already: {job.state}")
    # before its start there is no script to handle a request
    if now or job.state not in ("RUNNING", "SUSPENDED"):
        run_slurm(["scancel", job.job_id])
        return f"job {job.job_id} is cancelled"
    if job.remark:
        raise SchedulerError(f"job {job.job_id}: {job.remark}; accounting says {job.state}: try again later")
    if not job.is_ours:
        raise SchedulerError(f"job {job.job_id} was not made by bigbatch launch slurm; to end it at once, add --now")
    # only the batch shell: its trap sends USR1 to the ranks
    ask = ["scancel", "--batch", "--signal=USR2", job.job_id]
    if job.state == "SUSPENDED":
        _resume(job)
    run_slurm(ask)
    for seconds in RESUME_PAUSES_SECONDS if job.state == "SUSPENDED" else ():
        time.sleep(seconds)
        with suppress(SchedulerError):  # the job has ended by then
            run_slurm(ask)
    return (
        f"job {job.job_id} was asked to save a checkpoint and stop; "
        f"bigbatch launch status {job.job_id} tells when it has, and bigbatch launch cancel {job.job_id} --now ends it"
    )


def run_slurm(argv: Sequence[str]) -> str:
    """Return the output of one of Slurm's programs. Raises: SchedulerError with its message."""
    try:
        done = subprocess.run(
            argv, input="", capture_output=True, text=True, errors="replace", check=False, timeout=ANSWER_SECONDS
        )
    except FileNotFoundError as error:
        raise NotInstalled(argv[0]) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{argv[0]} did not answer in {ANSWER_SECONDS:g} s; try again later") from error
    if done.returncode:
        raise _refusal(done.stderr.strip() or f"{argv[0]} ended with {done.returncode}")
    return done.stdout


def _refusal(text: str) -> SchedulerError:
    """Return the error of one of Slurm's programs that printed this text."""
    line = one_line(text)
    if "Could not establish a configuration source" in text or "Unable to contact slurm contr" in text:
        return NoController(f"no Slurm controller answers from this host ({line.split('; ')[0]})")
    return SchedulerError(line)
