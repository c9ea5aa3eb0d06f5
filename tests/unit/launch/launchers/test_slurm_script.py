"""The sbatch script, run by the real bash with stand-ins for Slurm: quoting, signals, exit codes, requeueing."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
from error_texts import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from other_launchers import FAMILIES, left_by
from slurm_stubs import JOB, Stubs

from bigbatch import __version__
from bigbatch.comm.rendezvous.environ import SECRET_VARIABLE
from bigbatch.comm.rendezvous.limits import LINGER_SECONDS, ROLL_CALL_SECONDS
from bigbatch.errors import ConfigError, LaunchOptionError
from bigbatch.launch.jobs.run_folder import find_run_folder
from bigbatch.launch.jobs.spec import KUBERNETES_FIELDS, OPTIONS, JobSpec, interface_variables
from bigbatch.launch.launchers.slurm import job_script
from bigbatch.launch.launchers.slurm_script import FOREIGN_VARIABLES, directives, sbatch_script

ROOT = Path(__file__).resolve().parents[4]
TRAIN = ("train", "--config", "quickstart")
SCRIPT = sbatch_script(JobSpec(TRAIN, 2, num_nodes=2, minutes=60))
OF_WORDS = {name: option for name, option in OPTIONS.items() if option.words}


NASTY = ["a b", "it's", '"', "a\nb", "; touch x", "$(touch x)", "`touch x`", "$HOME", "\\", "#c", "-x", "", "*"]
NASTY += ["é", "\udc80"]


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


@pytest.mark.parametrize(
    ("srun", "record", "code"),
    [("137", "0", 0), ("137", "130", 130), ("6", "begun 3", 6), ("wait", "0", 0)],
    ids=["lost", "stopped", "all lost", "a rank does not respond"],
)
def test_slurm_job_that_heals_ends_as_the_first_rank_that_was_left(
    srun: str, record: str, code: int, stubs: Stubs
) -> None:
    script = sbatch_script(JobSpec(TRAIN, 2, num_nodes=2), heals=True)
    assert stubs.run(script, STUB_CODE=srun, STUB_RECORD=record)[0] == code


def test_slurm_script_gives_ranks_words_and_variables_whatever_they_hold(stubs: Stubs) -> None:
    pairs = tuple((f"V{number}", value) for number, value in enumerate(NASTY))
    code, _ = stubs.run(sbatch_script(JobSpec((*TRAIN, *NASTY), 2, environment=pairs, interface="ib0")))
    assert code == 0
    assert stubs.argv()[-len(NASTY) :] == NASTY
    given = stubs.variables()
    assert [given[name] for name, _ in pairs] == NASTY
    assert [given[name] for name, _ in interface_variables("ib0")] == ["ib0", "ib0", "=ib0"]
    assert not (stubs.folder / "x").exists()


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (f"bigbatch {__version__}", 0),
        (f"a site's greeting\nbigbatch {__version__}", 0),
        ("bigbatch 99.0", 2),
        ("", 2),
    ],
)
def test_slurm_job_that_waited_during_an_upgrade_is_refused_by_a_line(
    now: str, code: int, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its Python is where it was, and has another release, or none."""
    python = stubs.folder / "python of all"
    python.write_text(f"#!/bin/sh\necho 'warning: old' >&2\n[ \"$*\" = '-m bigbatch --version' ] && echo \"{now}\"\n")
    python.chmod(0o755)
    assert stubs.run(sbatch_script(JobSpec(TRAIN, 1), python=str(python)))[0] == code
    line = f"bigbatch: {__version__} made this job, and its Python has {now or 'none'}: repeat bigbatch launch\n"
    warned = "warning: old\n"  # what the Python itself writes may say why it does not start
    assert capfd.readouterr().err == warned + ("" if code == 0 else line)
    if code == 0:
        assert stubs.argv()[-len(TRAIN) - 3 :] == [str(python), "-m", "bigbatch", *TRAIN]


@pytest.mark.parametrize(("nodes", "counts"), [(None, ()), (2, (2, 1))])
def test_slurm_script_that_restarts_ranks_leaves_their_words_as_they_are(
    nodes: int | None, counts: tuple[int, ...], stubs: Stubs
) -> None:
    job = JobSpec((*TRAIN, *NASTY), 2, num_nodes=nodes, restarts=1)
    assert stubs.run(sbatch_script(job, node_counts=counts))[0] == 0
    assert stubs.argv()[-len(NASTY) :] == NASTY


