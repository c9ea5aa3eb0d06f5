"""submit, status and cancel, with stand-ins for Slurm's programs that answer as 22.05 does."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming

from bigbatch.errors import LaunchOptionError, SchedulerError
from bigbatch.launch.launchers import slurm_queue
from bigbatch.launch.launchers.slurm_queue import find_jobs
from bigbatch.launch.start import main

SHOWN = (
    "JobId=12 ArrayJobId=7 ArrayTaskId=3 JobName=a b UserId=me(1) Priority=1 JobState={state} Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 ExitCode={code} RunTime=00:02:03 TimeLimit=02:00:00 "
    "TimeMin=N/A PreemptTime=None NodeList=n[0-1] BatchHost=n0 TRES=cpu=2,node=2 Command=(null) "
    "WorkDir={folder} StdErr=/l/a-12.log StdOut=/l/a-12.log Power="
)
SCRIPT = "#!/bin/bash\n{line}\n"
PROGRAM = """#!/bin/sh
printf '%s\\n' "$*" >> {folder}/{name}.calls
cat > {folder}/{name}.input
cat {folder}/{name}.output
cat {folder}/{name}.errors >&2
exit $(cat {folder}/{name}.code)
"""
SCONTROL = """#!/bin/sh
case $1 in
  show) cat {folder}/shown ;;
  write) cat {folder}/script ;;
  resume) echo "$@" >> {folder}/scontrol.calls; [ ! -e {folder}/refuses ] || {{ cat {folder}/refuses >&2; exit 1; }} ;;
esac
"""
TRAIN = ("--", "train", "--config", "quickstart")


class Cluster:
    """Programs of a login node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sbatch", "squeue", "scancel"):
            self.install(name)
            self.answers(name, "")
        (folder / "scontrol").write_text(SCONTROL.format(folder=folder))
        (folder / "scontrol").chmod(0o755)
        self.has_job()

    def install(self, name: str) -> None:
        (self.folder / name).write_text(PROGRAM.format(folder=self.folder, name=name))
        (self.folder / name).chmod(0o755)

    def answers(self, name: str, output: str, *, code: int = 0, errors: str = "") -> None:
        for kind, text in (("output", output), ("code", str(code)), ("errors", errors)):
            (self.folder / f"{name}.{kind}").write_text(text)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def has_job(self, state: str = "RUNNING", *, code: str = "0:0", line: str = '# run folder: "r/{index}"') -> None:
        (self.folder / "shown").write_text(SHOWN.format(state=state, code=code, folder=self.folder))
        (self.folder / "script").write_text(SCRIPT.format(line=line))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/shapes").mkdir(parents=True)
    return Cluster(tmp_path)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_slurm_submits_what_dry_run_prints(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--dry-run", *TRAIN]) == 0
    printed = capsys.readouterr().out
    cluster.answers("sbatch", "77;cluster\n")
    assert main(["slurm", *TRAIN]) == 0
    assert (cluster.folder / "sbatch.input").read_text() == printed
    assert cluster.calls("sbatch") == ["--parsable"]
    assert (cluster.folder / "logs").is_dir(), "Slurm makes none"
    assert capsys.readouterr().out.splitlines() == [
        "job 77; its output: logs/bigbatch-77.log",
        "  bigbatch launch status 77",
        "  bigbatch launch cancel 77",
    ]
    assert main(["slurm", "--output", "kept.sbatch", *TRAIN]) == 0
    assert (cluster.folder / "kept.sbatch").read_text() == printed
    assert cluster.calls("sbatch") == ["--parsable"], "a script that is kept is not submitted"


def test_slurm_wait_ends_with_the_exit_code_of_the_job(cluster: Cluster) -> None:
    cluster.answers("sbatch", "77\n", code=3)
    assert main(["slurm", "--wait", *TRAIN]) == 3
    assert cluster.calls("sbatch") == ["--parsable --wait"]


def test_slurm_warnings_reach_the_user_whose_job_was_taken(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers("sbatch", "Welcome to Big!\n77;big\n", errors="sbatch: warning: half of the nodes\x1b are down\n")
    for options in ([], ["--wait"]):
        assert main(["slurm", *options, *TRAIN]) == 0
        for thread in threading.enumerate():
            if thread.name == "bigbatch-sbatch":  # shows what comes while it waits
                thread.join(30)
        shown = capsys.readouterr()
        assert shown.out.startswith("job 77; ")
        assert shown.err.splitlines() == ["Welcome to Big!", "sbatch: warning: half of the nodes\\x1b are down"]


def test_slurm_refusal_holds_what_a_wrapper_of_sbatch_says(cluster: Cluster) -> None:
    cluster.answers("sbatch", "no budget left\n", code=1, errors="sbatch: error: denied\nsbatch: error: failed\n")
    with pytest.raises(
        SchedulerError, match=naming("no budget left; sbatch: error: denied; sbatch: error: failed", "sinfo")
    ):
        main(["slurm", *TRAIN])


def test_slurm_job_around_the_shell_does_not_leak_into_the_next(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers("sbatch", "77\n")
    program = (cluster.folder / "sbatch").read_text()
    (cluster.folder / "sbatch").write_text(program.replace("cat >", f"env > {cluster.folder}/sbatch.env\ncat >", 1))
    of_a_job = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID", "SRUN_DEBUG", "SLURM_CPU_BIND", "SBATCH_PARTITION")
    kept = {"SLURM_CONF": "/etc/slurm/slurm.conf", "MY_OWN": "1"}
    for name, value in (dict.fromkeys(of_a_job, "7") | kept).items():
        monkeypatch.setenv(name, value)
    assert main(["slurm", *TRAIN]) == 0
    seen = dict(line.partition("=")[::2] for line in (cluster.folder / "sbatch.env").read_text().splitlines())
    assert not set(of_a_job) & seen.keys()
    assert kept.items() <= seen.items()
    assert "SBATCH_PARTITION" in capsys.readouterr().err, "a user set it on purpose"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["slurm", *TRAIN], "sbatch"),
        (["status"], "squeue"),
        (["status", "7"], "scontrol"),
        (["cancel", "7"], "scontrol"),
    ],
)
def test_slurm_that_is_not_installed_is_told_with_where_to_go(words: list[str], program: str) -> None:
    with pytest.raises(SchedulerError, match=naming(program, "login node", "--dry-run")):
        main(words)