def test_slurm_script_mounts_and_images_are_single_words(stubs: Stubs) -> None:
    mounts = ("/a;$(touch${IFS}x):/b", "/c'd:/e:ro")
    for image, expected in (
        ("a;$(touch${IFS}x).sqsh", ["--container-image=a;$(touch${IFS}x).sqsh"]),
        ("a;b.sif", ["--bind", mounts[0], "--bind", mounts[1], "a;b.sif", "bigbatch"]),
    ):
        stubs.run(sbatch_script(JobSpec(TRAIN, 2, image=image, mounts=mounts)))
        start = stubs.argv().index(expected[0])
        assert stubs.argv()[start : start + len(expected)] == expected
    assert not (stubs.folder / "x").exists()


@pytest.mark.parametrize(
    ("image", "container", "written"),
    [
        ("nvcr.io/team/bb:1", None, "--container-image='nvcr.io#team/bb:1'"),
        ("docker://localhost:5000/bb", None, "--container-image='docker://localhost:5000#bb'"),
        ("nvcr.io#team/bb", None, "--container-image='nvcr.io#team/bb'"),
        ("images.d/bb.sqsh", None, "--container-image=images.d/bb.sqsh"),
        ("team/bb", None, "--container-image=team/bb"),
        ("nvcr.io/team/bb:1", "apptainer", " docker://nvcr.io/team/bb:1 "),
    ],
)
def test_slurm_script_names_a_registry_as_the_containers_program_does(
    image: str, container: str | None, written: str
) -> None:
    """enroot would take nvcr.io/team for a folder of Docker Hub."""
    assert written in sbatch_script(JobSpec(TRAIN, 2, image=image, container=container))


@settings(max_examples=50)
@given(field=st.sampled_from(sorted(OF_WORDS.keys() - KUBERNETES_FIELDS)), data=st.data())
def test_slurm_script_directive_is_one_plain_word_or_refused(field: str, data: st.DataObject) -> None:
    pieces = st.sampled_from(["a", "b7", ",", "[1-3]", "/", ".", "%", *NASTY])
    value = data.draw(st.lists(pieces, min_size=1, max_size=4).map("".join))
    try:
        job = JobSpec((*TRAIN, "{index}") if field == "array" else TRAIN, 2, **{field: value})
    except LaunchOptionError:
        return
    for line in directives(job):
        assert line.isprintable()
        assert shlex.split(line, comments=True) == [line]
    assert all(line.startswith("#") for line in sbatch_script(job).split("\n\n")[0].splitlines())


@pytest.mark.parametrize("field", [field for field in OF_WORDS if field != "image"])
def test_slurm_script_value_that_could_be_misread_is_refused_in_one_line(field: str) -> None:
    for value in NASTY:
        with pytest.raises(LaunchOptionError, match=f"{OF_WORDS[field].flag} ") as caught:
            JobSpec(TRAIN, 2, **{field: value})
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": (("A B", "x"),)},
        {"environment": (("A", "x\0"),)},
        {"modules": ("a b",)},
        {"mounts": ("/a",)},
        {"mounts": ("/a:/b,/c:/d",)},
        {"command": ("train", "a\rb")},
        *({name: -1} for name in ("gpus_per_node", "stop_seconds", "node_rank", "restarts")),
        {"cpus_per_rank": 0},
        *({"exclude": nodes} for nodes in ("n1;x", "n[3-1]", "n[1-2", "", "n1 n2", "$(id)", "-n1", "n1\nn2")),
    ],
)
def test_slurm_script_values_that_cannot_be_are_refused_in_one_line(fields: dict[str, object]) -> None:
    with pytest.raises(LaunchOptionError) as caught:
        JobSpec(**{"command": TRAIN, "num_ranks": 2, **fields})
    assert len(str(caught.value).splitlines()) == 1


def test_slurm_script_takes_no_place_of_the_shell_that_submits(stubs: Stubs) -> None:
    outer = {name: value for family in FAMILIES for name, value in left_by(family).items()}
    outer |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SRUN_DEBUG": "3"}
    stubs.run(SCRIPT, **outer)
    assert not outer.keys() & stubs.variables().keys()
    stubs.run(sbatch_script(JobSpec(TRAIN, 2, environment=(("MASTER_ADDR", "n0"),))), **outer)
    assert stubs.variables()["MASTER_ADDR"] == "n0", "unless the job says so"


@pytest.mark.long
def test_slurm_script_shows_output_of_rank_0_in_the_jobs_own(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, shows_logs=True)
    folder = stubs.folder / f"logs/bigbatch-{JOB}"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("from the start before\n")
    process = stubs.start(SCRIPT, STUB_WAITS="1", STUB_STOPPED="130")
    while not (stubs.folder / "srun.pid").exists():
        assert process.poll() is None
    is_shown = Event()

    def train() -> None:
        while not is_shown.wait(0.1):
            with (folder / "rank-0.log").open("a") as log:
                log.write("epoch 1\n")

    writer = Thread(target=train, daemon=True)
    writer.start()
    assert process.stdout is not None
    shown = []
    while "epoch 1\n" not in shown:
        shown.append(process.stdout.readline())
        assert shown[-1], shown  # else it is the end
    is_shown.set()
    writer.join()
    process.send_signal(signal.SIGUSR2)
    assert "before" not in "".join(shown) + process.stdout.read()
    process.wait()
    assert f"--output=logs/bigbatch-{JOB}/rank-%t.log" in stubs.argv()


LIMIT, CANCEL = signal.SIGUSR1, signal.SIGUSR2
TORCHRUN = (ROOT / "launch/scripts/train-torchrun.sbatch").read_text()
OWN = sbatch_script(JobSpec(("my train.py", "-m"), 2, is_python=True), python=sys.executable)


@pytest.mark.parametrize(
    ("script", "asked", "ranks", "code", "is_requeued", "said"),
    [
        *((SCRIPT, (), str(code), code, False, f"exit code {code}") for code in (0, 3)),
        (SCRIPT, (LIMIT,), "130", 0, True, "time limit"),
        (SCRIPT, (LIMIT,), None, 0, True, "time limit"),  # the ranks were not yet listening
        (SCRIPT, (LIMIT,), "1", 1, False, "exit code 1"),
        *((SCRIPT, asked, "130", 130, False, "130") for asked in ((CANCEL,), (LIMIT, CANCEL), (CANCEL, LIMIT))),
        (SCRIPT, (CANCEL,), None, 130, False, "130"),
        (OWN, (LIMIT,), "130", 0, True, "time limit"),
        (OWN, (LIMIT,), None, 138, False, "138"),  # it would begin again at each time limit
        (TORCHRUN, (LIMIT,), "1", 0, True, ""),
        (TORCHRUN, (CANCEL,), "1", 130, False, ""),
        (TORCHRUN, (LIMIT,), "0", 0, False, ""),
    ],
)
def test_slurm_script_ends_with_the_code_of_the_ranks_or_goes_back_into_the_queue(
    stubs: Stubs,
    script: str,
    asked: tuple[signal.Signals, ...],
    ranks: str | None,
    code: int,
    is_requeued: bool,
    said: str,
) -> None:
    """ranks: the code of those that were asked, or that end by themselves; None: the signal ends them."""
    ends = (
        {"STUB_CODE": ranks or ""} if not asked else {"STUB_WAITS": "1", **({"STUB_STOPPED": ranks} if ranks else {})}
    )
    ended, output = stubs.run(script, *asked, **ends)
    assert (ended, stubs.requeued()) == (code, is_requeued)
    assert said in output
    if script == OWN:
        assert stubs.argv()[-3:] == [sys.executable, "my train.py", "-m"]


@pytest.mark.parametrize(("preempted", "is_requeued"), [("2026-01-01T00:00:00", True), ("None", False)])
def test_slurm_script_that_is_preempted_is_requeued(stubs: Stubs, preempted: str, is_requeued: bool) -> None:
    """Only its tasks get SIGTERM, so only their exit code shows the preemption."""
    code, output = stubs.run(SCRIPT, STUB_CODE="130", STUB_PREEMPT=preempted)
    assert stubs.requeued() is is_requeued
    assert ("preempted" in output) is is_requeued
    assert code == (0 if is_requeued else 130)


RUN = "runs/a 'b"


def may_start_twice(script: str) -> str:
    """The kept script is meant to be edited so; as it comes it takes longer to test."""
    assert "most=5" in script
    return script.replace("most=5", "most=2")