def test_slurm_status_says_what_a_user_asks_first(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run = cluster.folder / "r/3"
    run.mkdir(parents=True)
    records = [{"kind": "start", "step": 0}, {"kind": "train", "step": 40, "epoch": 1.5, "loss": 2.25, "lr": 1}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["status", "7_3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job 7_3 (a b): RUNNING",
        "  elapsed     00:02:03 of 02:00:00",
        "  nodes       n[0-1]",
        "  restarts    2",
        "  log         /l/a-12.log",
        "  last report step 40, epoch 1.5, loss 2.25",
    ]


def test_slurm_status_without_a_number_is_of_all_jobs(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no job of yours waits or runs\n"
    cluster.answers("squeue", "12\n13\n")
    assert main(["status"]) == 0
    assert capsys.readouterr().out.count("job 7_3") == 2


@pytest.mark.parametrize(
    ("state", "code", "told"),
    [
        ("FAILED", "130:0", "130 (stopped by request; a checkpoint is saved)"),
        ("FAILED", "3:0", "3"),
        ("TIMEOUT", "0:9", "signal 9"),
        ("COMPLETED", "0:0", "0"),
    ],
)
def test_slurm_status_says_how_a_job_ended(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], state: str, code: str, told: str
) -> None:
    cluster.has_job(state, code=code)
    main(["status", "12"])
    assert f"  exit code   {told}" in capsys.readouterr().out.splitlines()


def test_slurm_status_as_json(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster.folder / "r/3").mkdir(parents=True)
    (cluster.folder / "r/3/metrics.jsonl").write_text('{"kind": "train", "step": 40, "loss": 2.25, "lr": 1}\n')
    cluster.has_job("FAILED", code="0:9")
    assert main(["status", "7_3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "job": "7_3",
            "name": "a b",
            "state": "FAILED",
            "reason": None,
            "remark": None,
            "elapsed": "00:02:03",
            "time_limit": "02:00:00",
            "nodes": "n[0-1]",
            "restarts": "2",
            "exit_code": 0,
            "signal": 9,
            "log": "/l/a-12.log",
            "run_folder": str(cluster.folder / "r/3"),
            "last_report": {"step": 40, "loss": 2.25},
        }
    ]
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


FORGOTTEN = """#!/bin/sh
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""


@pytest.fixture
def forgetful(cluster: Cluster) -> Cluster:
    """scontrol has forgotten its jobs; sacct answers as 22.05 does, with the separator that it is asked for."""
    (cluster.folder / "scontrol").write_text(FORGOTTEN)
    cluster.install("sacct")
    return cluster


def test_slurm_status_of_a_forgotten_job_is_from_accounting(
    forgetful: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ("7_0", "a|b", "CANCELLED by 1000", "0:15", "00:01:00", "02:00:00", "n[0-1]", "/w"),
        ("7_1", "a|b", "COMPLETED", "0:0", "00:02:00", "02:00:00", "n2", "/w"),
    ]
    forgetful.answers("sacct", "".join("\x1f".join(row) + "\n" for row in rows))
    assert main(["status", "7"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job 7_0 (a|b): CANCELLED",
        "  elapsed     00:01:00 of 02:00:00",
        "  nodes       n[0-1]",
        "  exit code   signal 15",
        "job 7_1 (a|b): COMPLETED",
        "  elapsed     00:02:00 of 02:00:00",
        "  nodes       n2",
        "  exit code   0",
    ]
    (asked,) = forgetful.calls("sacct")
    assert asked.startswith("--jobs=7 --allocations --noheader --parsable2 --delimiter=\x1f --format=JobID,")
    with pytest.raises(SchedulerError, match=naming("7_0", "has ended already", "CANCELLED")):
        main(["cancel", "7_0"])


@pytest.mark.parametrize(("task", "told"), [("[4-7%2]", "[4-7]"), ("[4]", "4"), ("[4,6-7]", "[4,6-7]")])
def test_slurm_accounting_names_jobs_of_an_array_as_the_queue_does(
    forgetful: Cluster, capsys: pytest.CaptureFixture[str], task: str, told: str
) -> None:
    row = (f"7_{task}", "a", "PENDING", "0:0", "00:00:00", "02:00:00", "None assigned", "/w")
    forgetful.answers("sacct", "\x1f".join(row) + "\n")
    assert main(["status", "7"]) == 0
    assert capsys.readouterr().out.startswith(f"job 7_{told} (a): PENDING\n")


def test_slurm_job_that_only_accounting_shows_running_is_not_called_another_programs(
    forgetful: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    (forgetful.folder / "scontrol").write_text(FORGOTTEN.replace("Invalid job id specified", "Unable to contact"))
    row = ("7", "a", "RUNNING", "0:0", "00:01:00", "02:00:00", "n0", "/w")
    forgetful.answers("sacct", "\x1f".join(row) + "\n")
    assert main(["status", "7"]) == 0
    remark = "  remark      from accounting only; scontrol: slurm_load_jobs error: Unable to contact"
    assert capsys.readouterr().out.splitlines()[-1] == remark
    with pytest.raises(SchedulerError, match=naming("job 7", "Unable to contact", "RUNNING", "try again later")):
        main(["cancel", "7"])
    assert forgetful.calls("scancel") == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"output": ""}, ["sacct does not know it"]),
        ({"output": "", "code": 1, "errors": "Slurm accounting storage is disabled"}, ["storage is disabled"]),
    ],
)
def test_slurm_status_of_a_job_that_accounting_does_not_know(
    forgetful: Cluster, answer: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful.answers("sacct", **answer)
    with pytest.raises(SchedulerError, match=naming("job 7", "Invalid job id", *words, "its log remains")):
        main(["status", "7"])
    (forgetful.folder / "sacct").unlink()
    monkeypatch.setenv("PATH", str(forgetful.folder))  # this machine may have Slurm's own
    with pytest.raises(SchedulerError, match=naming("job 7", "sacct is not installed")):
        main(["status", "7"])


UNREACHABLE = """#!/bin/sh
printf '%s\\n' "${0##*/}: error: fetch_config: DNS SRV lookup failed" "${0##*/}: fatal: Could not establish a \
configuration source" >&2
exit 1
"""


def test_slurm_that_is_not_reached_is_told_once(cluster: Cluster) -> None:
    for name in ("scontrol", "sacct", "squeue", "sbatch"):
        (cluster.folder / name).write_text(UNREACHABLE)
        (cluster.folder / name).chmod(0o755)
    answer = "no Slurm controller answers from this host ({}: error: fetch_config: DNS SRV lookup failed)"
    for words, program in ((["status", "7"], "scontrol"), (["cancel", "7"], "scontrol"), (["status"], "squeue")):
        with pytest.raises(SchedulerError) as refused:
            main(words)
        assert str(refused.value) == ("job 7: " if words[1:] else "") + answer.format(program)
    with pytest.raises(SchedulerError) as refused:
        main(["slurm", *TRAIN])
    assert str(refused.value) == answer.format("sbatch"), "it refused nothing"


@pytest.mark.parametrize(("command", "is_shown"), [("comm bench", True), ("train --config quickstart", False)])
def test_slurm_wait_prints_what_the_job_wrote(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], command: str, is_shown: bool
) -> None:
    cluster.answers("sbatch", "77\n")
    (cluster.folder / "logs").mkdir()
    (cluster.folder / "logs/bigbatch-77.log").write_text("all-reduce  busbw\n  1 MiB    12.5\x1b[2J\n")
    assert main(["slurm", "--nodes", "2", "--wait", "--", *command.split()]) == 0
    out = capsys.readouterr().out
    assert ("all-reduce  busbw\n  1 MiB    12.5" in out) == is_shown
    assert "\x1b" not in out


ASKS = "--batch --signal=USR2 7_3"


@pytest.mark.parametrize(
    ("state", "words", "scancel", "scontrol", "told"),
    [
        ("RUNNING", [], [ASKS], [], "checkpoint"),
        # Slurm would kill it without a signal, and drops signals to a job that its nodes have not resumed yet
        ("SUSPENDED", [], [ASKS] * 4, ["resume 7_3"], "checkpoint"),
        ("RUNNING", ["--now"], ["7_3"], [], "cancelled"),
        ("SUSPENDED", ["--now"], ["7_3"], [], "cancelled"),
        ("PENDING", [], ["7_3"], [], "cancelled"),
    ],
)
def test_slurm_cancel_asks_a_job_to_save_and_stop_or_ends_it(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    state: str,
    words: list[str],
    scancel: list[str],
    scontrol: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_queue, "RESUME_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    cluster.has_job(state)
    assert main(["cancel", "7_3", *words]) == 0
    assert (cluster.calls("scancel"), cluster.calls("scontrol")) == (scancel, scontrol)
    assert re.search(naming("7_3", told), capsys.readouterr().out)


def test_slurm_cancel_says_who_may_let_a_suspended_job_go_on(cluster: Cluster) -> None:
    cluster.has_job("SUSPENDED")
    (cluster.folder / "refuses").write_text("Access/permission denied")
    with pytest.raises(SchedulerError, match=naming("7_3", "permission denied", "operator", "--now")):
        main(["cancel", "7_3"])
    assert cluster.calls("scancel") == []


@pytest.mark.parametrize(("job", "named"), [({"line": "echo 1"}, "--now"), ({"state": "COMPLETED"}, "COMPLETED")])
def test_slurm_cancel_refuses_scripts_that_do_not_heed_it_and_jobs_that_have_ended(
    cluster: Cluster, job: dict[str, str], named: str
) -> None:
    cluster.has_job(**job)
    with pytest.raises(SchedulerError, match=naming("7_3", named)):
        main(["cancel", "12"])
    assert cluster.calls("scancel") == []


@pytest.mark.parametrize("number", ["", "x", "-1", "7_", "1; rm", "7\n", "$(id)"])
@pytest.mark.usefixtures("cluster")
def test_slurm_job_number_that_is_none_is_refused(number: str) -> None:
    with pytest.raises(LaunchOptionError, match=naming(repr(number), "bigbatch launch slurm")):
        find_jobs(number)


@pytest.fixture
def array(cluster: Cluster) -> Cluster:
    """An array: one job has ended, one runs, and four wait, at most two at a time."""
    states = {"0": "COMPLETED", "1": "RUNNING", "2-5%2": "PENDING"}
    shown = SHOWN.replace("ArrayTaskId=3", "ArrayTaskId={task}")
    lines = [shown.format(state=state, code="0:0", folder="/x\ny", task=task) for task, state in states.items()]
    (cluster.folder / "shown").write_text("\n".join(lines) + "\n")
    return cluster


@pytest.mark.usefixtures("array")
def test_slurm_status_of_an_array_is_of_all_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["status", "7"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("job")] == [
        "job 7_0 (a b): COMPLETED",
        "job 7_1 (a b): RUNNING",
        "job 7_[2-5] (a b): PENDING",
    ]
    assert sum(line.startswith("  log") for line in lines) == 2, "those to come have none"


def test_slurm_status_of_all_jobs_asks_once_for_those_of_an_array(
    array: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """%F is also a number for a part of a heterogeneous job, which %i shows as 7+0."""
    run, asked = slurm_queue.run_slurm, list[str]()
    monkeypatch.setattr(slurm_queue, "run_slurm", lambda argv: asked.append(" ".join(argv)) or run(argv))
    array.answers("squeue", "7\n7\n")
    assert main(["status"]) == 0
    assert asked == [
        "squeue --me --noheader --format=%F",
        "scontrol show job --oneliner 7",
        "scontrol write batch_script 12 -",
    ]
    assert re.findall(r"^job 7_\S+", capsys.readouterr().out, re.M) == ["job 7_1", "job 7_[2-5]"], "none that has ended"


@pytest.mark.parametrize(("words", "calls"), [([], ["--batch --signal=USR2 7_1"]), (["--now"], ["7_1"])])
def test_slurm_cancel_of_an_array_is_of_all_its_jobs(array: Cluster, words: list[str], calls: list[str]) -> None:
    main(["cancel", "7", *words])
    assert array.calls("scancel") == [*calls, "7_[2-5]"]


@pytest.mark.parametrize("action", ["status", "cancel"])
def test_slurm_job_that_is_gone_does_not_hold_up_the_others(
    action: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = '#!/bin/sh\n[ "$1$4" = show9 ] && { echo unknown >&2; exit 1; }\n'
    (cluster.folder / "scontrol").write_text(gone + SCONTROL.format(folder=cluster.folder))
    with pytest.raises(SchedulerError, match=r"^job 9: unknown\b") as caught:
        main([action, "9", "12", "9"])
    assert str(caught.value).count("unknown") == 1
    assert "job 7_3" in capsys.readouterr().out


def test_slurm_facts_are_not_taken_from_a_folder_that_looks_like_one(cluster: Cluster) -> None:
    (cluster.folder / "shown").write_text(SHOWN.format(state="RUNNING", code="0:0", folder="/a JobState=FAILED"))
    (job,) = find_jobs("12")
    assert job.state == "RUNNING"
    read = {name: job.facts[name] for name in ("JobName", "TRES", "Power")}
    assert read == {"JobName": "a b", "TRES": "cpu=2,node=2", "Power": ""}