def goes_back(stubs: Stubs, script: str, *, restart: int, **variables: str) -> tuple[bool, int, str]:
    """Whether a job that is at its time limit goes back into the queue; its exit code and output."""
    for calls in ("scontrol.calls", "sleep.calls", "srun.pid"):
        (stubs.folder / calls).unlink(missing_ok=True)
    code, output = stubs.run(script, signal.SIGUSR1, STUB_WAITS="1", SLURM_RESTART_COUNT=str(restart), **variables)
    return stubs.requeued(), code, output


@pytest.mark.parametrize("folder", [RUN, None])
def test_slurm_script_that_never_saves_does_not_go_back_for_ever(stubs: Stubs, folder: str | None) -> None:
    """Ended by USR1 before it listens, as where its time limit is shorter than its start."""
    script = may_start_twice(sbatch_script(JobSpec(TRAIN, 2), folder=folder))
    assert goes_back(stubs, script, restart=0)[0]
    is_requeued, code, output = goes_back(stubs, script, restart=1)
    assert (is_requeued, code) == (False, 138)
    assert re.search(naming("2 starts", "no new checkpoint", f"logs/bigbatch-{JOB}", "submit"), output)
    assert goes_back(stubs, script, restart=2)[0], "a user who requeues it by hand has fixed something"


def test_slurm_script_that_saves_goes_back_however_often(stubs: Stubs) -> None:
    script = may_start_twice(sbatch_script(JobSpec(TRAIN, 2), folder=RUN))
    for restart in range(3):
        (stubs.folder / RUN / f"checkpoints/step-{restart:08d}").mkdir(parents=True)
        assert goes_back(stubs, script, restart=restart, STUB_STOPPED="130")[0]


@pytest.mark.parametrize("folder", [RUN, None])
def test_slurm_script_of_an_image_that_trains_elsewhere_goes_back_by_its_word(stubs: Stubs, folder: str | None) -> None:
    """The image's own recipe may name another run folder than that of this host does."""
    script = may_start_twice(sbatch_script(JobSpec(TRAIN, 2, image="bb.sif"), folder=folder))
    assert all(goes_back(stubs, script, restart=restart, STUB_STOPPED="130")[0] for restart in range(3))


def test_slurm_script_of_an_image_is_judged_by_the_run_folder_that_is_there(stubs: Stubs) -> None:
    (stubs.folder / RUN).mkdir(parents=True)
    script = may_start_twice(sbatch_script(JobSpec(TRAIN, 2, image="bb.sif"), folder=RUN))
    assert [goes_back(stubs, script, restart=restart, STUB_STOPPED="130")[0] for restart in range(2)] == [True, False]


def test_slurm_script_ends_where_slurm_requeues_it_for_ever(stubs: Stubs) -> None:
    """The job breaks its node each time, so its shell does not live to count its starts."""
    script = may_start_twice(sbatch_script(JobSpec(TRAIN, 2), folder=RUN))
    for restart in range(2):
        process = stubs.start(script, SLURM_RESTART_COUNT=str(restart), STUB_WAITS="1")
        while not (stubs.folder / "srun.pid").exists() or not (stubs.folder / "srun.pid").read_text():
            assert process.poll() is None
        process.kill()
        os.kill(int((stubs.folder / "srun.pid").read_text()), signal.SIGKILL)
        process.communicate(timeout=200)
        (stubs.folder / "srun.pid").unlink()
    code, output = stubs.run(script, SLURM_RESTART_COUNT="2")
    assert code == 1
    assert "no new checkpoint" in output
    assert not (stubs.folder / "srun.pid").exists()


# --- restarts ---

HEALING = sbatch_script(JobSpec(TRAIN, 2, restarts=2), folder=RUN)


def test_slurm_script_starts_ranks_again_after_a_loss(stubs: Stubs) -> None:
    code, output = stubs.run(HEALING, STUB_CODE="137 6 0")
    assert (code, stubs.num_starts(), stubs.requeued()) == (0, 3, False)
    assert output.count("restarting") == 2


@pytest.mark.parametrize(("code", "of_script"), [(1, True), (2, False)])
def test_slurm_script_starts_nothing_again_that_a_person_must_mend(stubs: Stubs, code: int, of_script: bool) -> None:
    assert (stubs.run(HEALING, STUB_CODE=str(code))[0], stubs.num_starts()) == (code, 1)
    own = sbatch_script(JobSpec(("own.py",), 2, restarts=1, is_python=True))
    assert stubs.run(own, STUB_CODE=str(code))[0] == code
    assert stubs.num_starts() == 1 + (2 if of_script else 1)


def test_slurm_script_starts_nothing_again_that_gives_way_to_others(stubs: Stubs) -> None:
    """What preempts it wants the nodes: the job goes back into the queue."""
    stubs.run(HEALING, STUB_CODE="143", STUB_PREEMPT="2026-01-01T00:00:00")
    assert stubs.num_starts() == 1
    assert stubs.requeued()


SHRINKING = sbatch_script(JobSpec(TRAIN, 8, num_nodes=4, restarts=2), folder=RUN, node_counts=(4, 2))


def place(stubs: Stubs) -> list[str]:
    """Return srun's options that place the ranks."""
    return [word for word in stubs.argv() if word.startswith(("--nodes=", "--ntasks=", "--nodelist="))]


@pytest.mark.parametrize(("code", "lost"), [("137", ""), ("1", "n1"), ("137", "n0 n1 n2 n3")])
def test_slurm_script_goes_on_without_the_nodes_that_are_lost(stubs: Stubs, code: str, lost: str) -> None:
    """On as many of the others as can share the batch: of three, two. Where none answers it is Slurm that does not."""
    ended, output = stubs.run(SHRINKING, STUB_CODE=f"{code} 0", STUB_LOST=lost)
    assert (ended, stubs.num_starts(), stubs.requeued()) == (0, 2, False), output
    given_back = f"update JobId={JOB} NodeList=n0,n2,n3" in stubs.scontrol_calls()
    if lost == "n1":
        assert place(stubs) == ["--nodes=2", "--ntasks=4", "--nodelist=n0,n2"]
        assert given_back
        assert "restarting; nodes that answer: n0 n2 n3\n" in output
    else:
        assert place(stubs) == ["--nodes=4", "--ntasks=8", "--nodelist=n0,n1,n2,n3"]
        assert not given_back


def test_slurm_script_goes_back_into_the_queue_where_too_few_nodes_are_left(stubs: Stubs) -> None:
    _, output = stubs.run(SHRINKING, STUB_CODE="137", STUB_LOST="n1 n2 n3")
    assert (stubs.num_starts(), stubs.requeued()) == (1, True)
    assert re.search(naming("requeuing", "too few nodes are left: n0"), output)


@pytest.mark.parametrize(("code", "lost"), [("2", "n1"), ("1", "")])
def test_slurm_script_starts_nothing_again_on_fewer_nodes_that_a_person_must_mend(
    stubs: Stubs, code: str, lost: str
) -> None:
    assert stubs.run(SHRINKING, STUB_CODE=code, STUB_LOST=lost)[0] == int(code)
    assert (stubs.num_starts(), stubs.requeued()) == (1, False)


@pytest.mark.parametrize(("script", "lost"), [(HEALING, ""), (SHRINKING, "n1")])
def test_slurm_script_starts_ranks_again_as_often_as_stated_without_a_newer_checkpoint(
    script: str, lost: str, stubs: Stubs
) -> None:
    code, output = stubs.run(script, STUB_CODE="137", STUB_LOST=lost)
    assert (code, stubs.num_starts()) == (137, 3)
    assert re.search(naming("3 starts", "no new checkpoint", RUN), output)


def test_slurm_script_states_the_numbers_of_nodes_that_can_share_the_batch() -> None:
    """12 ghost batches on nodes of two ranks: any; 6 that two ranks share: 6, 3, 2 or 1. An own script: any."""
    batch = ("--batch.global_batch_size=12", "--batch.microbatch_size=1")
    job = JobSpec((*TRAIN, *batch, "--batch.bn_span=1"), 12, num_nodes=6, restarts=1)
    assert "for count in {6..1} 0;" in job_script(job, folder=None)
    assert "for count in 6 3 2 1 0;" in job_script(
        replace(job, command=(*TRAIN, *batch, "--batch.bn_span=2")), folder=None
    )
    own = JobSpec(("own.py",), 12, num_nodes=6, restarts=1, is_python=True)
    assert "for count in {6..1} 0;" in job_script(own, folder=None)
    assert "for count" not in job_script(replace(job, restarts=None), folder=None)


def test_slurm_script_leaves_to_slurm_what_slurm_itself_ends(stubs: Stubs) -> None:
    process = stubs.start(SCRIPT, STUB_WAITS="1", STUB_STOPPED="130")
    while not (stubs.folder / "srun.pid").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # scancel signals the tasks, too
    subprocess.run(["bash", "-c", 'kill -TERM "$(cat srun.pid)"'], cwd=stubs.folder, check=True)
    process.communicate(timeout=200)
    assert process.returncode == 130
    assert not stubs.requeued()


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (TRAIN, 60),
        ((*TRAIN, "--comm.timeout_seconds", "1000.5"), 1001),
        (("comm", "bench"), 300),
    ],
)
def test_slurm_script_gives_ranks_the_time_to_name_a_lost_one(words: tuple[str, ...], seconds: int) -> None:
    script = job_script(JobSpec(words, 2, preflight="warn"), folder=None)
    waits = [int(wait) for wait in re.findall(r"srun .*--wait=(\d+)", script)]
    assert len(waits) == 2
    assert all(wait > seconds + ROLL_CALL_SECONDS + LINGER_SECONDS for wait in waits)


@pytest.mark.parametrize("path", sorted((ROOT / "launch/scripts").iterdir()), ids=lambda path: path.name)
def test_ready_scripts_are_scripts_that_take_no_place_in_another_job(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert f"unset {FOREIGN_VARIABLES}" in text
    if "srun" in text:
        assert "${!SRUN_@}" in text
        assert f"export {SECRET_VARIABLE}=$(od -An -N32" in text, "each start has its own"


def test_ready_mpirun_script_gives_mpirun_its_words(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTS": "n0:8,n1:8", "INTERFACE": "eth0"}
    command = ["bash", str(ROOT / "launch/scripts/mpirun.sh"), *TRAIN, "a b"]
    words = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:2] == ["--host", "n0:8,n1:8"]
    assert words[-5:] == ["bigbatch", *TRAIN, "a b"]
    assert [words[i + 1] for i, word in enumerate(words) if word.endswith("_if_include")] == ["eth0", "eth0"]
    assert {word for word in words if word.endswith("=eth0")} == {
        "=".join(each) for each in interface_variables("eth0")
    }


def test_slurm_script_time_limit_must_leave_time_to_train() -> None:
    with pytest.raises(LaunchOptionError, match=naming("--time", "3 min", "--stop-seconds")):
        sbatch_script(JobSpec(TRAIN, 1, minutes=3))
    assert "--time=00:03:00" in sbatch_script(JobSpec(TRAIN, 1, minutes=3, stop_seconds=60))
    script = sbatch_script(JobSpec(TRAIN, 1, minutes=1, stop_seconds=0))
    assert "--time=00:01:00" in script
    assert "--signal=B:USR1@0\n" in script


@pytest.mark.parametrize("job", [JobSpec(TRAIN, 1, array="0-3"), JobSpec((*TRAIN, "{index}"), 1)])
def test_slurm_script_jobs_of_an_array_must_differ(job: JobSpec) -> None:
    with pytest.raises(LaunchOptionError, match=naming("--array", "{index}", "--run.directory")):
        sbatch_script(job)


@pytest.mark.parametrize(
    ("words", "array", "named"),
    [
        (("--run.resume", "never"), None, ("--run.resume never", "auto", "--run.directory")),
        (("--run.resume", "runs/a/checkpoints/step-00000001"), None, ("--run.resume runs/a/", "auto")),
        (("--run.epoch", "1"), None, ("run.epoch;", "run.epochs")),
        (("--run.seed", "{index}"), "0-3", ("--run.directory runs/quickstart", "{index}")),
    ],
)
def test_run_folder_of_a_job_that_would_fail_in_the_queue_is_refused_before(
    words: tuple[str, ...], array: str | None, named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        find_run_folder(JobSpec((*TRAIN, *words), 1, array=array))


def test_run_folder_of_an_array_is_the_one_in_which_its_jobs_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/fast")
    job = JobSpec((*TRAIN, "--run.directory", "$SCRATCH/{index}"), 1, array="0-7")
    assert find_run_folder(job) == "/fast/{index}"


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ((), "runs/quickstart"),
        (("--run.directory", "runs/a"), "runs/a"),
        (("--run.directory", "/mounted/runs"), None),
        (("--run.of_its_release", "1"), None),
    ],
)
def test_run_folder_of_an_image_is_the_host_s_answer_if_both_see_it(words: tuple[str, ...], folder: str | None) -> None:
    """The work folder has the same path in the image."""
    assert find_run_folder(JobSpec((*TRAIN, *words), 1, image="bb.sif")) == folder
